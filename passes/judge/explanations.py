"""Explain a program's mistakes in float64: one sentence of arithmetic for each group of tensors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from schedlang.diagnostics.diagnostic import quote_names
from schedlang.passes.judge.async_collectives import COLLECTIVES, STRIDES_HELP
from schedlang.passes.judge.batch_parts import BatchParts
from schedlang.passes.judge.dropout_masks import DropoutByMasks
from schedlang.passes.judge.gradient_errors import PartPattern, explain_copies, explain_gradient
from schedlang.passes.judge.optimizer_steps import (
    MOST_NAMES,
    diverged_parameters,
    explain_steps,
    prefix_names,
)
from schedlang.passes.judge.record import RunRecord
from schedlang.passes.judge.regions import RankCopy
from schedlang.passes.judge.state_loading import LOADED_STATE, STEP_AFTER_LOADING
from schedlang.passes.judge.step_draws import SeededSequential
from schedlang.passes.judge.trial import Trial
from schedlang.passes.localize.diagnosis import NO_PATTERN, Pattern, diagnose, explain_row, is_close
from schedlang.passes.verify.compare import FLOOR
from schedlang.passes.verify.observe import Condition, Key, Observation
from schedlang.passes.verify.original import count_rows
from schedlang.passes.verify.proof_case import copy_original
from schedlang.report import Report, Row
from schedlang.runtime.float64 import Float64
from schedlang.runtime.modes import enter_modes

MOST_GROUPS = 6
ROUNDING = 1e-2  # the largest error that a low dtype may cause
INITIAL, DROPOUT = "initial weights", "dropout"
SAVED = "saved state"
MICROBATCHES, HOLDERS = "microbatches", "ranks that hold it"
_STATE_KINDS = (SAVED, LOADED_STATE, STEP_AFTER_LOADING)


@dataclass(frozen=True)
class FirstModule:
    """The first wrong module, in words, and facts of the ranks' steps compared with the original's.

    microbatches  how often a rank runs what the original runs once: microbatches
    factors       the factor of a rank's first gradient, by rank
    rows          the batch rows of each of the ranks' calls, if they divide the rows
    explained     whether the text explains every number
    """

    text: str = ""
    microbatches: int = 1
    factors: Mapping[int, float] = field(default_factory=dict)
    rows: Sequence[Sequence[int]] = ()
    explained: bool = True


def explain_rows(
    report: Report,
    expected: Observation,
    actual: Observation,
    record: RunRecord,
    world: int,
    parts: BatchParts,
    module: FirstModule,
) -> tuple[tuple[str, str], ...]:
    """Explain failing rows: one sentence for each group of tensors with the same error.

    `module`, the first wrong module, comes first.
    """
    assert record.holdings is not None
    sizes = {name: size for name, size in record.holdings.axes.items() if size != world}
    sizes |= {"ranks": world}
    failing = [row for row in report.rows if not row.ok]
    if initial_lines := explain_initial_weights(failing):
        return initial_lines
    patterns = _explain_gradients(failing, expected, actual, record, world, parts, module, sizes)
    tested = {row.name for row in report.rows if row.kind == "gradients" and row.step == 0}
    # if gradients are sums over parts of the batch, each module is right
    right = bool(patterns) and all(isinstance(pattern, PartPattern) for pattern in patterns)
    lines = [("first module", module.text)] * bool(module.text and (module.explained or not right))
    lines += [("gradients", prefix_names(p.text, n, len(tested))) for p, n in patterns.items() if p]
    lines += list(_explain_rank_factors(module, patterns))
    lines += list(_explain_loss(failing, expected, actual, record, world, module, parts))
    lines = list(_explain_norm(failing, expected, actual, record, world)) or lines
    lines = [*_explain_step_changes(failing, record), *lines]
    first = report.first
    if not lines and first is not None and (diverged := diverged_parameters(failing, first)):
        names = quote_names(diverged, MOST_NAMES)
        text = f"{names}: with right gradients ranks hold different values after "
        lines = [("parameters", f"{text}the step: what one does is not done, or sent, on others")]
    lines = lines or [*explain_steps(failing, first, expected, actual, record, sizes, parts.trial)]
    lines = lines or [*explain_stale_weights(first, expected, actual, parts.trial)]
    if not lines and first is not None and first.kind not in (*_STATE_KINDS, COLLECTIVES):
        text = explain_buffer(first, failing) or _explain_first(first, expected, actual, sizes)
        lines = [(first.kind.split(" (")[0][:17], text)] if text else []
    lines += list(_explain_loading(failing))
    lines = [
        *_explain_waits(failing),
        *_explain_strides(failing, record),
        *lines,
        *explain_masks(failing),
    ]
    lines += list(_explain_variants(failing, report))
    return tuple(lines[:MOST_GROUPS])


def _explain_gradients(
    failing: Sequence[Row],
    expected: Observation,
    actual: Observation,
    record: RunRecord,
    world: int,
    parts: BatchParts,
    module: FirstModule,
    sizes: Mapping[str, int],
) -> dict[Pattern, list[str]]:
    """Return the patterns of the first step's wrong gradients, with their parameters."""
    patterns: dict[Pattern, list[str]] = {}
    first_rows = [*_first_gradients(failing)]
    least_norm = _least_norm(expected, first_rows)
    large_errors = any(row.error > ROUNDING for row in first_rows)
    for row in first_rows:
        key = Key(row.condition, "gradients", 0, row.name)
        want, got = expected.tensors.get(key), actual.tensors.get(key)
        if want is not None and float(want.norm()) < least_norm:
            continue  # zero but for roundings, like a key's bias before a softmax
        copies = record.gradient_copies(row.condition, row.name)
        if want is not None and got is not None and is_close(got.double(), want.double()):
            if _is_stepped_elsewhere(row, failing, record):
                continue
            text = explain_copies(want.reshape(-1).double(), _scale_copies(copies, got))
            patterns.setdefault(Pattern(text), []).append(row.name)
            continue
        counts = _possible_factors(sizes, world, module, want, got)
        counts = _add_holders(counts, copies, world)
        others = {
            k.name: value
            for k, value in expected.tensors.items()
            if k[:3] == key[:3] and k.name != row.name
        }
        cause = explain_gradient(want, got, _scale_copies(copies, got), counts, parts, row, others)
        # a small error is no rounding if a module is known to be wrong, or others are far off
        guess = cause.short and (large_errors or module.explained and module.text)
        patterns.setdefault(NO_PATTERN if guess else cause, []).append(row.name)
    return patterns


def _is_stepped_elsewhere(row: Row, failing: Sequence[Row], record: RunRecord) -> bool:
    """Return whether some ranks have no gradient since others step, and send the parameter (ZeRO).

    They do so for other parameters, whose copies are equal after the step.
    """
    moment = row.condition, row.step
    rows = [r for r in failing if (r.condition, r.step) == moment]
    wrong = {r.name.removeprefix("gradient of ") for r in rows}
    owned = {
        name
        for (_, name), copies in record.copies.items()
        if 0 < sum(copy.stored is None for copy in copies) < len(copies)
    }
    return row.name in owned and not owned <= wrong


def _explain_rank_factors(
    module: FirstModule, patterns: Mapping[Pattern, Sequence[str]]
) -> Iterator[tuple[str, str]]:
    """Report ranks whose losses weigh differently, if nothing else explains the gradients.

    Outputs must be right, and what the loss sends back right but for a factor of each rank.
    """
    factors = module.factors
    unexplained = bool(patterns) and not any(p.explains for p in patterns)
    if not unexplained or not module.text.startswith(("", "the gradient of")[bool(module.text)]):
        return
    if factors and not math.isclose(min(factors.values()), max(factors.values()), rel_tol=1e-6):
        shown = ", ".join(f"{factor:.4g} (rank {rank})" for rank, factor in factors.items())
        text = f"what it sends back is {shown} times the right gradient, and these should be equal"
        yield "loss", f"{text}: each rank divides by a count of its own, or weighs its loss"


def _explain_step_changes(failing: Sequence[Row], record: RunRecord) -> Iterator[tuple[str, str]]:
    """Report parameters that the step itself replaces or changes."""
    if record.replaced_by_step:
        names = quote_names(sorted(record.replaced_by_step), MOST_NAMES)
        text = f"the step puts other parameters for {names}"
        yield "parameters", f"{text}: the optimizer steps those that were there before"
    kinds = {row.kind for row in failing}
    if record.simulation is not None and "replicas" in kinds:
        return  # a simulated step may change parameters
    if record.changed_by_step and "parameters" in kinds:
        names = quote_names(sorted(record.changed_by_step), MOST_NAMES)
        text = f"the step itself changes {names}: the judge"
        yield "parameters", f"{text} steps the optimizer after it"


def _explain_waits(failing: Sequence[Row]) -> Iterator[tuple[str, str]]:
    return ((COLLECTIVES, f"{row.name}: {row.note}") for row in failing if row.kind == COLLECTIVES)


def _explain_strides(failing: Sequence[Row], record: RunRecord) -> Iterator[tuple[str, str]]:
    """Report calls that send tensors in memory order, if a computed value is wrong."""
    if record.strided and any(row.kind not in (COLLECTIVES, DROPOUT) for row in failing):
        calls = ", ".join(f"`{name}` ({line})" for name, line in sorted(record.strided))
        yield COLLECTIVES, f"{calls}: {STRIDES_HELP}"


def explain_masks(failing: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """Describe modules with wrong dropout, grouped by what is wrong."""
    names: dict[str, list[str]] = {}
    for row in failing:
        if row.kind == DROPOUT:
            names.setdefault(row.note, []).append(row.name)
    return ((DROPOUT, f"{quote_names(sites, MOST_NAMES)}: {note}") for note, sites in names.items())


def explain_initial_weights(failing: Sequence[Row]) -> tuple[tuple[str, str], ...]:
    """Describe initial weights that differ; empty if none do."""
    names: dict[str, list[str]] = {}
    for row in failing:
        if row.kind == INITIAL:
            names.setdefault(row.note, []).append(row.name)
    parts = [f"{len(n)} ({quote_names(n, MOST_NAMES)}): {note}" for note, n in names.items()]
    text = "; ".join(parts[:MOST_NAMES])
    return (("weights", f"{text}; what follows differs for that, right or wrong"),) * bool(parts)


def _possible_factors(
    sizes: Mapping[str, int],
    world: int,
    module: FirstModule,
    want: Tensor | None,
    got: Tensor | None,
) -> Mapping[str, int]:
    """Return the numbers that a gradient may be off by: ranks, axes, and microbatches.

    If ranks' gradients were averaged and are too large, only the microbatches remain: if they are
    too small, the loss may lack the number of ranks that the average divides by.
    """
    if module.microbatches < 2 or want is None or got is None or got.shape != want.shape:
        return sizes
    target = want.double()
    factor = float((got * target).sum() / (target * target).sum()) if target.any() else 0.0
    scales = set(module.factors.values())
    averaged = len(scales) == 1 and math.isclose(factor * world, scales.pop(), rel_tol=1e-6)
    if world > 1 and factor > 1 and averaged:
        return {MICROBATCHES: module.microbatches}
    return _add_microbatches(sizes, world, module.microbatches)


def _add_microbatches(sizes: Mapping[str, int], world: int, microbatches: int) -> Mapping[str, int]:
    if microbatches < 2:
        return sizes
    if microbatches != world:
        return {**sizes, MICROBATCHES: microbatches}
    return {(f"ranks (or {MICROBATCHES})" if k == "ranks" else k): n for k, n in sizes.items()}


def _add_holders(
    sizes: Mapping[str, int], copies: Sequence[RankCopy], world: int
) -> Mapping[str, int]:
    """Add the number of ranks that hold the part of a parameter that the first rank holds.

    It is left out if it is the size of an axis, or of the world.
    """
    held = [copy.original_region for copy in copies if len(copy.original_region)]
    count = sum(region.equals(held[0]) for region in held)
    if count in (0, 1, world) or any(n == count and k != MICROBATCHES for k, n in sizes.items()):
        return sizes
    if sizes.get(MICROBATCHES) != count:
        return {**sizes, HOLDERS: count}
    return {(f"{k} (or {HOLDERS})" if k == MICROBATCHES else k): n for k, n in sizes.items()}


def _first_gradients(failing: Sequence[Row]) -> Iterator[Row]:
    """Yield failing gradients of the first step, in the first condition that has some."""
    rows = [row for row in failing if _gradient_of(row)]
    if not rows:
        return
    names: set[str] = set()
    for row in rows:
        name = _gradient_of(row)
        if row.condition == rows[0].condition and row.step == 0 and name not in names:
            names.add(name)
            yield replace(row, name=name)


def _least_norm(expected: Observation, rows: Sequence[Row]) -> float:
    """Return the norm below which a gradient counts as zero; 0 if all wrong ones are below."""
    conditions = {(row.condition, "gradients", 0) for row in rows}
    sizes = {
        k.name: float(v.norm())
        for k, v in expected.tensors.items()
        if v is not None and k[:3] in conditions
    }
    floor = FLOOR * max(sizes.values(), default=0.0)
    return floor if any(sizes.get(row.name, 0.0) >= floor for row in rows) else 0.0


def _gradient_of(row: Row) -> str:
    """Return the parameter whose gradient, or whose copies, a row compares; "" for other rows."""
    if row.kind not in ("gradients", "replicas") or row.step != 0:
        return ""
    not_gradient = row.kind == "replicas" and (row.name == "loss" or row.name.startswith("buffer "))
    return "" if not_gradient else row.name.removeprefix("gradient of ")


def _scale_copies(copies: Sequence[RankCopy], actual: Tensor | None) -> Sequence[RankCopy]:
    """Scale the ranks' copies as the judge scaled the assembled gradient."""
    first_copy = next((c for c in copies if c.values is not None and bool(c.values.any())), None)
    if first_copy is None or actual is None or first_copy.values is None:
        return copies
    assembled = actual.reshape(-1)[first_copy.places].double()
    factor = float((assembled * first_copy.values).sum() / (first_copy.values**2).sum())
    if abs(factor - 1) < 1e-12:
        return copies
    return [replace(c, factor=c.factor * factor) for c in copies]


# ---- Loss, norm, loading, initial state.


def _explain_loss(
    failing: Sequence[Row],
    expected: Observation,
    actual: Observation,
    record: RunRecord,
    world: int,
    module: FirstModule,
    parts: BatchParts,
) -> Iterator[tuple[str, str]]:
    """Explain a wrong loss of the first step by the right one, or by the losses of ranks."""
    row = next((row for row in failing if row.kind == "loss" and row.step == 0), None)
    if row is None:
        return
    key = Key(row.condition, "loss", 0, row.name)
    got, want = actual.tensors.get(key), expected.tensors.get(key)
    if got is None or want is None:
        return
    text = f"{float(got):.6g} instead of {float(want):.6g}"
    labelled = parts.label_counts(row.condition)
    diagnosis = diagnose(
        got, want, {**_add_microbatches({"ranks": world}, world, module.microbatches), **labelled}
    )
    if diagnosis and diagnosis.explains:
        text += f": {diagnosis.text}"
    elif math.isclose(float(got - want), math.log(world), rel_tol=1e-6):
        text += f": the right value plus log(ranks) = log({world}), as if there were more classes"
    elif len(set(record.losses)) > 1 and 0.0 not in record.losses:
        text += f"; ranks return {', '.join(f'{rank_loss:.6g}' for rank_loss in record.losses)}"
    if 0.0 in record.losses and any(record.losses):
        text += f"; ranks return {', '.join(f'{rank_loss:.6g}' for rank_loss in record.losses)}"
    yield "loss", text


def _explain_norm(
    failing: Sequence[Row],
    expected: Observation,
    actual: Observation,
    record: RunRecord,
    world: int,
) -> Iterator[tuple[str, str]]:
    """Explain a wrong gradient norm, if gradients are right: what it counts or omits."""
    row = next((row for row in failing if row.kind == "gradient norm" and row.step == 0), None)
    if row is None or any(r.kind == "gradients" and r.step == 0 for r in _unclipped(failing)):
        return
    key = Key(row.condition, "gradient norm", 0, row.name)
    got, want = actual.tensors.get(key), expected.tensors.get(key)
    if got is None or want is None or not float(want):
        return
    clipped = "clipped" in row.condition
    copies = {name: held for (clips, name), held in record.copies.items() if clips == clipped}
    parts = {name: _squared_norms(held) for name, held in copies.items()}
    held = math.sqrt(sum(region[0] for regions in parts.values() for region in regions))
    if math.isclose(held, float(got), rel_tol=1e-6) and not math.isclose(held, float(want)):
        text = (
            f"it is that of gradients which the step leaves {held / float(want):.6g} times as large"
        )
        yield "gradient norm", f"{text} as the right ones: they are clipped before they are scaled"
        return
    off = float(got) ** 2 - float(want) ** 2
    for names, amount, description in _miscounts(parts):
        if amount and math.isclose(off, amount, rel_tol=1e-6):
            yield "gradient norm", f"{description} {quote_names(names, MOST_NAMES)}"
            return
    if ranks := _ranks_of_norm([*itertools.chain(*copies.values())], world, float(got)):
        which = ", ".join(map(str, ranks))
        yield "gradient norm", f"it sums the squares of what rank {which} holds, and no other"
        return
    yield "gradient norm", f"{float(got):.6g} instead of {float(want):.6g}"


def _unclipped(failing: Sequence[Row]) -> list[Row]:
    return [row for row in failing if "clipped" not in row.condition]


def _squared_norms(copies: Sequence[RankCopy]) -> list[list[float]]:
    """Return the squared norms of a parameter's copies: a list of copies for each region."""
    groups: list[tuple[RankCopy, list[float]]] = []
    for copy in copies:
        square = _square(copy)
        region_norms = next(
            (norms for c, norms in groups if c.original_region.equals(copy.original_region)), None
        )
        if region_norms is None:
            groups.append((copy, [square]))
        else:
            region_norms.append(square)
    return [norms for _, norms in groups]


def _ranks_of_norm(copies: Sequence[RankCopy], world: int, norm: float) -> range | None:
    """Return the ranks, not all, that hold gradients of a norm; None if no axis has them.

    Groups are those that an axis of a mesh may give the first rank: blocks, or every n-th rank.
    """
    squares = [0.0] * world
    for copy in copies:
        squares[copy.rank] += _square(copy)
    sizes = [n for n in range(1, world) if world % n == 0]
    groups = [range(0, n * step, step) for n in sizes for step in (1, world // n)]
    held = (g for g in groups if math.isclose(sum(squares[k] for k in g), norm**2, rel_tol=1e-6))
    return next(held, None)


def _square(copy: RankCopy) -> float:
    """Return the squared norm of a rank's copy; 0 without a gradient."""
    return 0.0 if copy.values is None else float(copy.values.square().sum())


def _miscounts(
    parts: Mapping[str, Sequence[Sequence[float]]],
) -> Iterator[tuple[list[str], float, str]]:
    """Yield parameters, the change of the squared norm by a miscount, and its description."""
    single = {name: sum(region[0] for region in regions) for name, regions in parts.items()}
    copies = [name for name, regions in parts.items() if any(len(region) > 1 for region in regions)]
    split = [name for name, regions in parts.items() if len(regions) > 1]
    for names in (copies, *([name] for name in copies)):
        gain = sum(sum(map(sum, parts[name])) - single[name] for name in names)
        yield names, gain, "it counts each rank's copy of"
        yield names, -sum(single[name] for name in names), "it leaves out"
    for names in (split, *([name] for name in split)):
        lost = sum(single[name] - parts[name][0][0] for name in names)
        yield names, -lost, "it leaves out what ranks but the first hold of"
        yield names, -sum(single[name] for name in names), "it leaves out"


def _explain_loading(failing: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """Describe state that is lost or different after loading, if training itself is right."""
    names_by_note: dict[tuple[str, str], list[str]] = {}
    state_rows = [row for row in failing if row.kind in _STATE_KINDS]
    onward = "training goes on otherwise from it"
    if all(
        row.kind == STEP_AFTER_LOADING and row.name != "loss" and " of " not in row.name
        for row in state_rows
    ):
        onward += ", with right gradients and state: a rate or a schedule is not loaded"
    for row in failing:
        if row.kind in _STATE_KINDS:
            note = row.note or onward
            names_by_note.setdefault((row.kind, note), []).append(row.name)
    if len(names_by_note) and all(row.kind in _STATE_KINDS for row in failing):
        for (kind, note), names in names_by_note.items():
            yield kind, f"{len(names)} ({quote_names(names, MOST_NAMES)}): {note}"


def explain_buffer(row: Row, failing: Sequence[Row]) -> str:
    """Explain a wrong buffer of which ranks hold different values; "" for other rows."""
    copies = replace(row, kind="replicas", name=f"buffer {row.name}")
    if not any(_place(r) == _place(copies) for r in failing):
        return ""
    return (
        f"`{row.name}`: ranks hold different values: what each of them counts or measures is not "
        "summed, averaged or gathered over ranks"
    )


def _place(row: Row) -> tuple[str, str, int | None, str]:
    return row.condition, row.kind, row.step, row.name


def _explain_first(
    row: Row, expected: Observation, actual: Observation, sizes: Mapping[str, int]
) -> str:
    if row.kind == "trainable set":
        return f"{row.note}: what the program trains is not what the original trains"
    if row.kind == "replicas":
        return f"`{row.name}`: ranks hold different values"
    pattern = explain_row(row, expected, actual, sizes)
    if row.kind == "parameters" and pattern.short and "bfloat16" in pattern.text:
        pattern = NO_PATTERN  # as large as a step
    suffix = "; its gradient is right: the optimizer's step is another, or a scheduler's before it"
    return f"`{row.name}`: {pattern.text}{suffix * (row.kind == 'parameters')}" if pattern else ""


def _explain_variants(failing: Sequence[Row], report: Report) -> Iterator[tuple[str, str]]:
    """Report that the program is right on the given batches, and wrong only on variants."""
    derived = dict(report.facts).get("derived")
    failed = {row.condition for row in failing if row.condition and row.kind not in _STATE_KINDS}
    given_condition = next((row.condition for row in report.rows if row.condition), "")
    if derived and failed and given_condition not in failed:
        yield "only where", f"batches have {derived}: as they are given all is equal"


# -- a loss of weights from before an earlier step -------------------------------------------------
# Weights that are gathered, cast or copied once, and not again after a step, give such a loss.

MOST_TRIED = 64  # weights that are tried one by one
RTOL = 1e-9
Weights = Mapping[str, Tensor]


def explain_stale_weights(
    first_row: Row | None, expected: Observation, actual: Observation, trial: Trial
) -> Iterator[tuple[str, str]]:
    """Name the weights that a step computes with as they were before an earlier step.

    Nothing is said unless the first wrong thing is the loss of a later step, and the original with
    these weights gives this loss.
    """
    if first_row is None or first_row.kind != "loss" or not first_row.step:
        return
    value = actual.tensors.get(Key(*_moment(first_row), first_row.name))
    run = next(run for run in trial.conditions if run.name == first_row.condition)
    *earlier, current = _weights_by_step(first_row, expected, trial)
    if value is None or not current:
        return
    for step, weights in reversed([*enumerate(earlier)]):
        for names in _candidates(weights):
            stale = {name: weights[name] for name in names}
            loss = _loss(trial, run, first_row.step, {**current, **stale})
            if math.isclose(loss, float(value), rel_tol=RTOL):
                whole = len(names) == len(weights)
                what = "all weights" if whole else quote_names(names)
                text = (
                    f"step {first_row.step} computes with {what} as before step {step}: what is "
                    "gathered or copied is not renewed after the optimizer's step"
                )
                yield "loss", text
                return


def _moment(row: Row) -> tuple[str, str, int]:
    return row.condition, row.kind, row.step or 0


def _weights_by_step(row: Row, expected: Observation, trial: Trial) -> Iterator[Weights]:
    """Yield the original's weights before each step up to the row's."""
    module = trial.case.plan.model.model
    yield {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
    for step in range(row.step or 0):
        moment = row.condition, "parameters", step
        values = {k.name: v for k, v in expected.tensors.items() if k[:3] == moment}
        yield {name: value for name, value in values.items() if value is not None}


def _candidates(weights: Weights) -> Iterator[Sequence[str]]:
    """Yield names of weights that may be stale: all, then each."""
    yield [*weights]
    if len(weights) <= MOST_TRIED:
        yield from ([name] for name in weights)


def _loss(trial: Trial, run: Condition, step: int, weights: Weights) -> float:
    """Return the original's loss in a step, computed with the given weights."""
    module = copy_original(trial.case)
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(weights.get(name, p))
    loss = trial.case.loss
    original = SeededSequential(module, loss=loss, evaluate=run.evaluate, follow=False, step=step)
    batch = run.batches[step]
    with enter_modes(Float64(), DropoutByMasks(trial.drops.seed, trial.drops.off)):
        return float(original.forward_backward(batch, range(count_rows(batch))))
