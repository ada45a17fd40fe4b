"""Compressed activations with tensor parallelism, with casts, and offloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.analyze.prepare import prepare
from schedlang.passes.prove import Case, prove
from schedlang.runtime.offload import offloaded_activations
from schedlang.runtime.storage.saved_tensors_slot import is_cast_copy
from tests import models
from tests.engine import Threads
from tests.memory.test_compressed_activations import PIPELINE, ROW, gpt2_dropout, token_batches
from tests.proofs import assert_proven, assert_same, make_plan, train_on_ranks
from tests.tiers import thin_out
from tests.zoo.scenes import GPT2, LLAMA

LLAMA_ROW = "model.layers.*  compress(activations, {}, block=16)\n"


@pytest.mark.parametrize(
    "model, rows, mesh",
    thin_out(
        [
            (gpt2_dropout, GPT2 + ROW.format("int4"), "tp=2"),
            (lambda: models.llama(2), LLAMA + LLAMA_ROW.format("int2"), "tp=2"),
            (gpt2_dropout, GPT2 + ROW.format("int2") + "zero(stage=3, over=dp)", "tp=2, dp=2"),
            (gpt2_dropout, GPT2 + ROW.format("int8") + PIPELINE, "tp=2, pp=2"),
            (lambda: models.llama(1, attend="eager"), LLAMA + LLAMA_ROW.format("int4"), "tp=2"),
            (
                models.phi3,
                "model.layers.*.mlp.gate_up_proj shard(col, blocks=2, over=tp)\n"
                "model.layers.*.mlp.down_proj shard(row, over=tp)\n" + LLAMA_ROW.format("int2"),
                "tp=3",
            ),
        ],
        6,
    ),
)
def test_ranks_round_their_parts(
    threads: Threads, model: Callable[[], nn.Module], rows: str, mesh: str
) -> None:
    """With tensor parallelism each rank compresses blocks of its shard; one process that compresses
    the same blocks has equal gradients."""
    report = assert_proven(threads, make_plan(model(), rows, mesh, "lossy"), token_batches())
    assert report.equivalence == "relaxed (lossy)"


def test_masks_and_heads_are_told_apart(threads: Threads) -> None:
    """A mask of one head is not sharded where queries are; a second batch without a mask works
    too."""
    plan = make_plan(models.gpt2(2), GPT2 + ROW.format("int4"), "tp=2", "lossy")
    assert_proven(threads, plan, [models.tokens(rows=4), models.tokens(rows=5, mask=False)])


# -- cast ----------------------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.parametrize(
    "rows, mesh",
    [
        ("cast(bf16, params=true)\n" + ROW.format("int8"), ""),
        ("cast(bf16)\n" + GPT2 + ROW.format("int4"), "tp=2"),
        ("transformer.h.*  cast(fp16)\n" + ROW.format("int8") + PIPELINE, "pp=2"),
        (
            "transformer.h.*  cast(bf16, params=true)\n"
            + ROW.format("int8")
            + "zero(stage=3, over=dp)",
            "dp=2",
        ),
    ],
)
def test_what_is_cast_is_rounded(threads: Threads, rows: str, mesh: str) -> None:
    """In float64 equal to one process; in low dtypes as accurate as one process with the same
    casts."""
    plan = make_plan(models.gpt2(2).float(), rows, mesh, "lossy, dtype")
    batches = tuple(models.tokens(rows=4, seed=seed) for seed in range(2))
    report = prove(Case(plan, batches, dtype="float32"), pool=threads)
    failed = [(r.kind, r.step, r.name, r.error, r.note) for r in report.rows if not r.ok]
    assert not failed, failed[:6]
    assert report.equivalence == "relaxed (lossy, dtype)"


@pytest.mark.parametrize("rows", ["cast(bf16)", "cast(bf16, params=true)"])
def test_casts_of_weights_stay(rows: str) -> None:
    """In a cast module 16-bit activations are compressed, never a weight."""
    from schedlang.passes.lower.build import build
    from schedlang.runtime.activation_memory import quantized
    from schedlang.runtime.forward import layers_of
    from tests.proofs import sgd

    plan = make_plan(models.gpt2(1).float(), rows + "\n" + ROW.format("int8"), "", "lossy, dtype")
    program = build(plan, models.tokens(rows=4), optimizer=sgd)
    module = program.assembly.module.get_submodule("transformer.h.0")
    layers = layers_of(module)
    assert layers is not None
    layer: Any = layers.kinds["code"]
    compressed: list[torch.Tensor] = []
    layer.tally.add = lambda tensor, result: compressed.append(tensor.detach().clone())
    program.train_step(models.tokens(rows=4))
    assert isinstance(layer, quantized.QuantizedActivations) and any(
        t.dtype == torch.bfloat16 for t in compressed
    )
    weights = [p.detach() for p in module.parameters()]
    assert not any(is_cast_copy(tensor, weight) for tensor in compressed for weight in weights)


# -- moved ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["cpu", "disk"])
def test_whole_numbers_move(threads: Threads, monkeypatch: pytest.MonkeyPatch, to: str) -> None:
    """If the compressed tensors are offloaded too, training is bitwise equal, and the codes are
    what moves."""
    monkeypatch.setattr(offloaded_activations, "MIN_BYTES", 128)
    moved: list[tuple[torch.dtype, int]] = []
    original_init = offloaded_activations._Copy.__init__

    def copied(self: Any, store: Any, tensor: torch.Tensor) -> None:
        moved.append((tensor.dtype, tensor.untyped_storage().nbytes()))
        original_init(self, store, tensor)

    monkeypatch.setattr(offloaded_activations._Copy, "__init__", copied)
    inner = "transformer.h.*.mlp  compress(activations, int8, block=32)\n"
    for row in (ROW.format("int8"), inner):
        with_offload, without_offload = (
            train_on_ranks(
                threads, make_plan(models.gpt2(2), row + offload_row, "", "lossy"), token_batches()
            )
            for offload_row in (f"transformer.h.*  offload(activations, to={to})", "")
        )
        assert_same(with_offload, without_offload)
        assert any(dtype == torch.uint8 for dtype, _ in moved)
        moved.clear()


# -- refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rows, mesh, code, said",
    [
        (
            "transformer.h.1.mlp  offload(activations)\n" + ROW.format("int8"),
            "",
            "S857",
            "offloaded inside",
        ),
        (
            "transformer.h.*.mlp.c_fc  shard(col, over=tp, uneven=pad)\n"
            "transformer.h.*.mlp.c_proj  shard(row, over=tp, uneven=pad)\n" + ROW.format("int8"),
            "tp=3",
            "S935",
            "a single process would",
        ),
    ],
)
def test_refused(rows: str, mesh: str, code: str, said: str) -> None:
    """Shards of unequal size, and modules where offloading moves what is not compressed."""
    with pytest.raises(Refusal) as error:
        prepare(make_plan(models.gpt2(2, tied=False), rows, mesh, "lossy"), models.tokens(rows=4))
    assert code in error.value.render() and said in error.value.render(), error.value.render()
