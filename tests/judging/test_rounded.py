"""Programs that are judged in a low dtype: right ones pass, mistakes fail."""

from __future__ import annotations

import math
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from schedlang import TrainingProgram, verify_program
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.judge.batch_parts import PartGradients
from schedlang.passes.judge.low_dtype_errors import (
    _cluster_factors,
    _copy_correction,
    _factor_correction,
    _part_corrections,
)
from schedlang.passes.judge.record import RunRecord
from schedlang.passes.judge.regions import RankCopy, Region
from schedlang.passes.verify.mapped_tensors import map_tensor
from schedlang.passes.verify.observe import Key, Observation
from schedlang.runtime.launch.pool import Pool
from tests.judging import by_hand, net, saving, wrapped
from tests.judging.catches import mean_of_means, pipeline_accumulated
from tests.judging.catches.language_model import original
from tests.judging.test_causes import FixedGradients


def low_only(model: nn.Module) -> TrainingProgram:
    """Right, but refuses float64, like a library without float64 kernels."""
    if next(model.parameters()).dtype == torch.float64:
        raise ValueError("no kernel for float64")
    return wrapped.ddp(model)


def grads_scaled(model: nn.Module) -> TrainingProgram:
    """Wrong: gradients are 10 % too large."""
    right_program = wrapped.ddp(model)

    def step(batch: Any) -> Any:
        result = right_program.step(batch)
        for p in model.parameters():
            if p.grad is not None:
                p.grad.mul_(1.1)
        return result

    return TrainingProgram(right_program.module, step)


def copies_counted(model: nn.Module) -> TrainingProgram:
    """Wrong: the norm for clipping counts the copies of all ranks."""
    right_program = wrapped.ddp(model)

    def clip(max_norm: float) -> Any:
        norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf) * 2**0.5
        for p in model.parameters():
            assert p.grad is not None
            p.grad.mul_(min(1.0, max_norm / float(norm)))
        return norm

    return TrainingProgram(right_program.module, right_program.step, clip=clip)


class Undecayed(torch.optim.AdamW):
    """AdamW whose second moment is scaled by 1.5."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Step, and scale the state."""
        super().step(closure)
        for slots in self.state.values():
            slots["exp_avg_sq"].mul_(1.5)


def scaled_moment(model: nn.Module) -> TrainingProgram:
    """Wrong on ranks only: the optimizer's second moment is 1.5 times too large."""
    right_program = wrapped.ddp(model)

    def optimizer(named_params: Any) -> torch.optim.Optimizer:
        kind = Undecayed if dist.is_initialized() else torch.optim.AdamW
        return kind([p for _, p in named_params], lr=3e-3, eps=1e-5)

    return TrainingProgram(right_program.module, right_program.step, optimizer=optimizer)


@cache  # several tests use the report of one program
def judge_program(pool: Pool, program: Any, dtype: str, ranks: int = 2, **sizes: Any) -> Any:
    """Judge a program of the small decoder with one block, and return the report."""
    torch.manual_seed(0)
    original: nn.Module = net.Net(**{"depth": 1} | sizes)
    return verify_program(
        program, model=original, batch=net.batch, loss=net.loss, ranks=ranks, dtype=dtype, pool=pool
    )


RIGHT = [
    (low_only, 2, "bfloat16", {}),
    (low_only, 2, "float32", {}),
    (low_only, 2, "float16", {}),
    (low_only, 2, "bfloat16", {"tied": True}),
    (wrapped.fsdp2, 4, "bfloat16", {}),
    (wrapped.tp, 2, "bfloat16", {}),
    (wrapped.zero1, 2, "float32", {}),
    (wrapped.ddp_full_api, 2, "bfloat16", {}),
    (saving.ddp, 2, "bfloat16", {"frozen": True}),
    (saving.fsdp2, 2, "float16", {}),
]
WRONG = [
    (wrapped.ddp_unsynced, 2, "bfloat16", {}),
    (by_hand.norms_unreduced, 2, "float32", {}),
    (wrapped.ddp_twice, 2, "bfloat16", {}),
    (wrapped.ddp_mean, 2, "float32", {}),
    (grads_scaled, 2, "bfloat16", {}),
    (grads_scaled, 2, "float32", {}),
    (wrapped.ddp_other_start, 2, "bfloat16", {}),
    (copies_counted, 2, "bfloat16", {}),
    (scaled_moment, 2, "bfloat16", {}),
    (saving.no_momentum, 2, "bfloat16", {}),
]


def _name_of(value: Any) -> str:
    return getattr(value, "__name__", "")


@pytest.mark.parametrize("program, ranks, dtype, model", RIGHT, ids=_name_of)
def test_a_right_program_passes(
    pool: Pool, program: Any, ranks: int, dtype: str, model: Any
) -> None:
    """Loss, outputs, gradients and parameters are within rounding of the original."""
    report = judge_program(pool, program, dtype, ranks, **model)
    assert report.ok, str(report)
    assert dict(report.facts)["dtype"] == dtype
    kinds = {row.kind for row in report.rows}
    assert kinds >= {f"{k} in working dtype" for k in ("loss", "gradients", "parameters")}, kinds
    own_optimizer = program is wrapped.zero1  # whose state is elsewhere
    assert own_optimizer or {"optimizer exp_avg in working dtype", "optimizer step"} <= kinds, kinds


@pytest.mark.parametrize("program, ranks, dtype, model", WRONG, ids=_name_of)
def test_a_wrong_program_fails(
    pool: Pool, program: Any, ranks: int, dtype: str, model: Any
) -> None:
    """Errors beyond rounding are found."""
    report = judge_program(pool, program, dtype, ranks, **model)
    assert report.exit_code == 1, str(report)


MESSAGES = [  # of 20 gradients that of the key bias is zero
    (wrapped.ddp_twice, " of 20", "1/ranks = 1/2 times the right value everywhere"),
    (wrapped.ddp_unsynced, "1 of 20 (`head.weight`)", "ranks differ and their mean is right"),
    (by_hand.norms_unreduced, "4 of 20", "their sum is right: a sum over ranks is"),
    (grads_scaled, "(`emb.weight`", "1.1 times the right value everywhere"),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("program, names, said", MESSAGES, ids=_name_of)
def test_the_kind_of_mistake_is_told_within_roundings(
    pool: Pool, program: Any, names: str, said: str, dtype: str
) -> None:
    """The kind of mistake is named if it explains the values within rounding."""
    if program is by_hand.norms_unreduced and dtype == "bfloat16":
        pytest.skip("in so few bits weights that are cut by hand are not told apart")
    report = judge_program(pool, program, dtype, 2)
    ((kind, text),) = report.localised
    assert kind == "gradients" and names in text and said in text, str(report)
    if program is wrapped.ddp_twice:
        # in low dtypes the bound of some tensors may be as large as the mistake
        min_count = 18 if dtype == "float32" else 15
        assert min_count <= int(text.partition(" of 20")[0]) <= 19, str(report)


def with_factor(right_program: Any, place: str, factor: float, backward: bool = False) -> Any:
    """Return a program in which a module's output or output gradient is wrong by a factor."""

    def hook(_module: Any, _args: Any, output: Any) -> Any:
        if not backward:
            return output * factor
        output.register_hook(lambda gradient: gradient * factor)
        return output

    def program(model: nn.Module) -> TrainingProgram:
        program_built: TrainingProgram = right_program(model)
        (module,) = program_built.modules
        matching = [submodule for name, submodule in module.named_modules() if name.endswith(place)]
        matching[0].register_forward_hook(hook)
        return program_built

    return program


FACTORS = [
    (wrapped.ddp, "blocks.1.attention.o", 2.0, False, "bfloat16", "ranks = 2 times"),
    (wrapped.ddp, "blocks.0.down", 1.1, False, "float32", "1.1 times"),
    (wrapped.ddp, "blocks.1.n2", 1.5, True, "float16", "1.5 times"),
    (wrapped.tp, "blocks.0.n1", 1.3, False, "float32", "1.3 times"),
    (wrapped.fsdp2, "blocks.0.n1", 0.5, False, "bfloat16", "1/ranks = 1/2 times"),
]


@pytest.mark.parametrize("made, place, factor, backward, dtype, said", FACTORS, ids=_name_of)
def test_the_first_module_is_named_beyond_roundings(
    pool: Pool, made: Any, place: str, factor: float, backward: bool, dtype: str, said: str
) -> None:
    """The first wrong module is named, forward or backward, for split and full outputs."""
    depth = 1 + place.startswith("blocks.1")
    report = judge_program(pool, with_factor(made, place, factor, backward), dtype, depth=depth)
    quantity = "gradient of the output" if backward else "output"
    text = dict(report.localised)["first module"]
    assert text.startswith(f"the {quantity} of `{place}`: {said} the right value"), str(report)


PARTS = [
    (pipeline_accumulated, "bfloat16", "2 parts of the batch count 0.5, 1 times what they should"),
    (mean_of_means, "float32", "it is the plain mean of what 2 parts of the batch give"),
    (mean_of_means, "bfloat16", "it is the plain mean of what 2 parts of the batch give"),
]


@pytest.mark.parametrize("catch, dtype, said", PARTS, ids=_name_of)
def test_parts_of_the_batch_are_told_within_roundings(
    pool: Pool, catch: Any, dtype: str, said: str
) -> None:
    """Parts of the batch with wrong weights are named, within rounding."""
    torch.manual_seed(0)
    inputs = original(catch)
    report = verify_program(catch.wrong, **inputs, ranks=2, dtype=dtype, pool=pool)
    messages = dict(report.localised)
    assert said in messages["gradients"], str(report)


def test_other_weights_are_said_alone(pool: Pool) -> None:
    """With other initial weights only those are reported."""
    ((kind, text),) = judge_program(pool, wrapped.ddp_other_start, "bfloat16", 2).localised
    assert kind == "weights" and "`norm.weight`" in text, text


def test_factors_that_are_near_are_one() -> None:
    """Factors that differ by rounding are clustered."""
    factors = dict(zip("abcde", (0.3535, 0.357, 0.359, 1.0, 0.5)))
    keys = {Key("SGD", "gradients", 0, name): value for name, value in factors.items()}
    clustered = {key.name: value for key, value in _cluster_factors(keys).items()}
    assert clustered == {"a": 0.357, "b": 0.357, "c": 0.357, "d": 1.0, "e": 0.5}


def test_a_factor_that_is_nearly_one_is_no_cause() -> None:
    """A factor close to 1 is not reported."""
    key, value = Key("SGD", "gradients", 0, "w"), torch.ones(3)
    assert _factor_correction({"ranks": 2}, {key: 1.03})(key, value) is None
    correction = _factor_correction({"ranks": 2}, {key: 1.99})(key, value)
    assert correction is not None and correction[0].startswith("ranks = 2 times")


@pytest.mark.parametrize("count", [4, 8])
def test_a_few_numbers_do_not_tell_how_parts_count(count: int) -> None:
    """Any four numbers are a weighted sum of four parts: eight are not."""
    key, draw = Key("SGD", "gradients", 0, "w"), torch.Generator().manual_seed(0)
    *parts, actual = torch.randn(5, count, dtype=torch.float64, generator=draw)
    exact = Observation({key: torch.stack(parts).sum(0)})
    cuts = FixedGradients([PartGradients(parts)])
    bounds: Any = SimpleNamespace(exact=exact)
    _, weighted = _part_corrections(bounds, Observation({key: actual}), [key], cuts)  # type: ignore[arg-type]
    assert (weighted(key, actual) is None) == (count == 4)


def test_parts_that_ranks_have_twice_are_averaged() -> None:
    """On a hybrid mesh each slice is averaged with its own copy."""
    slices = {0: ([0, 1], [1.0, 3.0]), 1: ([2], [5.0]), 2: ([0, 1], [3.0, 5.0]), 3: ([2], [7.0])}
    copies = [
        RankCopy(
            rank,
            "w",
            Region.from_numbers(torch.arange(len(v))),
            Region.from_numbers(torch.tensor(indices)),
            _stored(v),
        )
        for rank, (indices, v) in slices.items()
    ]
    key, record = Key("SGD", "gradients", 0, "w"), RunRecord(copies={(False, "w"): copies})
    corrected = _copy_correction(record, mean=True)(key, torch.tensor([1.0, 3.0, 5.0]))
    assert corrected is not None and corrected[1].tolist() == [2.0, 4.0, 6.0]
    record.copies[False, "w"] = copies[:2]  # no slice has a copy
    assert _copy_correction(record, mean=True)(key, torch.tensor([1.0, 3.0, 5.0])) is None


def _stored(values: list[float]) -> Any:
    return map_tensor(torch.tensor(values, dtype=torch.float64), None)


def test_statistics_have_bounds(pool: Pool) -> None:
    """Batch norm buffers are compared within bounds; statistics per rank fail."""
    options: dict[str, Any] = {"batch": wrapped.images, "loss": wrapped.image_loss, "ranks": 2}
    options |= {"pool": pool, "dtype": "bfloat16"}
    right_report = verify_program(saving.with_buffers, model=wrapped.BatchNormNet(), **options)
    assert right_report.ok, str(right_report)
    compared = {row.name for row in right_report.rows if row.kind == "other state in working dtype"}
    assert compared == {"bn.running_mean", "bn.running_var"}
    counted = {row.name for row in right_report.rows if row.kind == "other state"}
    assert counted == {"bn.num_batches_tracked"}
    wrong_report = verify_program(wrapped.unsynced_norm, model=wrapped.BatchNormNet(), **options)
    assert wrong_report.exit_code == 1


def test_a_dtype_that_is_none(pool: Pool) -> None:
    """An unknown dtype is refused."""
    with pytest.raises(Refusal, match="S704"):
        judge_program(pool, wrapped.ddp, "float7")
