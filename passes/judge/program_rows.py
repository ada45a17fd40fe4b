"""Rows and gaps that only judged programs have, and assembly of the ranks' outputs."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.passes.judge.dropout_masks import IN_EVALUATION, OriginalDropout
from schedlang.passes.judge.explanations import DROPOUT, INITIAL, SAVED
from schedlang.passes.judge.layouts import ElementIndex
from schedlang.passes.judge.program import NO_RANKS, check_optimizer, user_errors
from schedlang.passes.judge.record import RunRecord
from schedlang.passes.judge.tensor_search import FullTensor
from schedlang.passes.judge.trial import Trial
from schedlang.passes.localize.diagnosis import is_close
from schedlang.passes.verify.compare import ratio
from schedlang.passes.verify.observe import HIDDEN_BUFFERS, Condition, Key, Observation
from schedlang.passes.verify.proof_case import Case
from schedlang.report import Gap, Row

OWN_OPTIMIZER = "own optimizer"
MASK_ERRORS = "masks that differ between copies, or are alike where they should not be"
CHANGED, UNLIKE = "the program changed it before the first step", "ranks start from other values"


def align_observations(
    expected: Observation, actual: Observation, record: RunRecord
) -> tuple[Observation, Observation]:
    """Give both observations the same contents; mark what the program lacks as missing."""
    missing = set(actual.missing) | {"input gradients", "generator state", "dropout draws"}
    for kind, offer in (("outputs", "evaluate"), ("training outputs", "output")):
        missing |= set() if offer in record.offers else {kind}
    if "clip" not in record.offers:
        missing.add("gradient norm")
    slots = {k.kind for k in expected.tensors if k.kind.startswith("optimizer ")}
    if record.optimizer is not None:  # a wrapper may store its state elsewhere
        missing |= slots - {k.kind for k in actual.tensors}
    left_out = dict(actual.left_out)
    tensors = {k: v for k, v in actual.tensors.items() if k.kind not in _OUTPUTS}
    for key, expected_value in expected.tensors.items():
        if key.kind not in _OUTPUTS or key.kind in missing:
            continue
        parts = list(_rank_outputs(actual, key))
        if not parts or expected_value is None:
            left_out[key.name] = _NOT_MADE if parts else "the program does not give it"
        elif (full := _assemble_output(parts, expected_value)) is not None:
            tensors[key] = full
        elif not _may_be_pieces(parts, expected_value):
            tensors[key] = parts[0]  # another shape: the row fails and shows both
        else:
            left_out[key.name] = _NOT_MADE
    lost = {
        k
        for k in expected.tensors
        if k.kind in ("other state", HIDDEN_BUFFERS)
        and k.name in record.lost_buffers
        and k not in tensors
    }
    sets = {
        k: v if k.kind != "state_dict keys" else v - record.lost_buffers
        for k, v in expected.sets.items()
    }
    expected_tensors = {k: v for k, v in expected.tensors.items() if k not in lost}
    actual = replace(
        actual,
        tensors=tensors,
        missing=missing,
        left_out=left_out,
        order=expected.order,
        ties=expected.ties,
    )
    return replace(expected, tensors=expected_tensors, sets=sets), actual


_OUTPUTS = ("outputs", "training outputs")
_NOT_MADE = "parts of ranks do not make it"


def _rank_outputs(actual: Observation, key: Key) -> Iterator[Tensor]:
    """Yield ranks' values of an output, in the order of ranks."""
    for rank in itertools.count():
        value = actual.tensors.get(key._replace(name=f"{key.name}.{rank}"))
        if value is None:
            return
        yield value


def _assemble_output(parts: Sequence[Tensor], expected: Tensor) -> Tensor | None:
    """Assemble a full output from ranks' parts, equal parts once, in the arrangement that is right.

    If no arrangement gives the right output, return the first with its shape.
    """
    distinct: list[Tensor] = []
    for part in parts:
        if part.shape == expected.shape:
            return part.to(expected.dtype, copy=True)
        if not any(part.shape == t.shape and torch.equal(part, t) for t in distinct):
            distinct.append(part)
    fits = [t for t in _arrangements(distinct, len(expected.shape)) if t.shape == expected.shape]
    if not expected.is_floating_point():
        return fits[0] if fits else None
    nearest = min(fits, key=lambda t: float((t - expected).norm()), default=None)
    if nearest is not None and is_close(nearest, expected.to(nearest.dtype)):
        return nearest
    placed = _place_parts(distinct, expected)
    return nearest if placed is None else placed


def _place_parts(parts: Sequence[Tensor], expected: Tensor) -> Tensor | None:
    """Assemble a full output from parts at the places that are nearest, as zigzag slices of tokens.

    None if some part has no place, lies there in another order, or elements are left.
    """
    full = torch.full_like(expected, math.nan)
    for part in parts:
        window = _nearest_slices(part, expected)
        if not window or any(bool((index.diff() <= 0).any()) for index in window):
            return None
        full[torch.meshgrid(*window, indexing="ij")] = part.to(full.dtype)
    return full if not full.isnan().any() else None


def _nearest_slices(part: Tensor, expected: Tensor) -> list[Tensor] | None:
    """Return the indices of a part by dim: the nearest slices of the one dim that it divides.

    If it divides several dims, the values must be found. None if it has no place.
    """
    if part.dim() != expected.dim():
        return None
    divided = [dim for dim, (p, w) in enumerate(zip(part.shape, expected.shape)) if p != w]
    if len(divided) != 1 or part.shape[divided[0]] > expected.shape[divided[0]]:
        return FullTensor(expected).find_window(part)
    rows, full = (t.movedim(divided[0], 0).flatten(1).double() for t in (part, expected))
    index = [torch.arange(size) for size in expected.shape]
    index[divided[0]] = torch.cdist(rows, full).argmin(1)
    return index


def _arrangements(parts: Sequence[Tensor], dims: int) -> Iterator[Tensor]:
    """Yield concatenations of parts along a dim, interleaved along a dim, and as a 2-D grid."""
    for dim in range(dims):
        yield from _concatenate(parts, dim)
        if len({part.shape for part in parts}) == 1 and parts[0].dim() > dim:
            yield torch.stack([*parts], dim + 1).flatten(dim, dim + 1)
    for count in (n for n in range(2, len(parts)) if len(parts) % n == 0):
        groups = [parts[k : k + count] for k in range(0, len(parts), count)]
        for outer, inner in itertools.permutations(range(dims), 2):
            strips = [strip for group in groups for strip in _concatenate(group, inner)]
            if len(strips) == len(groups):
                yield from _concatenate(strips, outer)


def _concatenate(parts: Sequence[Tensor], dim: int) -> Iterator[Tensor]:
    """Yield the concatenation along a dim, if the other sizes are equal."""
    with contextlib.suppress(RuntimeError, IndexError):
        yield torch.cat([*parts], dim)


def _may_be_pieces(parts: Sequence[Tensor], expected: Tensor) -> bool:
    """Return whether parts may be pieces of a tensor, divided in an unknown way."""
    fits = all(p.dim() == expected.dim() for p in parts)
    fits = fits and all(a <= b for p in parts for a, b in zip(p.shape, expected.shape))
    return fits and sum(part.numel() for part in parts) >= expected.numel()


def initial_rows(original: nn.Module, record: RunRecord) -> Iterator[Row]:
    """Yield a row for each parameter: whether ranks hold all of it with the given values."""
    assert record.holdings is not None and record.initial is not None
    for name, p in original.named_parameters():
        value, lost = record.initial.get(name), record.holdings.missing.get(name, 0)
        expected = p.detach()
        if lost or value is None:
            note = f"{lost} of its {p.numel()} elements are on no rank"
            note = "on no rank" if lost in (0, p.numel()) else note
            yield Row("", INITIAL, name, math.inf, 0.0, False, None, note, tuple(p.shape))
            continue
        error = ratio(*(float(t.double().norm()) for t in (value - expected, expected)))
        note = "" if error == 0 else CHANGED
        if not error and (error := record.start_errors.get(name, 0.0)):
            note = UNLIKE
        yield Row("", INITIAL, name, error, 0.0, error == 0, None, note, tuple(p.shape))


def dropout_rows(drops: OriginalDropout, record: RunRecord) -> Iterator[Row]:
    """Yield a row for each module that drops: whether ranks and the original both do."""
    for site, note in record.dropout_sites.extra_modules(drops).items():
        yield Row("", DROPOUT, site, math.inf, 0.0, False, None, note)
    lost = record.dropout_sites.missing_modules(drops)
    for site in drops.sites:
        note = "no rank drops there" if site in lost else record.masks.get(site, "")
        if site in drops.off and not note:
            continue
        yield Row("", DROPOUT, site, math.inf if note else 0.0, 0.0, not note, None, note)


def evaluation_rows(trial: Trial, record: RunRecord) -> Iterator[Row]:
    """Yield a failing row for each module that drops in evaluation, if the original drops none."""
    if record.evaluated and not trial.drops_in_evaluation():
        for site in sorted(record.evaluated):
            yield Row("", DROPOUT, site, math.inf, 0.0, False, None, IN_EVALUATION)


def saved_rows(
    case: Case, actual: Observation, record: RunRecord, conditions: Sequence[Condition]
) -> Iterator[Row]:
    """Compare what the program saves with what its ranks hold, under the original's names.

    The names are those by which the original loads its state. A state without any of them is not
    examined if the program can load it.
    """
    if record.saved is None or (not record.saved and record.loaded is not None):
        return
    assert record.holdings is not None
    condition = conditions[-1]
    last = len(condition.batches) - 1
    held_tensors = {
        k.name: v
        for k, v in actual.tensors.items()
        if k.condition == condition.name
        and k.step == last
        and k.kind in ("parameters", "other state")
    }
    original = case.plan.model.model.state_dict()
    aliases = ElementIndex(case.plan.model.model).aliases
    for name in {**original, **record.saved}:
        if name in record.lost_buffers:
            continue
        expected = held_tensors.get(name)
        if expected is not None and name in original:
            # parameters are assembled in float64; buffers are those of the first rank
            common_dtype = torch.promote_types(expected.dtype, original[name].dtype)
            expected = expected.to(record.holdings.dtypes.get(name, common_dtype))
        value = record.saved.get(name)
        if value is None and record.loaded is not None:  # one name of a tied weight is enough
            tied = (n for n in record.saved if name in aliases and aliases.get(n) == aliases[name])
            value = record.saved.get(next(tied, name))
        note = _describe_change(expected, value)
        error = math.inf if note else 0.0
        yield Row(condition.name, SAVED, name, error, 0.0, not note, last, note)


def dropout_gaps(drops: OriginalDropout, record: RunRecord) -> Iterator[Gap]:
    """Yield gaps of dropout and of other random numbers."""
    for name in sorted(record.dropout_sites.unknown):
        text = f"dropout of `{name}` (its part of the whole is not known)"
        yield Gap(text, "dropout that is wrong there")
    for site, function in drops.others:
        text = f"random numbers of `{site or 'the model'}` (`{function}` stands still)"
        yield Gap(text, "random numbers that are used wrongly")
    for name in drops.generators:
        text = f"random numbers of the model ({name} starts anew in each step, alike on all ranks)"
        yield Gap(text, "ranks that draw other numbers than they should")
    if drops.sites and record.compiled:
        yield Gap("compiled regions (they drop, and run eagerly)", "what compiling breaks")
    if drops.sites:
        yield Gap("masks of its own (the original's are given)", MASK_ERRORS)


def saved_gaps(record: RunRecord) -> tuple[Gap, ...]:
    """List gaps of saved state, for what the program does not offer."""
    if "state_dict" not in record.offers:
        return (Gap("saved state (not offered)", "state that is saved or loaded wrongly"),)
    if record.loaded is None:
        return (Gap("loading saved state (`load` not offered)", "state that is lost in it"),)
    gaps: tuple[Gap, ...] = record.loaded.gaps
    return gaps


def _describe_change(held: Tensor | None, value: Tensor | None) -> str:
    """Describe how a saved tensor differs from the held one; "" if it does not."""
    if value is None or held is None:
        return "lost" if value is None else "extra"
    if value.shape != held.shape or value.dtype != held.dtype:
        saved_facts, held_facts = ((v.dtype, tuple(v.shape)) for v in (value, held))
        return f"{saved_facts[0]} {saved_facts[1]} instead of {held_facts[0]} {held_facts[1]}"
    return "" if torch.equal(value, held) else "differs"


def check_made_optimizer(optimizer: Any) -> Any:
    """Wrap a program's optimizer for the original's process, which has no ranks.

    Refuses (S767) a function that makes none, and (S762) an optimizer that raises there.
    """

    def made(named: Any) -> Any:
        with user_errors(optimizer, "optimizer", None):
            own = check_optimizer(optimizer(named), NO_RANKS)
        step = own.step

        @functools.wraps(step)  # schedulers of rates leave marks on it
        def step_or_refuse(*args: Any, **kwargs: Any) -> Any:
            with user_errors(optimizer, "optimizer", None):
                return step(*args, **kwargs)

        with contextlib.suppress(AttributeError):  # of an object that cannot be changed
            own.step = step_or_refuse
        return own

    return made


def adopt_optimizer(
    conditions: Sequence[Condition], observation: Observation, record: RunRecord
) -> tuple[list[Condition], Observation]:
    """Return the original's conditions, and the observation under the names of these conditions.

    The original uses the program's own optimizer, if there is one, and parameters under the names
    of their groups: parameters that a program fuses share one weight decay.
    """
    assert record.holdings is not None
    groups, conditions = record.holdings.groups, list(conditions)
    if record.optimizer is not None:
        own_optimizer = pickle.loads(record.optimizer)
        names = {c.name: OWN_OPTIMIZER + ", clipped" * ("clipped" in c.name) for c in conditions}
        conditions = [
            replace(c, name=names[c.name], optimizer=check_made_optimizer(own_optimizer))
            for c in conditions
        ]

        def renamed(values: Mapping[Key, Any]) -> dict[Key, Any]:
            return {k._replace(condition=names[k.condition]): v for k, v in values.items()}

        parts = ("tensors", "sets", "replicas")
        renames: dict[str, Any] = {part: renamed(getattr(observation, part)) for part in parts}
        observation = replace(observation, **renames)

    def grouped(optimizer: Any) -> Any:
        return lambda named: optimizer([(groups.get(name, name), p) for name, p in named])

    return [replace(c, optimizer=grouped(c.optimizer)) for c in conditions], observation
