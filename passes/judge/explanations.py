"""Explain a program's mistakes in float64: one sentence of arithmetic for each group of tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from schedlang.diagnostics.diagnostic import quote_names
from schedlang.passes.judge.async_collectives import COLLECTIVES, STRIDES_HELP
from schedlang.passes.judge.batch_parts import BatchParts
from schedlang.passes.judge.gradient_errors import PartPattern, explain_copies, explain_gradient
from schedlang.passes.judge.optimizer_steps import (
    MOST_NAMES,
    diverged_parameters,
    explain_steps,
    prefix_names,
)
from schedlang.passes.judge.rank_copies import RankCopy
from schedlang.passes.judge.record import RunRecord
from schedlang.passes.judge.state_loading import LOADED_STATE, STEP_AFTER_LOADING
from schedlang.passes.localize.diagnosis import NO_PATTERN, Pattern, diagnose, explain_row, is_close
from schedlang.passes.verify.compare import FLOOR
from schedlang.passes.verify.observe import Key, Observation
from schedlang.report import Report, Row

MOST_GROUPS = 6
ROUNDING = 1e-2  # the largest error that a low dtype may cause
INITIAL, DROPOUT = "initial weights", "dropout"
SAVED = "saved state"
MICROBATCHES = "microbatches"
_STATE_KINDS = (SAVED, LOADED_STATE, STEP_AFTER_LOADING)


@dataclass(frozen=True)
class FirstModule:
    """The first wrong module, in words, and facts of the ranks' steps compared with the original's.

    `microbatches`  how often a rank runs what the original runs once: microbatches
    factors  the factor of a rank's first gradient, by rank
    rows     the batch rows of each of the ranks' calls, if they divide the rows
    `explained`    whether the text explains every number
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
    where: FirstModule,
) -> tuple[tuple[str, str], ...]:
    """Explain failing rows: one sentence for each group of tensors with the same error.

    `where`, the first wrong module, comes first.
    """
    assert record.holdings is not None
    sizes = {name: size for name, size in record.holdings.axes.items() if size != world}
    sizes |= {"ranks": world}
    wrong = [row for row in report.rows if not row.ok]
    if other := explain_initial_weights(wrong):
        return other
    found = _explain_gradients(wrong, expected, actual, record, world, parts, where, sizes)
    asked = {row.name for row in report.rows if row.kind == "gradients" and row.step == 0}
    # if gradients are sums over parts of the batch, each module is right
    right = bool(found) and all(isinstance(said, PartPattern) for said in found)
    lines = [("first module", where.text)] * bool(where.text and (where.explained or not right))
    lines += [("gradients", prefix_names(p.text, n, len(asked))) for p, n in found.items() if p]
    lines += list(_explain_loss(wrong, expected, actual, record, world, where, parts))
    lines = list(_explain_norm(wrong, expected, actual, record)) or lines
    lines = [*_explain_step_changes(wrong, record), *lines]
    first = report.first
    if not lines and first is not None and (apart := diverged_parameters(wrong, first)):
        names = quote_names(apart, MOST_NAMES)
        text = f"{names}: with right gradients ranks hold different values after "
        lines = [("parameters", f"{text}the step: what one does is not done, or sent, on others")]
    lines = lines or [*explain_steps(wrong, first, expected, actual, record, sizes)]
    if not lines and first is not None and first.kind not in (*_STATE_KINDS, COLLECTIVES):
        text = _explain_first(first, expected, actual, sizes)
        lines = [(first.kind.split(" (")[0][:17], text)] if text else []
    lines += list(_explain_loading(wrong))
    lines = [
        *_explain_waits(wrong),
        *_explain_strides(wrong, record),
        *lines,
        *_explain_masks(wrong),
    ]
    lines += list(_explain_variants(wrong, report))
    return tuple(lines[:MOST_GROUPS])


def _explain_gradients(
    wrong: Sequence[Row],
    expected: Observation,
    actual: Observation,
    record: RunRecord,
    world: int,
    parts: BatchParts,
    where: FirstModule,
    sizes: Mapping[str, int],
) -> dict[Pattern, list[str]]:
    """Return the patterns of the first step's wrong gradients, with their parameters."""
    found: dict[Pattern, list[str]] = {}
    first_ones = [*_first_gradients(wrong)]
    least = _least_norm(expected, first_ones)
    far = any(row.error > ROUNDING for row in first_ones)
    for row in first_ones:
        key = Key(row.condition, "gradients", 0, row.name)
        want, got = expected.tensors.get(key), actual.tensors.get(key)
        if want is not None and float(want.norm()) < least:
            continue  # zero but for roundings, like a key's bias before a softmax
        copies = record.gradient_copies(row.condition, row.name)
        if want is not None and got is not None and is_close(got.double(), want.double()):
            text = explain_copies(want.reshape(-1).double(), _scale_copies(copies, got))
            found.setdefault(Pattern(text), []).append(row.name)
            continue
        counts = _possible_factors(sizes, world, where, want, got)
        others = {
            k.name: value
            for k, value in expected.tensors.items()
            if k[:3] == key[:3] and k.name != row.name
        }
        said = explain_gradient(want, got, _scale_copies(copies, got), counts, parts, row, others)
        # a small error is no rounding if a module is known to be wrong, or others are far off
        guess = said.short and (far or where.explained and where.text)
        found.setdefault(NO_PATTERN if guess else said, []).append(row.name)
    return found


def _explain_step_changes(wrong: Sequence[Row], record: RunRecord) -> Iterator[tuple[str, str]]:
    """Report parameters that the step itself replaces or changes."""
    if record.replaced_by_step:
        names = quote_names(sorted(record.replaced_by_step), MOST_NAMES)
        text = f"the step puts other parameters for {names}"
        yield "parameters", f"{text}: the optimizer steps those that were there before"
    if record.changed_by_step and any(row.kind == "parameters" for row in wrong):
        names = quote_names(sorted(record.changed_by_step), MOST_NAMES)
        text = f"the step itself changes {names}: the judge"
        yield "parameters", f"{text} steps the optimizer after it"


def _explain_waits(wrong: Sequence[Row]) -> Iterator[tuple[str, str]]:
    return ((COLLECTIVES, f"{row.name}: {row.note}") for row in wrong if row.kind == COLLECTIVES)


def _explain_strides(wrong: Sequence[Row], record: RunRecord) -> Iterator[tuple[str, str]]:
    """Report calls that send tensors in memory order, if a computed value is wrong."""
    if record.strided and any(row.kind not in (COLLECTIVES, DROPOUT) for row in wrong):
        called = ", ".join(f"`{name}` ({line})" for name, line in sorted(record.strided))
        yield COLLECTIVES, f"{called}: {STRIDES_HELP}"


def _explain_masks(wrong: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """Describe modules with wrong dropout, grouped by what is wrong."""
    names: dict[str, list[str]] = {}
    for row in wrong:
        if row.kind == DROPOUT:
            names.setdefault(row.note, []).append(row.name)
    return ((DROPOUT, f"{quote_names(some, MOST_NAMES)}: {note}") for note, some in names.items())


def explain_initial_weights(wrong: Sequence[Row]) -> tuple[tuple[str, str], ...]:
    """Describe initial weights that differ; empty if none do."""
    names: dict[str, list[str]] = {}
    for row in wrong:
        if row.kind == INITIAL:
            names.setdefault(row.note, []).append(row.name)
    said = [f"{len(n)} ({quote_names(n, MOST_NAMES)}): {note}" for note, n in names.items()]
    text = "; ".join(said[:MOST_NAMES])
    return (("weights", f"{text}; what follows differs for that, right or wrong"),) * bool(said)


def _possible_factors(
    sizes: Mapping[str, int],
    world: int,
    where: FirstModule,
    want: Tensor | None,
    got: Tensor | None,
) -> Mapping[str, int]:
    """Return the numbers that a gradient may be off by: ranks, axes, and microbatches.

    If ranks' gradients were already averaged, only the microbatches remain.
    """
    if where.microbatches < 2 or want is None or got is None or got.shape != want.shape:
        return sizes
    there = want.double()
    factor = float((got * there).sum() / (there * there).sum()) if there.any() else 0.0
    own = set(where.factors.values())
    if world > 1 and len(own) == 1 and math.isclose(factor * world, own.pop(), rel_tol=1e-6):
        return {MICROBATCHES: where.microbatches}
    return _add_microbatches(sizes, world, where.microbatches)


def _add_microbatches(sizes: Mapping[str, int], world: int, turns: int) -> Mapping[str, int]:
    if turns < 2:
        return sizes
    if turns != world:
        return {**sizes, MICROBATCHES: turns}
    return {(f"ranks (or {MICROBATCHES})" if k == "ranks" else k): n for k, n in sizes.items()}


def _first_gradients(wrong: Sequence[Row]) -> Iterator[Row]:
    """Yield failing gradients of the first step, in the first condition that has some."""
    rows = [row for row in wrong if _gradient_of(row)]
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
    least = FLOOR * max(sizes.values(), default=0.0)
    return least if any(sizes.get(row.name, 0.0) >= least for row in rows) else 0.0


def _gradient_of(row: Row) -> str:
    """Return the parameter whose gradient, or whose copies, a row compares; "" for other rows."""
    if row.kind not in ("gradients", "replicas") or row.step != 0:
        return ""
    other = row.kind == "replicas" and (row.name == "loss" or row.name.startswith("buffer "))
    return "" if other else row.name.removeprefix("gradient of ")


def _scale_copies(copies: Sequence[RankCopy], got: Tensor | None) -> Sequence[RankCopy]:
    """Scale the ranks' copies as the judge scaled the assembled gradient."""
    first = next((c for c in copies if c.values is not None and bool(c.values.any())), None)
    if first is None or got is None or first.values is None:
        return copies
    after = got.reshape(-1)[first.places].double()
    factor = float((after * first.values).sum() / (first.values**2).sum())
    if abs(factor - 1) < 1e-12:
        return copies
    return [replace(c, factor=c.factor * factor) for c in copies]


# ---- Loss, norm, loading, initial state.


def _explain_loss(
    wrong: Sequence[Row],
    expected: Observation,
    actual: Observation,
    record: RunRecord,
    world: int,
    where: FirstModule,
    parts: BatchParts,
) -> Iterator[tuple[str, str]]:
    """Explain a wrong loss of the first step by the right one, or by the losses of ranks."""
    row = next((row for row in wrong if row.kind == "loss" and row.step == 0), None)
    if row is None:
        return
    key = Key(row.condition, "loss", 0, row.name)
    got, want = actual.tensors.get(key), expected.tensors.get(key)
    if got is None or want is None:
        return
    text = f"{float(got):.6g} instead of {float(want):.6g}"
    labelled = parts.label_counts(row.condition)
    found = diagnose(
        got, want, {**_add_microbatches({"ranks": world}, world, where.microbatches), **labelled}
    )
    if found and found.explains:
        text += f": {found.text}"
    elif math.isclose(float(got - want), math.log(world), rel_tol=1e-6):
        text += f": the right value plus log(ranks) = log({world}), as if there were more classes"
    elif len(set(record.losses)) > 1 and 0.0 not in record.losses:
        text += f"; ranks return {', '.join(f'{one:.6g}' for one in record.losses)}"
    if 0.0 in record.losses and any(record.losses):
        text += f"; ranks return {', '.join(f'{one:.6g}' for one in record.losses)}"
    yield "loss", text


def _explain_norm(
    wrong: Sequence[Row], expected: Observation, actual: Observation, record: RunRecord
) -> Iterator[tuple[str, str]]:
    """Explain a wrong gradient norm, if gradients are right: what it counts or omits."""
    row = next((row for row in wrong if row.kind == "gradient norm" and row.step == 0), None)
    if row is None or any(one.kind == "gradients" and one.step == 0 for one in _unclipped(wrong)):
        return
    key = Key(row.condition, "gradient norm", 0, row.name)
    got, want = actual.tensors.get(key), expected.tensors.get(key)
    if got is None or want is None or not float(want):
        return
    clipped = "clipped" in row.condition
    parts = {
        name: _squared_norms(copies)
        for (when, name), copies in record.copies.items()
        if when == clipped
    }
    held = math.sqrt(sum(each[0] for regions in parts.values() for each in regions))
    if math.isclose(held, float(got), rel_tol=1e-6) and not math.isclose(held, float(want)):
        text = (
            f"it is that of gradients which the step leaves {held / float(want):.6g} times as large"
        )
        yield "gradient norm", f"{text} as the right ones: they are clipped before they are scaled"
        return
    off = float(got) ** 2 - float(want) ** 2
    for names, amount, words in _miscounts(parts):
        if amount and math.isclose(off, amount, rel_tol=1e-6):
            yield "gradient norm", f"{words} {quote_names(names, MOST_NAMES)}"
            return
    yield "gradient norm", f"{float(got):.6g} instead of {float(want):.6g}"


def _unclipped(wrong: Sequence[Row]) -> list[Row]:
    return [row for row in wrong if "clipped" not in row.condition]


def _squared_norms(copies: Sequence[RankCopy]) -> list[list[float]]:
    """Return the squared norms of a parameter's copies: a list of copies for each region."""
    found: list[tuple[RankCopy, list[float]]] = []
    for copy in copies:
        square = 0.0 if copy.values is None else float(copy.values.square().sum())
        own = next(
            (each for one, each in found if one.original_region.equals(copy.original_region)), None
        )
        if own is None:
            found.append((copy, [square]))
        else:
            own.append(square)
    return [each for _, each in found]


def _miscounts(
    parts: Mapping[str, Sequence[Sequence[float]]],
) -> Iterator[tuple[list[str], float, str]]:
    """Yield parameters, the change of the squared norm by a miscount, and its description."""
    once = {name: sum(each[0] for each in regions) for name, regions in parts.items()}
    copies = [name for name, regions in parts.items() if any(len(each) > 1 for each in regions)]
    split = [name for name, regions in parts.items() if len(regions) > 1]
    for names in (copies, *([name] for name in copies)):
        gain = sum(sum(map(sum, parts[name])) - once[name] for name in names)
        yield names, gain, "it counts each rank's copy of"
        yield names, -sum(once[name] for name in names), "it leaves out"
    for names in (split, *([name] for name in split)):
        lost = sum(once[name] - parts[name][0][0] for name in names)
        yield names, -lost, "it leaves out what ranks but the first hold of"
        yield names, -sum(once[name] for name in names), "it leaves out"


def _explain_loading(wrong: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """Describe state that is lost or different after loading, if training itself is right."""
    found: dict[tuple[str, str], list[str]] = {}
    of_state = [row for row in wrong if row.kind in _STATE_KINDS]
    onward = "training goes on otherwise from it"
    if all(
        row.kind == STEP_AFTER_LOADING and row.name != "loss" and " of " not in row.name
        for row in of_state
    ):
        onward += ", with right gradients and state: a rate or a schedule is not loaded"
    for row in wrong:
        if row.kind in _STATE_KINDS:
            note = row.note or onward
            found.setdefault((row.kind, note), []).append(row.name)
    if len(found) and all(row.kind in _STATE_KINDS for row in wrong):
        for (kind, note), names in found.items():
            yield kind, f"{len(names)} ({quote_names(names, MOST_NAMES)}): {note}"


def _explain_first(
    row: Row, expected: Observation, actual: Observation, sizes: Mapping[str, int]
) -> str:
    if row.kind == "trainable set":
        return f"{row.note}: what the program trains is not what the original trains"
    if row.kind == "replicas":
        return f"`{row.name}`: ranks hold different values"
    found = explain_row(row, expected, actual, sizes)
    after = "; its gradient is right: the optimizer's step is another, or a scheduler's before it"
    return f"`{row.name}`: {found.text}{after * (row.kind == 'parameters')}" if found else ""


def _explain_variants(wrong: Sequence[Row], report: Report) -> Iterator[tuple[str, str]]:
    """Report that the program is right on the given batches, and wrong only on variants."""
    derived = dict(report.facts).get("derived")
    named = {row.condition for row in wrong if row.condition and row.kind not in _STATE_KINDS}
    plain = next((row.condition for row in report.rows if row.condition), "")
    if derived and named and plain not in named:
        yield "only where", f"batches have {derived}: as they are given all is equal"
