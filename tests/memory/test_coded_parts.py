"""Tests of activations in fewer bits where ranks split them, where they are cast, or move."""

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
from tests.memory.test_coded import PIPE, ROW, dropping, tokens
from tests.proofs import assert_same, planned, proven, trained
from tests.tiers import thinned
from tests.zoo.scenes import GPT2, LLAMA

CODED = "model.layers.*  compress(activations, {}, block=16)\n"


@pytest.mark.parametrize(
    "model, rows, mesh",
    thinned(
        [
            (dropping, GPT2 + ROW.format("int4"), "tp=2"),
            (lambda: models.llama(2), LLAMA + CODED.format("int2"), "tp=2"),
            (dropping, GPT2 + ROW.format("int2") + "zero(stage=3, over=dp)", "tp=2, dp=2"),
            (dropping, GPT2 + ROW.format("int8") + PIPE, "tp=2, pp=2"),
            (lambda: models.llama(1, attend="eager"), LLAMA + CODED.format("int4"), "tp=2"),
            (
                models.phi3,
                "model.layers.*.mlp.gate_up_proj shard(col, blocks=2, over=tp)\n"
                "model.layers.*.mlp.down_proj shard(row, over=tp)\n" + CODED.format("int2"),
                "tp=3",
            ),
        ],
        6,
    ),
)
def test_ranks_round_their_parts(
    threads: Threads, model: Callable[[], nn.Module], rows: str, mesh: str
) -> None:
    """Under tensor parallelism, of heads, columns and tokens, each rank rounds blocks of its part;
    one process that rounds the same blocks of the whole agrees in every gradient."""
    report = proven(threads, planned(model(), rows, mesh, "lossy"), tokens())
    assert report.equivalence == "relaxed (lossy)"


def test_masks_and_heads_are_told_apart(threads: Threads) -> None:
    """A mask of one head, as wide as queries, is whole where these are split; the second batch has
    none, and what a rank of one head takes for its results is the same tensor in both."""
    plan = planned(models.gpt2(2), GPT2 + ROW.format("int4"), "tp=2", "lossy")
    proven(threads, plan, [models.tokens(rows=4), models.tokens(rows=5, mask=False)])


# -- cast ----------------------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.parametrize(
    "rows, mesh",
    [
        ("cast(bf16, params=true)\n" + ROW.format("int8"), ""),
        ("cast(bf16)\n" + GPT2 + ROW.format("int4"), "tp=2"),
        ("transformer.h.*  cast(fp16)\n" + ROW.format("int8") + PIPE, "pp=2"),
        (
            "transformer.h.*  cast(bf16, params=true)\n"
            + ROW.format("int8")
            + "zero(stage=3, over=dp)",
            "dp=2",
        ),
    ],
)
def test_what_is_cast_is_rounded(threads: Threads, rows: str, mesh: str) -> None:
    """In float64 as one process that rounds; in low dtypes as near as one that casts, too."""
    plan = planned(models.gpt2(2).float(), rows, mesh, "lossy, dtype")
    batches = tuple(models.tokens(rows=4, seed=seed) for seed in range(2))
    report = prove(Case(plan, batches, dtype="float32"), pool=threads)
    bad = [(r.kind, r.step, r.name, r.error, r.note) for r in report.rows if not r.ok]
    assert not bad, bad[:6]
    assert report.equivalence == "relaxed (lossy, dtype)"


@pytest.mark.parametrize("rows", ["cast(bf16)", "cast(bf16, params=true)"])
def test_casts_of_weights_stay(rows: str) -> None:
    """Of a module that is cast, what is coded are activations of 16 bits, and never a weight."""
    from schedlang.passes.lower.build import build
    from schedlang.runtime.activation_memory import quantized
    from schedlang.runtime.forward import layers_of
    from tests.proofs import sgd

    plan = planned(models.gpt2(1).float(), rows + "\n" + ROW.format("int8"), "", "lossy, dtype")
    program = build(plan, models.tokens(rows=4), optimizer=sgd)
    module = program.assembly.module.get_submodule("transformer.h.0")
    layers = layers_of(module)
    assert layers is not None
    layer: Any = layers.kinds["code"]
    seen: list[torch.Tensor] = []
    layer.tally.add = lambda tensor, made: seen.append(tensor.detach().clone())
    program.train_step(models.tokens(rows=4))
    assert isinstance(layer, quantized.QuantizedActivations) and any(
        t.dtype == torch.bfloat16 for t in seen
    )
    weights = [p.detach() for p in module.parameters()]
    assert not any(is_cast_copy(tensor, weight) for tensor in seen for weight in weights)


# -- moved ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["cpu", "disk"])
def test_whole_numbers_move(threads: Threads, monkeypatch: pytest.MonkeyPatch, to: str) -> None:
    """Offloaded as well, in the same modules or in some of theirs, training is bitwise the same,
    and what moves are the bytes of the whole numbers."""
    monkeypatch.setattr(offloaded_activations, "MIN_BYTES", 128)
    moved: list[tuple[torch.dtype, int]] = []
    plain = offloaded_activations._Copy.__init__

    def copied(self: Any, store: Any, tensor: torch.Tensor) -> None:
        moved.append((tensor.dtype, tensor.untyped_storage().nbytes()))
        plain(self, store, tensor)

    monkeypatch.setattr(offloaded_activations._Copy, "__init__", copied)
    inner = "transformer.h.*.mlp  compress(activations, int8, block=32)\n"
    for row in (ROW.format("int8"), inner):
        seen, still = (
            trained(threads, planned(models.gpt2(2), row + more, "", "lossy"), tokens())
            for more in (f"transformer.h.*  offload(activations, to={to})", "")
        )
        assert_same(seen, still)
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
    """Where parts are not equal, and where what moves is not what is rounded."""
    with pytest.raises(Refusal) as error:
        prepare(planned(models.gpt2(2, tied=False), rows, mesh, "lossy"), models.tokens(rows=4))
    assert code in error.value.render() and said in error.value.render(), error.value.render()
