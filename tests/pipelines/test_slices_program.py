"""Programs with sliced pipelines: training equals the plain loop; peak of activations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.plan import Plan
from schedlang.passes.lower.build import build
from schedlang.passes.partition.staging import timeline_of
from schedlang.pipeline.timeline.table import Kind
from tests import models
from tests.causal import WIDTH, Causal
from tests.engine.threads import Threads
from tests.proofs import (
    adamw,
    assert_near,
    assert_proven,
    make_plan,
    train_on_ranks,
    train_sequential,
)

BATCHES = [models.tokens(rows=7, length=11, seed=seed) for seed in (1, 2, 3)]
PLAIN = [models.tokens(rows=7, length=11, mask=False, seed=seed) for seed in (1, 2, 3)]
SEED = 5


def sliced_plan(model: Any, blocks: str, mesh: str, order: str, *rows: str) -> Plan:
    """A plan that cuts the blocks into stages and the sequences into slices."""
    lines = [f"{blocks}.*  checkpoint()"] if "checkpoint" in rows else []
    lines += [f"{blocks}  pipeline_split(over=pp)"]
    lines += [f"{blocks}.*.**:Linear  split_backward()"] if "split" in rows else []
    lines += ["zero(stage=3, over=dp)"] if "dp" in mesh else []
    return make_plan(model, "\n".join([*lines, f"pipeline({order})"]), mesh)


def assert_trains_equal(threads: Threads, plan: Plan, model: Any, batches: Any) -> None:
    """Assert that three steps of AdamW equal the plain loop's."""
    observed = train_on_ranks(threads, plan, batches, adamw, seed=SEED)
    assert_near(observed, train_sequential(model, batches, adamw, seed=SEED))


def test_llama_by_seq1f1b(threads: Threads) -> None:
    """Rotary positions, shared key heads, padded rows, eleven tokens in slices, recomputed."""
    model = models.llama(4)
    order = 'order="Seq1F1B", micro=3, slices=3'
    assert_trains_equal(
        threads, sliced_plan(model, "model.layers", "pp=2", order, "checkpoint"), model, BATCHES
    )


def test_split_backwards(threads: Threads) -> None:
    """Gradients of keys arrive with the input gradients, with late weight gradients."""
    model = Causal()
    order = 'order="Seq1F1B", micro=2, slices=3'
    plan = sliced_plan(model, "blocks", "pp=2", order, "split")
    assert Kind.W in set(timeline_of(plan).kind.tolist())
    assert_trains_equal(threads, plan, model, PLAIN)


def test_gpt2_by_terapipe_on_four_ranks(threads: Threads) -> None:
    """Learned positions, tied ends, dropout in four places."""
    model = models.gpt2(4, dropout=0.2)
    order = 'order="TeraPipe", micro=2, slices=4'
    assert_trains_equal(threads, sliced_plan(model, "transformer.h", "pp=4", order), model, BATCHES)


def test_a_model_of_ones_own(threads: Threads) -> None:
    """A user's model: a mask from a table and padding, dropout, its own loss."""
    model = Causal("mask", dropout=0.2)
    order = 'order="Seq1F1B", micro=2, slices=3'
    assert_trains_equal(threads, sliced_plan(model, "blocks", "pp=2", order), model, BATCHES)


def test_without_a_cut(threads: Threads) -> None:
    """Slices without pipeline stages, on one rank."""
    model = Causal()
    plan = make_plan(model, 'pipeline(order="Seq1F1B", micro=2, slices=3)')
    assert_trains_equal(threads, plan, model, PLAIN)


@pytest.mark.deep
@pytest.mark.parametrize("mesh", ["dp=2, pp=2", "pp=2, tp=2"])
def test_proof(threads: Threads, mesh: str) -> None:
    """The full proof, static checks included, with ZeRO or tensor parallelism."""
    from tests.training.test_build import LLAMA, LLAMA_ENDS

    model = models.llama(4)
    if "tp" not in mesh:
        plan = sliced_plan(model, "model.layers", mesh, 'order="Seq1F1B", micro=3, slices=3')
    else:
        rows = "  model.layers  pipeline_split(over=pp)\n"
        order = '  pipeline(order="Seq1F1B", micro=3, slices=3)\n'
        plan = make_plan(model, LLAMA + LLAMA_ENDS + rows + order, mesh)
    batches = [models.tokens(rows=9, seed=seed) for seed in (1, 2, 3)]
    assert assert_proven(threads, plan, batches).ok


def test_too_many_slices_are_refused() -> None:
    """More slices than tokens: how many there may be is said, before anything runs."""
    plan = make_plan(models.llama(2), 'pipeline(order="Seq1F1B", micro=1, slices=12)')
    with pytest.raises(Refusal, match="11 tokens are too few for 12 slices"):
        build(plan, BATCHES[0])


@contextmanager
def count_saved(totals: list[int]) -> Iterator[None]:
    """Append each new total of saved bytes (without parameters, each storage once) to the list."""
    entries: dict[int, list[int]] = {}
    live = [0]

    class Kept:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor
            storage = tensor.untyped_storage()
            self.key = storage._cdata
            entry = entries.setdefault(self.key, [0, 0])
            entry[0] += 1
            if entry[0] == 1:
                entry[1] = storage.nbytes()
                live[0] += entry[1]
                totals.append(live[0])

        def __del__(self) -> None:
            entry = entries[self.key]
            entry[0] -= 1
            if not entry[0]:
                live[0] -= entries.pop(self.key)[1]

    def pack(tensor: Tensor) -> Any:
        return tensor if isinstance(tensor, torch.nn.Parameter) else Kept(tensor)

    def unpack(saved: Any) -> Tensor:
        return saved.tensor if isinstance(saved, Kept) else saved

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def peak_saved(plan: Plan, batch: Any) -> int:
    """The peak of bytes saved for backward on this rank in one step."""
    totals = [0]
    program = build(plan, batch)
    with count_saved(totals):
        program.train_step(batch)
    return max(totals)


def test_peak_of_activations(threads: Threads) -> None:
    """On the first of two ranks 1F1B keeps two microbatches, with four slices (1 + 4) / 4 of one.

    Keys and values are kept for the full sequence of both microbatches.
    """
    batch = models.tokens(rows=64, length=32, mask=False)
    peaks = []
    for order in ('order="1F1B", micro=4', 'order="Seq1F1B", micro=4, slices=4'):
        plan = sliced_plan(Causal(layers=4), "blocks", "pp=2", order)
        peaks.append(threads.run(peak_saved, 2, plan, batch)[0])
    key_bytes = 2 * 2 * (16 * 32 * WIDTH) * 8  # of two layers: bytes in a microbatch of 16 rows
    not_carried = peaks[0] / 2 - key_bytes
    assert peaks[1] == pytest.approx((1 + 4) / 4 * not_carried + 2 * key_bytes, rel=0.02)
    assert peaks[1] < 0.75 * peaks[0]
