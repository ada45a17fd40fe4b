"""Compressed activations with checkpoints that save results, groups and plans."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.analyze.prepare import prepare
from schedlang.passes.lower.build import build
from schedlang.passes.prove import Case, prove
from schedlang.runtime.activation_memory import selective
from schedlang.runtime.activation_memory.quantized import Quantization, quantize_saved
from schedlang.runtime.activation_memory.recompute import checkpoint
from tests import models
from tests.engine import Threads
from tests.memory.test_compressed_activations import (
    PIPELINE,
    ROW,
    gpt2_dropout,
    random_tensor,
    token_batches,
)
from tests.proofs import assert_proven, make_plan, sgd
from tests.storage_counter import StorageCounter
from tests.zoo.scenes import GPT2, LLAMA

SAVE = "transformer.h.*  checkpoint(save=[{}])\n"
MLP_SAVE = "transformer.h.*.mlp  checkpoint(save=[linear])\n"
GROUP = "transformer.h.*  checkpoint(group={})\n"
PLAN = "transformer.h.*  checkpoint(plan={}, memory={})\n"
RING = "transformer.h.*.attn  context_parallel(ring, over=cp)\n"


def four_blocks() -> nn.Module:
    """Return GPT-2 with four blocks and dropout."""
    return gpt2_dropout(4)


@pytest.mark.parametrize(
    "model, rows, mesh",
    [
        (
            gpt2_dropout,
            SAVE.format("linear") + ROW.format("int2") + "zero(stage=3, over=dp)",
            "dp=2",
        ),
        (four_blocks, GROUP.format(2) + ROW.format("int2") + "zero(stage=1, over=dp)", "dp=2"),
        (lambda: gpt2_dropout(1), GPT2 + SAVE.format("linear") + ROW.format("int2"), "tp=2"),
        *(
            pytest.param(*case, marks=pytest.mark.deep)
            for case in [
                (
                    gpt2_dropout,
                    SAVE.format("linear, attention") + ROW.format("int4") + PIPELINE,
                    "pp=2",
                ),
                (gpt2_dropout, MLP_SAVE + ROW.format("int8"), ""),
                (
                    four_blocks,
                    "transformer.h.*  checkpoint(group=2, every=2, save=[linear])\n"
                    + ROW.format("adaptive, bits=4")
                    + "zero(stage=3, over=dp)",
                    "dp=2",
                ),
                (four_blocks, GPT2 + GROUP.format(2) + ROW.format("int4"), "tp=2"),
                (four_blocks, GPT2 + PLAN.format("rotor", "300KiB") + ROW.format("int2"), "tp=2"),
                (
                    lambda: models.llama(1),
                    LLAMA + "model.layers.*  checkpoint(save=[linear, attention])\n"
                    "model.layers.*  compress(activations, int4, block=16)",
                    "tp=2",
                ),
                (
                    lambda: models.gpt2(1),
                    GPT2 + RING + SAVE.format("linear") + ROW.format("int2"),
                    "tp=2, cp=2",
                ),
                (lambda: models.gpt2(2), RING + SAVE.format("linear") + ROW.format("int2"), "cp=2"),
                (lambda: models.gpt2(4), RING + GROUP.format(2) + ROW.format("int4"), "cp=2"),
                (four_blocks, PLAN.format("rotor", "400KiB") + ROW.format("int2"), ""),
                (
                    four_blocks,
                    PLAN.format("pareto", "250KiB") + ROW.format("int4") + "zero(stage=1, over=dp)",
                    "dp=2",
                ),
                (
                    four_blocks,
                    PLAN.format("adapipe", "250KiB") + ROW.format("int4") + PIPELINE,
                    "pp=2",
                ),
                (
                    four_blocks,
                    PLAN.format("pofo", "400KiB, bandwidth=25GiB") + ROW.format("int2"),
                    "",
                ),
            ]
        ),
    ],
)
def test_equal_to_one_process_that_keeps_alike(
    threads: Threads, model: Callable[[], nn.Module], rows: str, mesh: str
) -> None:
    """Outputs, loss, gradients and training equal those of one process that recomputes from the
    same compressed tensors."""
    report = assert_proven(threads, make_plan(model(), rows, mesh, "lossy"), token_batches())
    assert report.equivalence == "relaxed (lossy)"


def differing_kinds(
    threads: Threads, patch: pytest.MonkeyPatch, rows: str, mesh: str = ""
) -> set[str]:
    """Return what differs from the single process in the first step."""
    patch.setattr("schedlang.passes.prove.add_suspects", lambda report, *args: report)
    plan = make_plan(models.gpt2(2 if "group" in rows else 1), rows, mesh, "lossy")
    report = prove(Case(plan, tuple(token_batches()), None, None, 0, "none"), pool=threads)
    return {row.kind for row in report.rows if not row.ok and not row.step}


def test_results_that_were_kept_as_they_are_are_found(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved results that are not compressed fail the proof."""
    from schedlang.runtime.activation_memory import recompute

    monkeypatch.setattr(recompute, "policies", SimpleNamespace(code=None))
    kinds = differing_kinds(threads, monkeypatch, SAVE.format("linear") + ROW.format("int2"))
    assert "gradients" in kinds and "loss" not in kinds


def test_a_group_that_begins_anew_within_is_found(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group whose modules each start from their own compressed input fails the proof."""
    from schedlang.runtime.activation_memory import recompute

    monkeypatch.setattr(recompute.Region, "add_outputs", lambda self, output: None)
    kinds = differing_kinds(threads, monkeypatch, GROUP.format(2) + ROW.format("int2"))
    assert "gradients" in kinds and "loss" not in kinds


class InnerProduct(torch.autograd.Function):
    """A matrix product inside an autograd function, as in ring attention."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Compute a product that is no single operator of the model."""
        ctx.save_for_backward(x)
        return x @ (x.T @ x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Compute autograd's gradient."""
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            (grad,) = torch.autograd.grad(leaf @ (leaf.T @ leaf), leaf, grads)
        return grad


class TwoLayers(nn.Module):
    """Two layers, and optionally a product inside an autograd function between them."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.one, self.two, self.inside = nn.Linear(32, 32), nn.Linear(32, 32), inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the second layer of the first one's output."""
        x = self.one(x)
        if self.inside:
            x = x + 0 * InnerProduct.apply(x)  # type: ignore[no-untyped-call]
        return self.two(x)


def test_products_inside_of_a_function_have_no_number_among_coded_results() -> None:
    """They would change the random numbers of later results, which one process draws without them;
    without compression they are saved as usual."""

    def kept(inside: bool, coded: bool) -> list[tuple[str, tuple[int, ...], int]]:
        module, saves = TwoLayers(inside), []
        original_save = selective.SelectiveModes.save

        def hear(self: Any, tensor: torch.Tensor) -> Any:
            result = original_save(self, tensor)
            number = getattr(getattr(self.keep, "__self__", None), "saved", 0)
            saves.append((type(result).__name__, tuple(tensor.shape), number))
            return result

        checkpoint(module, ("linear",))
        if coded:
            quantize_saved(module, "products", Quantization(4, 16))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(selective.SelectiveModes, "save", hear)
            module(torch.ones(8, 32, requires_grad=True)).sum().backward()
        return saves

    assert kept(True, coded=True) == kept(False, coded=True)
    assert len(kept(True, coded=False)) > len(kept(False, coded=False)) == 2


def live_bytes(rows: str) -> int:
    """Return the bytes of storages that live after a program's forward, for its backward."""
    plan = make_plan(models.gpt2(4), rows, "", "lossy" if ROW.format("int4") in rows else "")
    program, batch = build(plan, models.tokens(rows=4), optimizer=sgd), models.tokens(rows=4)
    with StorageCounter() as counter:
        before = counter.now
        loss = program.module(**batch).loss  # without the key cache, which a step does not keep
        gc.collect()
        live = counter.now - before
    assert loss.requires_grad  # backward's tensors live as long as the loss
    return live


@pytest.mark.parametrize(
    "again",
    [
        SAVE.format("linear"),
        pytest.param(GROUP.format(2), marks=pytest.mark.deep),
        pytest.param(PLAN.format("pareto", "500KiB"), marks=pytest.mark.deep),
        pytest.param(PLAN.format("pareto", "250KiB"), marks=pytest.mark.deep),
    ],
)
def test_the_plan_knows_the_bytes(again: str) -> None:
    """The plan's saving equals that of the program's storages, also where a compressed view frees
    its storage."""
    from schedlang.ir.memory import CLASSES
    from schedlang.passes.simulate.simulated_ranks import estimate_memory

    batch, peaks = models.tokens(rows=4), []
    schedules = again, again + ROW.format("int4")
    for rows in schedules:
        plan = make_plan(models.gpt2(4), rows, "", "lossy" if rows != again else "")
        estimate = estimate_memory(plan, batch, None, prepare(plan, batch))[0]
        index = CLASSES.index("activations")
        peaks.append(max(moment.end[index] for moment in estimate.moments))
    full_bytes, compressed_bytes = map(live_bytes, schedules)
    assert compressed_bytes < full_bytes
    assert peaks[0] - peaks[1] == pytest.approx(full_bytes - compressed_bytes, rel=0.05)


class ReluLayers(nn.Module):
    """A product, a ReLU, in place or not, and another product."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(16, 32).double(), nn.Linear(32, 16).double()
        self.inplace = inplace

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute rows from rows."""
        return self.down(torch.relu_(self.up(x)) if self.inplace else torch.relu(self.up(x)))


def test_a_kept_result_may_be_written_into() -> None:
    """The saved result is the one before the write; a second backward is equal."""
    x = random_tensor(8, 16).requires_grad_()
    gradients = []
    for inplace in (False, True):
        model = ReluLayers(inplace)
        checkpoint(model, ["linear"])
        quantize_saved(model, "it", Quantization(4, 16))
        out = model(x)
        for _ in range(2):
            x.grad = None
            model.zero_grad()
            out.square().sum().backward(retain_graph=True)
            gradients.append([x.grad, *(p.grad.clone() for p in model.parameters())])
    for grads in gradients[1:]:
        assert all(map(torch.equal, gradients[0], grads))


def test_parts_of_sums_that_are_rounded_are_found(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that compresses its part of a sum fails the proof: one process has no such part."""
    from schedlang.runtime.activation_memory import selective

    monkeypatch.setattr(selective, "policies", SimpleNamespace(summed=False))
    rows = GPT2 + SAVE.format("linear") + ROW.format("int2")
    assert "gradients" in differing_kinds(threads, monkeypatch, rows, "tp=2")


def test_single_operators_of_ranks_are_refused() -> None:
    """With tensor parallelism ranks call other operators than one process."""
    rows = GPT2 + PLAN.format("pareto", "150KiB") + ROW.format("int8")
    with pytest.raises(Refusal) as error:
        prepare(make_plan(models.gpt2(4), rows, "tp=2", "lossy"), models.tokens(rows=4))
    assert "S857" in error.value.render() and "other operators" in error.value.render()
