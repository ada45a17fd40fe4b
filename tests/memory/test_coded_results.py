"""Tests of recomputed modules that keep results, groups and plans, in fewer bits."""

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
from tests.counting import Counter
from tests.engine import Threads
from tests.memory.test_coded import PIPE, ROW, drawn, dropping, tokens
from tests.proofs import planned, proven, sgd
from tests.zoo.scenes import GPT2, LLAMA

KEEP = "transformer.h.*  checkpoint(save=[{}])\n"
INNER = "transformer.h.*.mlp  checkpoint(save=[linear])\n"
GROUP = "transformer.h.*  checkpoint(group={})\n"
PLAN = "transformer.h.*  checkpoint(plan={}, memory={})\n"
RING = "transformer.h.*.attn  context_parallel(ring, over=cp)\n"


def four() -> nn.Module:
    """Four blocks."""
    return dropping(4)


@pytest.mark.parametrize(
    "model, rows, mesh",
    [
        (dropping, KEEP.format("linear") + ROW.format("int2") + "zero(stage=3, over=dp)", "dp=2"),
        (four, GROUP.format(2) + ROW.format("int2") + "zero(stage=1, over=dp)", "dp=2"),
        (lambda: dropping(1), GPT2 + KEEP.format("linear") + ROW.format("int2"), "tp=2"),
        *(
            pytest.param(*case, marks=pytest.mark.deep)
            for case in [
                (dropping, KEEP.format("linear, attention") + ROW.format("int4") + PIPE, "pp=2"),
                (dropping, INNER + ROW.format("int8"), ""),
                (
                    four,
                    "transformer.h.*  checkpoint(group=2, every=2, save=[linear])\n"
                    + ROW.format("adaptive, bits=4")
                    + "zero(stage=3, over=dp)",
                    "dp=2",
                ),
                (four, GPT2 + GROUP.format(2) + ROW.format("int4"), "tp=2"),
                (four, GPT2 + PLAN.format("rotor", "300KiB") + ROW.format("int2"), "tp=2"),
                (
                    lambda: models.llama(1),
                    LLAMA + "model.layers.*  checkpoint(save=[linear, attention])\n"
                    "model.layers.*  compress(activations, int4, block=16)",
                    "tp=2",
                ),
                (
                    lambda: models.gpt2(1),
                    GPT2 + RING + KEEP.format("linear") + ROW.format("int2"),
                    "tp=2, cp=2",
                ),
                (lambda: models.gpt2(2), RING + KEEP.format("linear") + ROW.format("int2"), "cp=2"),
                (lambda: models.gpt2(4), RING + GROUP.format(2) + ROW.format("int4"), "cp=2"),
                (four, PLAN.format("rotor", "400KiB") + ROW.format("int2"), ""),
                (
                    four,
                    PLAN.format("pareto", "250KiB") + ROW.format("int4") + "zero(stage=1, over=dp)",
                    "dp=2",
                ),
                (four, PLAN.format("adapipe", "250KiB") + ROW.format("int4") + PIPE, "pp=2"),
                (four, PLAN.format("pofo", "400KiB, bandwidth=25GiB") + ROW.format("int2"), ""),
            ]
        ),
    ],
)
def test_equal_to_one_process_that_keeps_alike(
    threads: Threads, model: Callable[[], nn.Module], rows: str, mesh: str
) -> None:
    """Outputs, loss, every gradient and training are those of one process whose second runs start
    from the same whole numbers, and take kept results from them."""
    report = proven(threads, planned(model(), rows, mesh, "lossy"), tokens())
    assert report.equivalence == "relaxed (lossy)"


def kinds_that_differ(
    threads: Threads, patch: pytest.MonkeyPatch, rows: str, mesh: str = ""
) -> set[str]:
    """What of the first step is not that of the one process; nobody asks for the row to blame."""
    patch.setattr("schedlang.passes.prove.suspected", lambda report, *given: report)
    plan = planned(models.gpt2(2 if "group" in rows else 1), rows, mesh, "lossy")
    report = prove(Case(plan, tuple(tokens()), None, None, 0, "none"), pool=threads)
    return {row.kind for row in report.rows if not row.ok and not row.step}


def test_results_that_were_kept_as_they_are_are_found(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If kept results were not rounded, gradients would not be those of the one process."""
    from schedlang.runtime.activation_memory import recompute

    monkeypatch.setattr(recompute, "policies", SimpleNamespace(code=None))
    found = kinds_that_differ(threads, monkeypatch, KEEP.format("linear") + ROW.format("int2"))
    assert "gradients" in found and "loss" not in found


def test_a_group_that_begins_anew_within_is_found(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If each module of a group started from its own rounded input, gradients would not be those
    of a second run of the group."""
    from schedlang.runtime.activation_memory import recompute

    monkeypatch.setattr(recompute.Region, "add_outputs", lambda self, output: None)
    found = kinds_that_differ(threads, monkeypatch, GROUP.format(2) + ROW.format("int2"))
    assert "gradients" in found and "loss" not in found


class Inside(torch.autograd.Function):
    """A matrix product within a function of autograd, as ring attention makes them."""

    @staticmethod
    def forward(ctx: Any, one: torch.Tensor) -> torch.Tensor:
        """The sum of a product, which no single operator of the model is."""
        ctx.save_for_backward(one)
        return one @ (one.T @ one)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """As autograd would say it."""
        (one,) = ctx.saved_tensors
        with torch.enable_grad():
            again = one.detach().requires_grad_()
            (found,) = torch.autograd.grad(again @ (again.T @ again), again, grads)
        return found


class Products(nn.Module):
    """Two layers, and a product of a layout's own between them if asked for."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.one, self.two, self.inside = nn.Linear(32, 32), nn.Linear(32, 32), inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The second layer of the first one's output."""
        x = self.one(x)
        if self.inside:
            x = x + 0 * Inside.apply(x)  # type: ignore[no-untyped-call]
        return self.two(x)


def test_products_inside_of_a_function_have_no_number_among_coded_results() -> None:
    """Draws of the results after them would be others than those of one process, which has no such
    function; where nothing is coded they are kept as they are."""

    def kept(inside: bool, coded: bool) -> list[tuple[str, tuple[int, ...], int]]:
        module, found = Products(inside), []
        held = selective.SelectiveModes.save

        def hear(self: Any, tensor: torch.Tensor) -> Any:
            result = held(self, tensor)
            number = getattr(getattr(self.keep, "__self__", None), "saved", 0)
            found.append((type(result).__name__, tuple(tensor.shape), number))
            return result

        checkpoint(module, ("linear",))
        if coded:
            quantize_saved(module, "products", Quantization(4, 16))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(selective.SelectiveModes, "save", hear)
            module(torch.ones(8, 32, requires_grad=True)).sum().backward()
        return found

    assert kept(True, coded=True) == kept(False, coded=True)
    assert len(kept(True, coded=False)) > len(kept(False, coded=False)) == 2


def alive(rows: str) -> int:
    """Bytes of the storages that are there after the forward of a program, for its backward."""
    plan = planned(models.gpt2(4), rows, "", "lossy" if ROW.format("int4") in rows else "")
    program, batch = build(plan, models.tokens(rows=4), optimizer=sgd), models.tokens(rows=4)
    with Counter() as counter:
        before = counter.now
        loss = program.module(**batch).loss  # not the cache of keys, which a step does not keep
        gc.collect()
        found = counter.now - before
    assert loss.requires_grad  # what backward needs is there as long as the loss is
    return found


@pytest.mark.parametrize(
    "again",
    [
        KEEP.format("linear"),
        pytest.param(GROUP.format(2), marks=pytest.mark.deep),
        pytest.param(PLAN.format("pareto", "500KiB"), marks=pytest.mark.deep),
        pytest.param(PLAN.format("pareto", "250KiB"), marks=pytest.mark.deep),
    ],
)
def test_the_plan_knows_the_bytes(again: str) -> None:
    """What is kept between forward and backward takes less, as the plan has it, by what the
    program's storages do: of a view that is coded, all that it kept alive."""
    from schedlang.ir.memory import CLASSES
    from schedlang.passes.simulate.simulated_ranks import estimate_memory

    batch, told = models.tokens(rows=4), []
    every = again, again + ROW.format("int4")
    for rows in every:
        plan = planned(models.gpt2(4), rows, "", "lossy" if rows != again else "")
        found = estimate_memory(plan, batch, None, prepare(plan, batch))[0]
        place = CLASSES.index("activations")
        told.append(max(moment.end[place] for moment in found.moments))
    whole, coded = map(alive, every)
    assert coded < whole
    assert told[0] - told[1] == pytest.approx(whole - coded, rel=0.05)


class Curved(nn.Module):
    """A product, what bends it, in its place or not, and another product."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(16, 32).double(), nn.Linear(32, 16).double()
        self.inplace = inplace

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows to rows."""
        return self.down(torch.relu_(self.up(x)) if self.inplace else torch.relu(self.up(x)))


def test_a_kept_result_may_be_written_into() -> None:
    """What is kept is the result as it was, though the module writes into it; and a second backward
    finds the same again."""
    x = drawn(8, 16).requires_grad_()
    gradients = []
    for inplace in (False, True):
        model = Curved(inplace)
        checkpoint(model, ["linear"])
        quantize_saved(model, "it", Quantization(4, 16))
        out = model(x)
        for _ in range(2):
            x.grad = None
            model.zero_grad()
            out.square().sum().backward(retain_graph=True)
            gradients.append([x.grad, *(p.grad.clone() for p in model.parameters())])
    for some in gradients[1:]:
        assert all(map(torch.equal, gradients[0], some))


def test_parts_of_sums_that_are_rounded_are_found(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a rank rounded its part of a sum that it is spared, gradients would not be those of one
    process, which has no such part."""
    from schedlang.runtime.activation_memory import selective

    monkeypatch.setattr(selective, "policies", SimpleNamespace(summed=False))
    rows = GPT2 + KEEP.format("linear") + ROW.format("int2")
    assert "gradients" in kinds_that_differ(threads, monkeypatch, rows, "tp=2")


def test_single_operators_of_ranks_are_refused() -> None:
    """Ranks that split weights call other operators than one process does."""
    rows = GPT2 + PLAN.format("pareto", "150KiB") + ROW.format("int8")
    with pytest.raises(Refusal) as error:
        prepare(planned(models.gpt2(4), rows, "tp=2", "lossy"), models.tokens(rows=4))
    assert "S857" in error.value.render() and "other operators" in error.value.render()
