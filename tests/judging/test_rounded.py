"""Programs that are judged in a low dtype: right ones pass, mistakes fail."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from schedlang import TrainingProgram, verify_program
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.judge.low_dtype_errors import (
    _cluster_factors,
    _copy_correction,
    _factor_correction,
)
from schedlang.passes.judge.rank_copies import RankCopy
from schedlang.passes.judge.record import RunRecord
from schedlang.passes.judge.regions import Region
from schedlang.passes.verify.mapped_tensors import map_tensor
from schedlang.passes.verify.observe import Key
from schedlang.runtime.launch.pool import Pool
from tests.judging import by_hand, net, saving, wrapped
from tests.judging.catches import mean_of_means, pipeline_accumulated
from tests.judging.catches.words import original


def only_low(model: nn.Module) -> TrainingProgram:
    """Right, but no program for float64: its library has kernels for others alone."""
    if next(model.parameters()).dtype == torch.float64:
        raise ValueError("no kernel for float64")
    return wrapped.ddp(model)


def scaled(model: nn.Module) -> TrainingProgram:
    """Wrong: gradients are a tenth too large."""
    made = wrapped.ddp(model)

    def step(batch: Any) -> Any:
        found = made.step(batch)
        for p in model.parameters():
            if p.grad is not None:
                p.grad.mul_(1.1)
        return found

    return TrainingProgram(made.module, step)


def copies_counted(model: nn.Module) -> TrainingProgram:
    """Wrong: the norm that gradients are clipped by counts the copies of all ranks."""
    made = wrapped.ddp(model)

    def clip(most: float) -> Any:
        norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf) * 2**0.5
        for p in model.parameters():
            assert p.grad is not None
            p.grad.mul_(min(1.0, most / float(norm)))
        return norm

    return TrainingProgram(made.module, made.step, clip=clip)


class Undecayed(torch.optim.AdamW):
    """AdamW whose first step leaves out what the second moment is divided by."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """One step; the state of it is scaled."""
        super().step(closure)
        for slots in self.state.values():
            slots["exp_avg_sq"].mul_(1.5)


def scaled_moment(model: nn.Module) -> TrainingProgram:
    """Wrong on ranks alone: the second moment of the optimizer is half as large again."""
    made = wrapped.ddp(model)

    def optimizer(named: Any) -> torch.optim.Optimizer:
        kind = Undecayed if dist.is_initialized() else torch.optim.AdamW
        return kind([p for _, p in named], lr=3e-3, eps=1e-5)

    return TrainingProgram(made.module, made.step, optimizer=optimizer)


@cache  # several tests ask for that of one program
def judged(pool: Pool, program: Any, dtype: str, ranks: int = 2, **model: Any) -> Any:
    """The report on a program of the small decoder, of one block."""
    torch.manual_seed(0)
    original: nn.Module = net.Net(**{"depth": 1} | model)
    return verify_program(
        program, model=original, batch=net.batch, loss=net.loss, ranks=ranks, dtype=dtype, pool=pool
    )


RIGHT = [
    (only_low, 2, "bfloat16", {}),
    (only_low, 2, "float32", {}),
    (only_low, 2, "float16", {}),
    (only_low, 2, "bfloat16", {"tied": True}),
    (wrapped.fsdp2, 4, "bfloat16", {}),
    (wrapped.tp, 2, "bfloat16", {}),
    (wrapped.zero1, 2, "float32", {}),
    (wrapped.ddp_evaluated, 2, "bfloat16", {}),
    (saving.ddp, 2, "bfloat16", {"frozen": True}),
    (saving.fsdp2, 2, "float16", {}),
]
WRONG = [
    (wrapped.ddp_unsynced, 2, "bfloat16", {}),
    (by_hand.unreduced, 2, "float32", {}),
    (wrapped.ddp_twice, 2, "bfloat16", {}),
    (wrapped.ddp_mean, 2, "float32", {}),
    (scaled, 2, "bfloat16", {}),
    (scaled, 2, "float32", {}),
    (wrapped.ddp_other_start, 2, "bfloat16", {}),
    (copies_counted, 2, "bfloat16", {}),
    (scaled_moment, 2, "bfloat16", {}),
    (saving.no_momentum, 2, "bfloat16", {}),
]


def _named(value: Any) -> str:
    return getattr(value, "__name__", "")


@pytest.mark.parametrize("program, ranks, dtype, model", RIGHT, ids=_named)
def test_a_right_program_passes(
    pool: Pool, program: Any, ranks: int, dtype: str, model: Any
) -> None:
    """Loss, outputs, gradients and parameters are as near as roundings of the original."""
    report = judged(pool, program, dtype, ranks, **model)
    assert report.ok, str(report)
    assert dict(report.facts)["dtype"] == dtype
    kinds = {row.kind for row in report.rows}
    assert kinds >= {f"{k} in working dtype" for k in ("loss", "gradients", "parameters")}, kinds
    own = program is wrapped.zero1  # which keeps its state elsewhere
    assert own or {"optimizer exp_avg in working dtype", "optimizer step"} <= kinds, kinds


@pytest.mark.parametrize("program, ranks, dtype, model", WRONG, ids=_named)
def test_a_wrong_program_fails(
    pool: Pool, program: Any, ranks: int, dtype: str, model: Any
) -> None:
    """What no rounding explains is found."""
    report = judged(pool, program, dtype, ranks, **model)
    assert report.exit_code == 1, str(report)


SAID = [  # of 20 gradients that of the bias of keys is zero
    (wrapped.ddp_twice, " of 20", "1/ranks = 1/2 times the right value everywhere"),
    (wrapped.ddp_unsynced, "1 of 20 (`head.weight`)", "ranks differ and their mean is right"),
    (by_hand.unreduced, "4 of 20", "their sum is right: a sum over ranks is"),
    (scaled, "(`emb.weight`", "1.1 times the right value everywhere"),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("program, names, said", SAID, ids=_named)
def test_the_kind_of_mistake_is_told_within_roundings(
    pool: Pool, program: Any, names: str, said: str, dtype: str
) -> None:
    """The right value, times the factor that is named, or put together so, is within its bound."""
    if program is by_hand.unreduced and dtype == "bfloat16":
        pytest.skip("in so few bits weights that are cut by hand are not told apart")
    report = judged(pool, program, dtype, 2)
    ((where, text),) = report.localised
    assert where == "gradients" and names in text and said in text, str(report)
    if program is wrapped.ddp_twice:
        # in few bits the bound of one may be as wide as its mistake, as processors' products round
        least = 18 if dtype == "float32" else 15
        assert least <= int(text.partition(" of 20")[0]) <= 19, str(report)


def bent(made: Any, place: str, factor: float, backward: bool = False) -> Any:
    """Wrong: what a module gives, or the gradient that comes back to it, is off by a factor."""

    def hook(_module: Any, _args: Any, output: Any) -> Any:
        if not backward:
            return output * factor
        output.register_hook(lambda gradient: gradient * factor)
        return output

    def program(model: nn.Module) -> TrainingProgram:
        found: TrainingProgram = made(model)
        (module,) = found.modules
        there = [one for name, one in module.named_modules() if name.endswith(place)]
        there[0].register_forward_hook(hook)
        return found

    return program


BENT = [
    (wrapped.ddp, "blocks.1.attention.o", 2.0, False, "bfloat16", "ranks = 2 times"),
    (wrapped.ddp, "blocks.0.down", 1.1, False, "float32", "1.1 times"),
    (wrapped.ddp, "blocks.1.n2", 1.5, True, "float16", "1.5 times"),
    (wrapped.tp, "blocks.0.n1", 1.3, False, "float32", "1.3 times"),
    (wrapped.fsdp2, "blocks.0.n1", 0.5, False, "bfloat16", "1/ranks = 1/2 times"),
]


@pytest.mark.parametrize("made, place, factor, backward, dtype, said", BENT, ids=_named)
def test_the_first_module_is_named_beyond_roundings(
    pool: Pool, made: Any, place: str, factor: float, backward: bool, dtype: str, said: str
) -> None:
    """Forward or backward, whatever ranks have of it; and none where modules are right."""
    depth = 1 + place.startswith("blocks.1")
    report = judged(pool, bent(made, place, factor, backward), dtype, depth=depth)
    what = "gradient of the output" if backward else "output"
    text = dict(report.localised)["first module"]
    assert text.startswith(f"the {what} of `{place}`: {said} the right value"), str(report)


PARTS = [
    (pipeline_accumulated, "bfloat16", "2 parts of the batch count 0.5, 1 times what they should"),
    (mean_of_means, "float32", "it is the plain mean of what 2 parts of the batch give"),
    (mean_of_means, "bfloat16", "it is the plain mean of what 2 parts of the batch give"),
]


@pytest.mark.parametrize("catch, dtype, said", PARTS, ids=_named)
def test_parts_of_the_batch_are_told_within_roundings(
    pool: Pool, catch: Any, dtype: str, said: str
) -> None:
    """Those that weigh otherwise than they should; their modules are right, and none is named."""
    torch.manual_seed(0)
    given = original(catch)
    report = verify_program(catch.wrong, **given, ranks=2, dtype=dtype, pool=pool)
    told = dict(report.localised)
    assert said in told["gradients"], str(report)


def test_other_weights_are_said_alone(pool: Pool) -> None:
    """All that follows differs for them: no factor of it is a cause."""
    ((where, text),) = judged(pool, wrapped.ddp_other_start, "bfloat16", 2).localised
    assert where == "weights" and "`norm.weight`" in text, text


def test_factors_that_are_near_are_one() -> None:
    """In few bits they differ in the last digit."""
    factors = dict(zip("abcde", (0.3535, 0.357, 0.359, 1.0, 0.5)))
    keys = {Key("SGD", "gradients", 0, name): value for name, value in factors.items()}
    found = {key.name: value for key, value in _cluster_factors(keys).items()}
    assert found == {"a": 0.357, "b": 0.357, "c": 0.357, "d": 1.0, "e": 0.5}


def test_a_factor_that_is_nearly_one_is_no_cause() -> None:
    """It is not said that something wrong is 1 times the right value."""
    key, value = Key("SGD", "gradients", 0, "w"), torch.ones(3)
    assert _factor_correction({"ranks": 2}, {key: 1.03})(key, value) is None
    said = _factor_correction({"ranks": 2}, {key: 1.99})(key, value)
    assert said is not None and said[0].startswith("ranks = 2 times")


def test_parts_that_ranks_have_twice_are_averaged() -> None:
    """Slices of two groups, as of a hybrid mesh: each is averaged with its own copy."""
    held = {0: ([0, 1], [1.0, 3.0]), 1: ([2], [5.0]), 2: ([0, 1], [3.0, 5.0]), 3: ([2], [7.0])}
    copies = [
        RankCopy(
            rank,
            "w",
            Region.from_numbers(torch.arange(len(v))),
            Region.from_numbers(torch.tensor(at)),
            _held(v),
        )
        for rank, (at, v) in held.items()
    ]
    key, kept = Key("SGD", "gradients", 0, "w"), RunRecord(copies={(False, "w"): copies})
    found = _copy_correction(kept, mean=True)(key, torch.tensor([1.0, 3.0, 5.0]))
    assert found is not None and found[1].tolist() == [2.0, 4.0, 6.0]
    kept.copies[False, "w"] = copies[:2]  # nobody has one twice
    assert _copy_correction(kept, mean=True)(key, torch.tensor([1.0, 3.0, 5.0])) is None


def _held(values: list[float]) -> Any:
    return map_tensor(torch.tensor(values, dtype=torch.float64), None)


def test_statistics_have_bounds(pool: Pool) -> None:
    """Buffers of a batch norm are compared: of ranks' own rows they are others."""
    options: dict[str, Any] = {"batch": wrapped.images, "loss": wrapped.of_images, "ranks": 2}
    options |= {"pool": pool, "dtype": "bfloat16"}
    right = verify_program(saving.statistics, model=wrapped.Normed(), **options)
    assert right.ok, str(right)
    named = {row.name for row in right.rows if row.kind == "other state in working dtype"}
    assert named == {"bn.running_mean", "bn.running_var"}
    counted = {row.name for row in right.rows if row.kind == "other state"}
    assert counted == {"bn.num_batches_tracked"}
    wrong = verify_program(wrapped.unsynced_norm, model=wrapped.Normed(), **options)
    assert wrong.exit_code == 1


def test_a_dtype_that_is_none(pool: Pool) -> None:
    """It is refused, with those that there are."""
    with pytest.raises(Refusal, match="S704"):
        judged(pool, wrapped.ddp, "float7")
