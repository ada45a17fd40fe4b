"""Explain a wrong tensor: the arithmetic that makes it from the right one, or where it is wrong."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from schedlang.ir.mesh import Mesh
from schedlang.passes.localize.module_search import Failure, Location
from schedlang.passes.verify.observe import Batch, Key, Observation
from schedlang.passes.verify.probe import Probe, weighted_parts
from schedlang.passes.verify.proof_case import original_subject
from schedlang.report import Row
from schedlang.runtime.checkpointing.holdings import shard_of

_RTOL = 1e-6  # relative error below which a pattern fits


@dataclass(frozen=True)
class Pattern:
    """A sentence about a wrong tensor; empty if there is nothing to say.

    explains  the sentence explains every element, and not only where elements are wrong
    short     of a guess, the sentence to use if the cause is known
    """

    text: str
    explains: bool = True
    short: str = ""

    def __bool__(self) -> bool:
        """Return whether there is a sentence."""
        return bool(self.text)


NO_PATTERN = Pattern("no simple pattern fits", explains=False)
NO_GUESS = Pattern("", explains=False)


def diagnose(
    actual: Tensor | None,
    expected: Tensor | None,
    sizes: Mapping[str, int],
    other_tensors: Mapping[str, Tensor | None] | None = None,
) -> Pattern:
    """Return the pattern that fits; `NO_PATTERN` if none does, and an empty one if nothing is
    wrong.

    `sizes` are numbers by which a mistake may have divided, multiplied or split: mesh axes,
    microbatches. `other_tensors` are right tensors of other names or steps that may have replaced
    this one.
    """
    if actual is None or expected is None:
        present = actual is not None
        return Pattern("" if present else "there is none: detached, or never reduced to its owner")
    if actual.shape != expected.shape:
        return Pattern(f"shape {tuple(actual.shape)} instead of {tuple(expected.shape)}")
    if not actual.numel():
        return Pattern("")
    x, r = actual.double(), expected.double()
    if not bool(x.isfinite().all()):
        return Pattern(f"{int((~x.isfinite()).sum())} of {x.numel()} elements are not finite")
    if not x.any():
        return Pattern("it is zero: detached, or never received" if r.any() else "")
    pattern = (
        _constant_factor(x, r, sizes)
        or _repeated_vector(x, r, other_tensors or {})
        or _replaced_or_added(x, r, other_tensors or {}, sizes)
        or _wrong_blocks(x, r, sizes)
        or _permuted_slices(x, r)
        or _few_wrong(x, r)
        or _low_precision(x, r)
        or _wrong_slices(x, r)
        or _added_constants(x, r)
        or NO_PATTERN
    )
    return pattern if isinstance(pattern, Pattern) else Pattern(pattern)


def explain_row(
    row: Row, expected: Observation, actual: Observation, sizes: Mapping[str, int]
) -> Pattern:
    """Explain a failing row of `compare`, and name the last right gradient before it."""
    key = next((k for k in expected.tensors if _is_key_of(k, row)), None)
    if key is None:
        return Pattern("")
    other_tensors = {
        k.name if k.name != key.name else f"{k.name} after step {k.step}": value
        for k, value in expected.tensors.items()
        if k != key and k[:2] == key[:2] and (k.step == key.step or k.name == key.name)
    }
    pattern = diagnose(actual.tensors.get(key), expected.tensors[key], sizes, other_tensors)
    order = expected.order
    kept_text = f"{row.name} after step {row.step - 1} has been added" if row.step else "\n"
    if row.kind == "gradients" and kept_text in pattern.text:
        pattern = replace(pattern, text=f"{pattern.text}: it was not set to zero")
    if row.kind == "gradients" and row.name in order[1:]:
        order_note = f"; equal just before it in backward: {order[order.index(row.name) - 1]}"
        pattern = replace(pattern, text=pattern.text + order_note)
    return pattern


def _is_key_of(key: Key, row: Row) -> bool:
    return key == (row.condition, row.kind, row.step, row.name)


def is_close(x: Tensor, r: Tensor) -> bool:
    """Return whether two tensors are equal within the tolerance of patterns."""
    return float((x - r).norm()) <= _RTOL * float(r.norm())


def _constant_factor(x: Tensor, r: Tensor, sizes: Mapping[str, int]) -> str:
    """Report one factor between the tensor and the right one."""
    if not float(r.norm()):
        return ""
    factor = float((x * r).sum() / (r * r).sum())
    if not factor or not is_close(x, factor * r) or abs(factor - 1) <= _RTOL:
        return ""
    for description, value in named_factors(sizes):
        if math.isclose(factor, value, rel_tol=_RTOL):
            return f"{description} times the right value everywhere"
    return f"{factor:.6g} times the right value everywhere" if r.numel() > 1 else ""


def named_factors(sizes: Mapping[str, int]) -> Iterator[tuple[str, float]]:
    """Yield named factors: products and quotients of sizes, then -1, small integers, inverses."""
    split_axes = [(name, size) for name, size in sizes.items() if size > 1]
    for count in (1, 2, 3):
        for group in itertools.combinations(split_axes, count):
            product = " · ".join(name for name, _ in group)
            value = math.prod(size for _, size in group)
            inverse = f"1/({product})" if count > 1 else f"1/{product}"
            yield from ((product + f" = {value}", value), (f"{inverse} = 1/{value}", 1 / value))
    for (a, m), (b, n) in itertools.permutations(split_axes, 2):
        yield f"{a}/{b} = {m}/{n}", m / n
    yield "-1", -1.0
    for n in range(2, 17):
        yield from ((str(n), float(n)), (f"1/{n}", 1 / n))


def _repeated_vector(x: Tensor, r: Tensor, other_tensors: Mapping[str, Tensor | None]) -> str:
    """Report a vector (a bias) that every row contains a few times too often."""
    gap = x - r
    for name, vector in other_tensors.items():
        if vector is None or vector.dim() != 1 or x.dim() < 2 or vector.shape[0] != x.shape[-1]:
            continue
        row = vector.double()
        times = float((gap * row).sum() / (row.expand_as(gap) ** 2).sum()) if row.any() else 0.0
        if round(times) and is_close(gap, round(times) * row.expand_as(gap)):
            count_text = (
                f"{round(times)} times too often" if times > 0 else f"{-round(times)} times less"
            )
            return f"it holds {name} {count_text} in every row: once per rank"
    return ""


def explain_by_ranks(locals_: Sequence[Tensor | None], shards: Sequence[Tensor], mesh: Mesh) -> str:
    """Explain how the ranks' wrong values combine to the right ones; "" if they do not.

    `shards` is what each rank should have.
    """
    for axis in (name for name, size in mesh.axes if size > 1):
        explanations = {_explain_over_axis(group, locals_, shards) for group in mesh.groups(axis)}
        if len(explanations) == 1 and (explanation := explanations.pop()):
            return explanation.replace("AXIS", axis)
    return ""


def _explain_over_axis(
    group: Sequence[int], locals_: Sequence[Tensor | None], all_expected: Sequence[Tensor]
) -> str:
    expected = [all_expected[rank].double() for rank in group]
    if any(
        value.shape != expected[0].shape or not is_close(value, expected[0]) for value in expected
    ):
        return ""  # ranks hold different shards
    values = [locals_[rank] for rank in group]
    actual = [
        torch.zeros_like(value) if x is None else x.double() for x, value in zip(values, expected)
    ]
    if any(x.shape != expected[0].shape for x in actual):
        return ""
    right_places = [index for index, x in enumerate(actual) if is_close(x, expected[0])]
    if 0 < len(right_places) < len(actual):
        places_text = ", ".join(map(str, right_places))
        return f"only place {places_text} along AXIS has the right value: not sent to the others"
    total = torch.stack(actual).sum(0)
    if right_places or not bool(total.isfinite().all()):
        return ""
    if is_close(total, expected[0]):
        return "the sum over AXIS of the ranks' values is right: a missing all-reduce over AXIS"
    if is_close(total / len(actual), expected[0]):
        return "the mean over AXIS of the ranks' values is right"
    return ""


def explain_by_parts(x: Tensor, r: Tensor, parts: Mapping[str, Tensor | None]) -> str:
    """Name the part of a sum (a microbatch) that is missing or counted twice; "" if none is."""
    if x.shape != r.shape:
        return ""
    for name, part in parts.items():
        if part is None or not float(part.norm()):
            continue
        for times, description in ((-1, "is missing"), (1, "is counted twice")):
            if is_close(x.double() - r.double(), times * part.double()):
                return f"the share of {name} {description}"
    return ""


def _replaced_or_added(
    x: Tensor, r: Tensor, other_tensors: Mapping[str, Tensor | None], sizes: Mapping[str, int]
) -> str:
    """Report another tensor in this one's place, or added to it, maybe times a named factor."""
    for name, added in other_tensors.items():
        if added is None or added.shape != x.shape or not added.any():
            continue
        added = added.double()
        if is_close(x, added) and not is_close(r, added):
            return f"it is the value of {name}"
        if is_close(x - r, added):
            return f"the value of {name} has been added"
        if x.numel() < 3:
            continue  # so few elements may fit by chance
        times = float(((x - r) * added).sum() / (added * added).sum())
        for text, value in named_factors(sizes) if is_close(x - r, times * added) else ():
            if math.isclose(times, value, rel_tol=_RTOL):
                return f"{text} times the value of {name} has been added"
    return ""


def _wrong_blocks(x: Tensor, r: Tensor, sizes: Mapping[str, int]) -> Pattern | None:
    """Report equal blocks along one dim, of which some are wrong, or all are out of order."""
    for dim, (name, n) in itertools.product(range(x.dim()), sizes.items()):
        if n < 2 or x.shape[dim] % n:
            continue
        blocks, expected = x.chunk(n, dim), r.chunk(n, dim)
        scale = float(r.norm()) * _RTOL
        wrong_indices = [i for i in range(n) if float((blocks[i] - expected[i]).norm()) > scale]
        location = f"of {n} blocks along dim {dim} ({name} = {n})"
        order = [
            next((j for j in range(n) if is_close(blocks[i], expected[j])), None) for i in range(n)
        ]
        if None not in order and order != list(range(n)):
            return Pattern(f"blocks are out of order: {order} {location}")
        if 0 < len(wrong_indices) < n:
            zero = all(not blocks[i].any() for i in wrong_indices)
            wrong_text = ", ".join(map(str, wrong_indices))
            description = f"only block {wrong_text} {location} {'is zero' if zero else 'is wrong'}"
            return Pattern(description, explains=False)
    return None


def _permuted_slices(x: Tensor, r: Tensor) -> str:
    """Report the right slices in another order, or a transposed matrix."""
    for dim in range(x.dim()):
        slices, right_slices = (t.movedim(dim, 0).reshape(t.shape[dim], -1) for t in (x, r))
        if len(slices) < 2 or is_close(slices, right_slices):
            continue
        sums = [t.norm(dim=1).sort() for t in (slices, right_slices)]
        if is_close(sums[0].values, sums[1].values) and is_close(
            slices[sums[0].indices], right_slices[sums[1].indices]
        ):
            return f"the right slices along dim {dim}, in another order"
    if x.dim() == 2 and x.shape[0] == x.shape[1] and is_close(x, r.T):
        return "it is transposed"
    return ""


def _few_wrong(x: Tensor, r: Tensor) -> Pattern | None:
    """Report the number of wrong elements, if most are right."""
    wrong_mask = ((x - r).abs() > _RTOL * float(r.norm())).flatten()
    count = int(wrong_mask.sum())
    if not 0 < count <= x.numel() // 4:
        return None
    last = bool(wrong_mask[-count:].all())
    zero = " and zero" if not x.flatten()[wrong_mask].any() else ""
    text = f"only {'the last ' if last else ''}{count} of {x.numel()} elements are wrong{zero}"
    return Pattern(text, explains=False)


MOST_LISTED = 16  # wrong places in a sentence


def _wrong_slices(x: Tensor, r: Tensor) -> Pattern | None:
    """Report wrong slices along one dim, if most are right."""
    for dim in range(x.dim()):
        slices, right_slices = (t.movedim(dim, 0).reshape(t.shape[dim], -1) for t in (x, r))
        is_off = (slices - right_slices).norm(dim=1) > _RTOL * float(r.norm())
        off_at = is_off.nonzero().reshape(-1).tolist()
        if off_at and 2 * len(off_at) < len(slices):
            word = "zero" if not slices[off_at].any() else "wrong"
            tail = f" and {len(off_at) - MOST_LISTED} more" if len(off_at) > MOST_LISTED else ""
            description = (
                f"right, but for places {off_at[:MOST_LISTED]}{tail} of dim {dim}, which are {word}"
            )
            return Pattern(description, explains=False)
    return None


def _added_constants(x: Tensor, r: Tensor) -> str:
    """Report one number, or two, that is added everywhere."""
    gap = (x - r).flatten()
    if x.numel() < 5:
        return ""
    numbers = sorted([float(gap.min()), float(gap.max())], key=abs)
    tolerance = _RTOL * float(r.abs().max())
    matches = [(gap - n).abs() <= tolerance for n in numbers]
    if bool(matches[0].all()):
        return f"{numbers[0]:.3g} is added everywhere"
    if bool((matches[0] | matches[1]).all()):
        added = [(n, mask) for n, mask in zip(numbers, matches) if abs(n) > tolerance]
        parts = [f"{n:.3g} to {int(mask.sum())}" for n, mask in added]
        return f"a constant is added: {' and '.join(parts)} elements"
    return ""


def _low_precision(x: Tensor, r: Tensor) -> Pattern:
    """Guess a rounding to a lower precision, if nearly all elements are off by about its size.

    If many elements are right, the others are no roundings; a single element shows nothing.
    """
    if x.numel() < 2 or not float(r.norm()):
        return NO_GUESS
    size = float((x - r).norm() / r.norm())
    is_off = (x - r).abs() > 1e-3 * size * r.abs()
    if 10 * int(is_off.sum()) < 9 * int(((x != 0) | (r != 0)).sum()):
        return NO_GUESS
    for name, low, high in (("float32", 1e-9, 3e-7), ("bfloat16 or float16", 2e-5, 1e-2)):
        if low <= size <= high:
            reason = "something is not in float64, or a constant or a small term is another"
            short = f"off by {size:.0e}"
            return Pattern(f"{short}, the size of {name} rounding: {reason}", short=short)
    return NO_GUESS


def describe_failure(
    first_row: Row, failure: Failure, location: Location | None, batch: Batch
) -> str:
    """Describe the first wrong gradient, or what the first wrong module makes."""
    plan = failure.case.plan
    micro = plan.micro
    sizes = dict(plan.mesh.axes) | ({"microbatches": micro} if micro > 1 else {})
    row_pattern = explain_row(first_row, failure.expected, failure.actual, sizes)
    if location is None:
        return row_pattern.text
    explains, text = row_pattern.explains, row_pattern.text
    if not explains or first_row.kind == "outputs":
        module_pattern = _explain_module(failure, location, sizes)
        explains, text = explains or module_pattern.explains, module_pattern.text or text
    if first_row.kind == "gradients" and first_row.step == 0 and not explains:
        text = _explain_gradient(first_row, failure, location, batch) or text
    return text


def _explain_module(failure: Failure, location: Location, sizes: dict[str, int]) -> Pattern:
    """Explain what a wrong module makes from right inputs."""
    if location.values is None:
        return NO_GUESS
    actual, expected = location.values
    name, _ = location.guilty[0]
    model = failure.case.plan.model
    module_tensors = {
        f"its {attribute}": model.model.get_parameter(param.name).detach()
        for attribute, param in model.sites[name].parameters.items()
    }
    pattern = diagnose(actual, expected, sizes, module_tensors)
    if not pattern or pattern == NO_PATTERN:
        return NO_GUESS
    return replace(pattern, text=f"{pattern.text}, in {name or 'the model'}")


def _explain_gradient(first_row: Row, failure: Failure, location: Location, batch: Batch) -> str:
    """Explain a gradient by ranks' own values, or by contributions of parts of the batch."""
    key = Key(first_row.condition, first_row.kind, 0, first_row.name)
    actual, expected = failure.actual.tensors.get(key), failure.expected.tensors.get(key)
    if expected is None:
        return ""
    return _explain_by_holdings(first_row.name, failure, location, expected) or (
        ""
        if actual is None
        else explain_by_parts(actual, expected, _part_gradients(first_row.name, failure, batch))
    )


def _explain_by_holdings(name: str, failure: Failure, location: Location, expected: Tensor) -> str:
    prepared, mesh = failure.case.prepared, failure.case.plan.mesh
    if prepared is None or name not in prepared.holdings:
        return ""
    holding = prepared.holdings[name]
    if not all(holding.is_held(mesh, rank) for rank in range(mesh.world)):
        return ""
    shards = [shard_of(expected, holding, mesh, rank) for rank in range(mesh.world)]
    return explain_by_ranks(location.rank_gradients, shards, mesh)


def _part_gradients(name: str, failure: Failure, batch: Batch) -> dict[str, Tensor | None]:
    """Return the contribution of each part of the batch to a gradient of the original."""
    probe = Probe(failure.case, batch)
    count = len(probe.parts)
    if count < 2:
        return {}
    with original_subject(failure.case) as subject:
        shares = weighted_parts(subject, probe.parts, probe.weights)
        return {f"part {number} of {count}": gradients.get(name) for number, gradients in shares}
