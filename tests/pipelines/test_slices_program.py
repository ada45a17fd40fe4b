"""Programs whose pipelines cut sequences: trained as the plain loop trains, and what they hold."""

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
from tests.proofs import adamw, assert_near, planned, proven, sequential, steps

BATCHES = [models.tokens(rows=7, length=11, seed=seed) for seed in (1, 2, 3)]
PLAIN = [models.tokens(rows=7, length=11, mask=False, seed=seed) for seed in (1, 2, 3)]
SEED = 5


def sliced(model: Any, blocks: str, mesh: str, order: str, *rows: str) -> Plan:
    """A plan that cuts the blocks into stages and the sequences into slices."""
    lines = [f"{blocks}.*  checkpoint()"] if "checkpoint" in rows else []
    lines += [f"{blocks}  pipeline_split(over=pp)"]
    lines += [f"{blocks}.*.**:Linear  split_backward()"] if "split" in rows else []
    lines += ["zero(stage=3, over=dp)"] if "dp" in mesh else []
    return planned(model, "\n".join([*lines, f"pipeline({order})"]), mesh)


def same(threads: Threads, plan: Plan, model: Any, batches: Any) -> None:
    """Three steps of AdamW: losses, gradients, norms, parameters and state are the loop's."""
    given = (plan, tuple(batches), adamw, None, {"seed": SEED})
    found = threads.run(steps, plan.mesh.world, *given)[0]
    assert_near(found, sequential(model, batches, adamw, seed=SEED))


def test_llama_by_seq1f1b(threads: Threads) -> None:
    """Rotary positions, shared key heads, padded rows, eleven tokens in slices, recomputed."""
    model = models.llama(4)
    order = 'order="Seq1F1B", micro=3, slices=3'
    same(threads, sliced(model, "model.layers", "pp=2", order, "checkpoint"), model, BATCHES)


def test_split_backwards(threads: Threads) -> None:
    """What later slices owe to keys arrives with the input gradients, however late weights are."""
    model = Causal()
    order = 'order="Seq1F1B", micro=2, slices=3'
    plan = sliced(model, "blocks", "pp=2", order, "split")
    assert Kind.W in set(timeline_of(plan).kind.tolist())
    same(threads, plan, model, PLAIN)


def test_gpt2_by_terapipe_on_four_ranks(threads: Threads) -> None:
    """Learned positions, tied ends, dropout in four places."""
    model = models.gpt2(4, dropout=0.2)
    order = 'order="TeraPipe", micro=2, slices=4'
    same(threads, sliced(model, "transformer.h", "pp=4", order), model, BATCHES)


def test_a_model_of_ones_own(threads: Threads) -> None:
    """Attention with a mask made of a table and of padding, dropout, the loss its own."""
    model = Causal("mask", dropout=0.2)
    order = 'order="Seq1F1B", micro=2, slices=3'
    same(threads, sliced(model, "blocks", "pp=2", order), model, BATCHES)


def test_without_a_cut(threads: Threads) -> None:
    """One rank runs slices, too: activations of a part of the sequence at a time."""
    model = Causal()
    plan = planned(model, 'pipeline(order="Seq1F1B", micro=2, slices=3)')
    same(threads, plan, model, PLAIN)


@pytest.mark.deep
@pytest.mark.parametrize("mesh", ["dp=2, pp=2", "pp=2, tp=2"])
def test_proof(threads: Threads, mesh: str) -> None:
    """The whole proof, static checks included, beside sharded state and sharded blocks."""
    from tests.training.test_build import LLAMA, LLAMA_ENDS

    model = models.llama(4)
    if "tp" not in mesh:
        plan = sliced(model, "model.layers", mesh, 'order="Seq1F1B", micro=3, slices=3')
    else:
        rows = "  model.layers  pipeline_split(over=pp)\n"
        order = '  pipeline(order="Seq1F1B", micro=3, slices=3)\n'
        plan = planned(model, LLAMA + LLAMA_ENDS + rows + order, mesh)
    batches = [models.tokens(rows=9, seed=seed) for seed in (1, 2, 3)]
    assert proven(threads, plan, batches).ok


def test_too_many_slices_are_refused() -> None:
    """More slices than tokens: how many there may be is said, before anything runs."""
    plan = planned(models.llama(2), 'pipeline(order="Seq1F1B", micro=1, slices=12)')
    with pytest.raises(Refusal, match="11 tokens are too few for 12 slices"):
        build(plan, BATCHES[0])


@contextmanager
def counting(most: list[int]) -> Iterator[None]:
    """Bytes that autograd keeps for backward beside parameters, each memory once; the greatest."""
    held: dict[int, list[int]] = {}
    live = [0]

    class Kept:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor
            storage = tensor.untyped_storage()
            self.key = storage._cdata
            entry = held.setdefault(self.key, [0, 0])
            entry[0] += 1
            if entry[0] == 1:
                entry[1] = storage.nbytes()
                live[0] += entry[1]
                most.append(live[0])

        def __del__(self) -> None:
            entry = held[self.key]
            entry[0] -= 1
            if not entry[0]:
                live[0] -= held.pop(self.key)[1]

    def pack(tensor: Tensor) -> Any:
        return tensor if isinstance(tensor, torch.nn.Parameter) else Kept(tensor)

    def unpack(kept: Any) -> Tensor:
        return kept.tensor if isinstance(kept, Kept) else kept

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def peak(plan: Plan, batch: Any) -> int:
    """The most bytes kept for backward on this rank in one step."""
    most = [0]
    program = build(plan, batch)
    with counting(most):
        program.train_step(batch)
    return max(most)


def test_peak_of_activations(threads: Threads) -> None:
    """On the first of two ranks 1F1B keeps two microbatches, four slices (1 + 4) / 4 of one.

    Only keys and values lie there for the whole sequence, of both microbatches that are begun.
    """
    batch = models.tokens(rows=64, length=32, mask=False)
    peaks = []
    for order in ('order="1F1B", micro=4', 'order="Seq1F1B", micro=4, slices=4'):
        plan = sliced(Causal(layers=4), "blocks", "pp=2", order)
        peaks.append(threads.run(peak, 2, plan, batch)[0])
    carried = 2 * 2 * (16 * 32 * WIDTH) * 8  # of two layers: bytes in a microbatch of 16 rows
    others = peaks[0] / 2 - carried
    assert peaks[1] == pytest.approx((1 + 4) / 4 * others + 2 * carried, rel=0.02)
    assert peaks[1] < 0.75 * peaks[0]
