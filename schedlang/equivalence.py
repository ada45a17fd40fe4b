"""Verification from Python: a schedule, or a user's own program, against its model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.diagnostic import Label, Refusal, kind_of, refuse_at_caller
from schedlang.diagnostics.source import python_span

if TYPE_CHECKING:
    from torch import nn

    from schedlang.report import Report
    from schedlang.runtime.launch.pool import Pool
    from schedlang.schedule import Schedule

Batches = Mapping[str, Any] | Callable[..., Mapping[str, Any]]


@refuse_at_caller()
def verify(
    sch: Schedule,
    *args: object,
    batch: Batches | None = None,
    loss: Callable[..., Any] | None = None,
    weight: Callable[..., float] | None = None,
    seed: int = 0,
    dtype: str | None = None,
    shrink: bool | Callable[..., Any] | None = None,
    timeout: float | None = None,
    **unknown: object,
) -> Report:
    """Compare a schedule with its model on local ranks, in float64; see `schedlang verify`.

      batch    the keyword arguments of one step, or a function of the seed that returns them. One
               dict is used in every step, and the report lists what was not exercised
      loss     loss(output, batch), if the model returns none
      weight   weight(part): the weight of a part of the batch in the mean; default: the labels that
               count
      dtype    the working dtype that is checked besides float64; default: that of the model
      shrink   verify a reduced model of the same class on at most 8 ranks; default: only if the
               model is on the meta device. Without a config: a function that makes it from sizes
      timeout  seconds for everything; then Hang says where each rank, or this process, stands
    Models, losses and batches may be defined anywhere: in a notebook, `__main__` or a closure.

    Raises Refusal for what cannot be run, RankDied or Hang for a run that failed.
    """
    from schedlang.passes.analyze.input_checks import check_verify_arguments
    from schedlang.runtime.launch.rank_job import limit_time

    check_verify_arguments(args, unknown, {"batch": batch, "loss": loss, "weight": weight})
    assert batch is not None
    with limit_time(timeout):
        return _verify(sch, batch, loss, weight, seed, dtype, shrink)


def _verify(
    sch: Schedule,
    batch: Batches,
    loss: Any,
    weight: Any,
    seed: int,
    dtype: str | None,
    reduced: Any,
) -> Report:
    from schedlang.passes.prove import prove
    from schedlang.passes.reduce_model.shrink import has_meta_parameters, shrink, with_reduction
    from schedlang.passes.verify.proof_case import Case
    from schedlang.passes.verify.requirements import steps_of

    plan, small, target = sch.plan(), None, None
    batches: tuple[Mapping[str, Any], ...] = _batches(batch, seed, steps_of(plan))
    model = plan.model.model
    if reduced or (reduced is None and has_meta_parameters(model)):
        make_reduced = reduced if callable(reduced) else None
        small = shrink(
            sch.tree, sch._settings, model, batches, loss=loss, make=make_reduced, seed=seed
        )
        target = small.full_plan, batches[0]
        plan, batches = small.plan, small.batches
    elif has_meta_parameters(model):
        title = "the model has no values: it is on the meta device"
        raise Refusal.of("S623", title, helps=("verify a reduced one: `shrink=True`",))
    case = Case(plan, batches, loss, weight, seed, dtype, expected_for=target)
    return with_reduction(prove(case, title=type(model).__name__), small)


@refuse_at_caller()
def assert_equivalent(sch: Schedule, **options: Any) -> None:
    """Raise AssertionError with the report unless `verify(sch, **options)` finds all equal."""
    report = verify(sch, **options)
    if not report.ok:
        raise AssertionError(f"the schedule differs from its model\n{report}")


@refuse_at_caller()
def verify_program(
    program: Callable[..., Any] | str | Path,
    *,
    model: nn.Module | str | Path | None = None,
    batch: Batches | None = None,
    loss: Callable[..., Any] | None = None,
    ranks: int | None = None,
    seed: int = 0,
    vary: bool = True,
    dtype: str | None = None,
    timeout: float | None = None,
    pool: Pool | None = None,
) -> Report:
    """Compare your own distributed program with its model on local ranks, in float64.

      program  program(model) -> schedlang.TrainingProgram, called on every rank; or its file
      model    the original; or the file with `model()`, `batch(seed)` and `loss(output, batch)`;
               for a program in a file the default is the `model.py` beside it
      batch    the keyword arguments of one step, or a function of the seed that returns them
      loss     loss(output, batch), if the model returns none
      ranks    number of local ranks; default: `world` of the program's file
      vary     also use batches with more ignored labels than the given ones
      dtype    the dtype that the program runs in, if not float64: "bfloat16", "float32"; gates then
               depend on how far roundings move the original
      timeout  seconds for everything; then Hang says where each rank, or this process, stands
      pool     ranks that are already started, if nothing is in a file
    Raises Refusal for what cannot be run, RankDied or Hang for a run that failed.
    """
    from schedlang.runtime.launch.rank_job import limit_time

    with limit_time(timeout):
        return _verify_program(
            program, model, batch, loss, ranks, pool, seed=seed, vary=vary, dtype=dtype
        )


def _verify_program(
    program: Any, model: Any, batch: Any, loss: Any, ranks: int | None, pool: Any, **options: Any
) -> Report:
    from schedlang.passes.judge.judge import judge, load_task
    from schedlang.passes.verify.requirements import STEPS

    in_file, model_is_path = isinstance(program, (str, Path)), isinstance(model, (str, Path))
    if not in_file and (model is None or (batch is None and not model_is_path)):
        raise _refusal("a program that is no file needs a `model` and a `batch`")
    if batch is not None:
        options["batches"] = _batches(batch, options["seed"], STEPS)
    if loss is not None:
        options["loss"] = loss
    if model is not None and not model_is_path:
        options["original"] = model
    source = Path(program) if in_file else program
    loaded = load_task(source, str(model) if model_is_path else None, ranks, **options)
    if pool is not None and not loaded.files:
        return judge(loaded.task, pool=pool, title=loaded.title)
    with loaded.pool() as own_pool:
        return judge(loaded.task, pool=own_pool, title=loaded.title)


def _batches(batch: Any, seed: int, steps: int) -> tuple[dict[str, Any], ...]:
    """Return one batch for each step: the same dict, or what a function of the seed returns."""
    if isinstance(batch, Mapping):
        return (dict(batch),) * steps
    if not callable(batch):
        raise _refusal(f"`batch` is {kind_of(batch)}, not a dict")
    takes_seed = _takes_seed(batch)
    batches = [batch(seed + step) if takes_seed else batch() for step in range(steps)]
    wrong = [item for item in batches if not isinstance(item, Mapping)]
    if wrong:
        raise _refusal(f"`batch` returns {kind_of(wrong[0])}, not a dict")
    return tuple(dict(item) for item in batches)


def _takes_seed(batch: Any) -> bool:
    """Return whether a function of batches takes a seed; refuse more required parameters."""
    try:
        parameters = inspect.signature(batch).parameters.values()
    except ValueError:  # a class in C has no signature
        return False
    positional = (p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
    needed = [f"`{p.name}`" for p in positional if p.default is p.empty]
    if len(needed) > 1:
        raise _refusal(f"`batch` needs {' and '.join(needed)}, and is given a seed alone")
    return bool(parameters)


def _refusal(title: str) -> Refusal:
    help_ = "give the model's keyword arguments as a dict, or a function of the seed"
    return Refusal.of("S902", title, Label(python_span()), helps=(help_,))
