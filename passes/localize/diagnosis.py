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

    `explains`   the sentence explains every element, and not only where elements are wrong
    short   of a guess, the sentence to use if the cause is known
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
    others: Mapping[str, Tensor | None] | None = None,
) -> Pattern:
    """Return the pattern that fits; `NO_PATTERN` if none does, and an empty one if nothing is
    wrong.

    `sizes` are numbers by which a mistake may have divided, multiplied or split: mesh axes,
    microbatches. `others` are right tensors of other names or steps that may have replaced this
    one.
    """
    if actual is None or expected is None:
        there = actual is not None
        return Pattern("" if there else "there is none: detached, or never reduced to its owner")
    if actual.shape != expected.shape:
        return Pattern(f"shape {tuple(actual.shape)} instead of {tuple(expected.shape)}")
    if not actual.numel():
        return Pattern("")
    x, r = actual.double(), expected.double()
    if not bool(x.isfinite().all()):
        return Pattern(f"{int((~x.isfinite()).sum())} of {x.numel()} elements are not finite")
    if not x.any():
        return Pattern("it is zero: detached, or never received" if r.any() else "")
    found = (
        _constant_factor(x, r, sizes)
        or _repeated_vector(x, r, others or {})
        or _replaced_or_added(x, r, others or {}, sizes)
        or _wrong_blocks(x, r, sizes)
        or _permuted_slices(x, r)
        or _few_wrong(x, r)
        or _low_precision(x, r)
        or _wrong_slices(x, r)
        or _added_constants(x, r)
        or NO_PATTERN
    )
    return found if isinstance(found, Pattern) else Pattern(found)


def explain_row(
    row: Row, expected: Observation, actual: Observation, sizes: Mapping[str, int]
) -> Pattern:
    """Explain a failing row of `compare`, and name the last right gradient before it."""
    key = next((k for k in expected.tensors if _is_key_of(k, row)), None)
    if key is None:
        return Pattern("")
    others = {
        k.name if k.name != key.name else f"{k.name} after step {k.step}": value
        for k, value in expected.tensors.items()
        if k != key and k[:2] == key[:2] and (k.step == key.step or k.name == key.name)
    }
    found = diagnose(actual.tensors.get(key), expected.tensors[key], sizes, others)
    order = expected.order
    kept = f"{row.name} after step {row.step - 1} has been added" if row.step else "\n"
    if row.kind == "gradients" and kept in found.text:
        found = replace(found, text=f"{found.text}: it was not set to zero")
    if row.kind == "gradients" and row.name in order[1:]:
        before = f"; equal just before it in backward: {order[order.index(row.name) - 1]}"
        found = replace(found, text=found.text + before)
    return found


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
    for words, value in named_factors(sizes):
        if math.isclose(factor, value, rel_tol=_RTOL):
            return f"{words} times the right value everywhere"
    return f"{factor:.6g} times the right value everywhere" if r.numel() > 1 else ""


def named_factors(sizes: Mapping[str, int]) -> Iterator[tuple[str, float]]:
    """Yield named factors: products and quotients of sizes, then -1, small integers, inverses."""
    named = [(name, size) for name, size in sizes.items() if size > 1]
    for count in (1, 2, 3):
        for group in itertools.combinations(named, count):
            words = " · ".join(name for name, _ in group)
            value = math.prod(size for _, size in group)
            inverse = f"1/({words})" if count > 1 else f"1/{words}"
            yield from ((words + f" = {value}", value), (f"{inverse} = 1/{value}", 1 / value))
    for (a, m), (b, n) in itertools.permutations(named, 2):
        yield f"{a}/{b} = {m}/{n}", m / n
    yield "-1", -1.0
    for n in range(2, 17):
        yield from ((str(n), float(n)), (f"1/{n}", 1 / n))


def _repeated_vector(x: Tensor, r: Tensor, others: Mapping[str, Tensor | None]) -> str:
    """Report a vector (a bias) that every row contains a few times too often."""
    gap = x - r
    for name, other in others.items():
        if other is None or other.dim() != 1 or x.dim() < 2 or other.shape[0] != x.shape[-1]:
            continue
        row = other.double()
        times = float((gap * row).sum() / (row.expand_as(gap) ** 2).sum()) if row.any() else 0.0
        if round(times) and is_close(gap, round(times) * row.expand_as(gap)):
            often = (
                f"{round(times)} times too often" if times > 0 else f"{-round(times)} times less"
            )
            return f"it holds {name} {often} in every row: once per rank"
    return ""


def explain_by_ranks(locals_: Sequence[Tensor | None], right: Sequence[Tensor], mesh: Mesh) -> str:
    """Explain how the ranks' wrong values combine to the right ones; "" if they do not.

    `right` is what each rank should have.
    """
    for axis in (name for name, size in mesh.axes if size > 1):
        ways = {_explain_over_axis(group, locals_, right) for group in mesh.groups(axis)}
        if len(ways) == 1 and (way := ways.pop()):
            return way.replace("AXIS", axis)
    return ""


def _explain_over_axis(
    group: Sequence[int], locals_: Sequence[Tensor | None], right: Sequence[Tensor]
) -> str:
    wanted = [right[rank].double() for rank in group]
    if any(w.shape != wanted[0].shape or not is_close(w, wanted[0]) for w in wanted):
        return ""  # ranks hold different shards
    found = [locals_[rank] for rank in group]
    ours = [torch.zeros_like(w) if x is None else x.double() for x, w in zip(found, wanted)]
    if any(x.shape != wanted[0].shape for x in ours):
        return ""
    good = [place for place, x in enumerate(ours) if is_close(x, wanted[0])]
    if 0 < len(good) < len(ours):
        which = ", ".join(map(str, good))
        return f"only place {which} along AXIS has the right value: not sent to the others"
    total = torch.stack(ours).sum(0)
    if good or not bool(total.isfinite().all()):
        return ""
    if is_close(total, wanted[0]):
        return "the sum over AXIS of the ranks' values is right: a missing all-reduce over AXIS"
    if is_close(total / len(ours), wanted[0]):
        return "the mean over AXIS of the ranks' values is right"
    return ""


def explain_by_parts(x: Tensor, r: Tensor, parts: Mapping[str, Tensor | None]) -> str:
    """Name the part of a sum (a microbatch) that is missing or counted twice; "" if none is."""
    if x.shape != r.shape:
        return ""
    for name, part in parts.items():
        if part is None or not float(part.norm()):
            continue
        for times, words in ((-1, "is missing"), (1, "is counted twice")):
            if is_close(x.double() - r.double(), times * part.double()):
                return f"the share of {name} {words}"
    return ""


def _replaced_or_added(
    x: Tensor, r: Tensor, others: Mapping[str, Tensor | None], sizes: Mapping[str, int]
) -> str:
    """Report another tensor in this one's place, or added to it, maybe times a named factor."""
    for name, other in others.items():
        if other is None or other.shape != x.shape or not other.any():
            continue
        other = other.double()
        if is_close(x, other) and not is_close(r, other):
            return f"it is the value of {name}"
        if is_close(x - r, other):
            return f"the value of {name} has been added"
        if x.numel() < 3:
            continue  # so few elements may fit by chance
        times = float(((x - r) * other).sum() / (other * other).sum())
        for words, value in named_factors(sizes) if is_close(x - r, times * other) else ():
            if math.isclose(times, value, rel_tol=_RTOL):
                return f"{words} times the value of {name} has been added"
    return ""


def _wrong_blocks(x: Tensor, r: Tensor, sizes: Mapping[str, int]) -> Pattern | None:
    """Report equal blocks along one dim, of which some are wrong, or all are out of order."""
    for dim, (name, n) in itertools.product(range(x.dim()), sizes.items()):
        if n < 2 or x.shape[dim] % n:
            continue
        ours, right = x.chunk(n, dim), r.chunk(n, dim)
        scale = float(r.norm()) * _RTOL
        wrong = [i for i in range(n) if float((ours[i] - right[i]).norm()) > scale]
        where = f"of {n} blocks along dim {dim} ({name} = {n})"
        order = [next((j for j in range(n) if is_close(ours[i], right[j])), None) for i in range(n)]
        if None not in order and order != list(range(n)):
            return Pattern(f"blocks are out of order: {order} {where}")
        if 0 < len(wrong) < n:
            zero = all(not ours[i].any() for i in wrong)
            which = ", ".join(map(str, wrong))
            said = f"only block {which} {where} {'is zero' if zero else 'is wrong'}"
            return Pattern(said, explains=False)
    return None


def _permuted_slices(x: Tensor, r: Tensor) -> str:
    """Report the right slices in another order, or a transposed matrix."""
    for dim in range(x.dim()):
        ours, right = (t.movedim(dim, 0).reshape(t.shape[dim], -1) for t in (x, r))
        if len(ours) < 2 or is_close(ours, right):
            continue
        sums = [t.norm(dim=1).sort() for t in (ours, right)]
        if is_close(sums[0].values, sums[1].values) and is_close(
            ours[sums[0].indices], right[sums[1].indices]
        ):
            return f"the right slices along dim {dim}, in another order"
    if x.dim() == 2 and x.shape[0] == x.shape[1] and is_close(x, r.T):
        return "it is transposed"
    return ""


def _few_wrong(x: Tensor, r: Tensor) -> Pattern | None:
    """Report the number of wrong elements, if most are right."""
    wrong = ((x - r).abs() > _RTOL * float(r.norm())).flatten()
    count = int(wrong.sum())
    if not 0 < count <= x.numel() // 4:
        return None
    last = bool(wrong[-count:].all())
    zero = " and zero" if not x.flatten()[wrong].any() else ""
    said = f"only {'the last ' if last else ''}{count} of {x.numel()} elements are wrong{zero}"
    return Pattern(said, explains=False)


MOST_LISTED = 16  # wrong places in a sentence


def _wrong_slices(x: Tensor, r: Tensor) -> Pattern | None:
    """Report wrong slices along one dim, if most are right."""
    for dim in range(x.dim()):
        ours, right = (t.movedim(dim, 0).reshape(t.shape[dim], -1) for t in (x, r))
        off = (ours - right).norm(dim=1) > _RTOL * float(r.norm())
        wrong = off.nonzero().reshape(-1).tolist()
        if wrong and 2 * len(wrong) < len(ours):
            how = "zero" if not ours[wrong].any() else "wrong"
            more = f" and {len(wrong) - MOST_LISTED} more" if len(wrong) > MOST_LISTED else ""
            said = (
                f"right, but for places {wrong[:MOST_LISTED]}{more} of dim {dim}, which are {how}"
            )
            return Pattern(said, explains=False)
    return None


def _added_constants(x: Tensor, r: Tensor) -> str:
    """Report one number, or two, that is added everywhere."""
    gap = (x - r).flatten()
    if x.numel() < 5:
        return ""
    numbers = sorted([float(gap.min()), float(gap.max())], key=abs)
    least = _RTOL * float(r.abs().max())
    near = [(gap - n).abs() <= least for n in numbers]
    if bool(near[0].all()):
        return f"{numbers[0]:.3g} is added everywhere"
    if bool((near[0] | near[1]).all()):
        both = [(n, there) for n, there in zip(numbers, near) if abs(n) > least]
        each = [f"{n:.3g} to {int(there.sum())}" for n, there in both]
        return f"a constant is added: {' and '.join(each)} elements"
    return ""


def _low_precision(x: Tensor, r: Tensor) -> Pattern:
    """Guess a rounding to a lower precision, if nearly all elements are off by about its size.

    If many elements are right, the others are no roundings; a single element shows nothing.
    """
    if x.numel() < 2 or not float(r.norm()):
        return NO_GUESS
    size = float((x - r).norm() / r.norm())
    off = (x - r).abs() > 1e-3 * size * r.abs()
    if 10 * int(off.sum()) < 9 * int(((x != 0) | (r != 0)).sum()):
        return NO_GUESS
    for name, low, high in (("float32", 1e-9, 3e-7), ("bfloat16 or float16", 2e-5, 1e-2)):
        if low <= size <= high:
            why = "something is not in float64, or a constant differs"
            short = f"off by {size:.0e}"
            return Pattern(f"{short}, the size of {name} rounding: {why}", short=short)
    return NO_GUESS


def describe_failure(first: Row, failure: Failure, where: Location | None, batch: Batch) -> str:
    """Describe the first wrong gradient, or what the first wrong module makes."""
    plan = failure.case.plan
    micro = plan.micro
    sizes = dict(plan.mesh.axes) | ({"microbatches": micro} if micro > 1 else {})
    found = explain_row(first, failure.expected, failure.actual, sizes)
    if where is None:
        return found.text
    explains, text = found.explains, found.text
    if not explains or first.kind == "outputs":
        inside = _explain_module(failure, where, sizes)
        explains, text = explains or inside.explains, inside.text or text
    if first.kind == "gradients" and first.step == 0 and not explains:
        text = _explain_gradient(first, failure, where, batch) or text
    return text


def _explain_module(failure: Failure, where: Location, sizes: dict[str, int]) -> Pattern:
    """Explain what a wrong module makes from right inputs."""
    if where.values is None:
        return NO_GUESS
    got, want = where.values
    name, _ = where.guilty[0]
    model = failure.case.plan.model
    own = {
        f"its {attribute}": model.model.get_parameter(fact.name).detach()
        for attribute, fact in model.sites[name].parameters.items()
    }
    found = diagnose(got, want, sizes, own)
    if not found or found == NO_PATTERN:
        return NO_GUESS
    return replace(found, text=f"{found.text}, in {name or 'the model'}")


def _explain_gradient(first: Row, failure: Failure, where: Location, batch: Batch) -> str:
    """Explain a gradient by ranks' own values, or by contributions of parts of the batch."""
    key = Key(first.condition, first.kind, 0, first.name)
    got, want = failure.actual.tensors.get(key), failure.expected.tensors.get(key)
    if want is None:
        return ""
    return _explain_by_holdings(first.name, failure, where, want) or (
        ""
        if got is None
        else explain_by_parts(got, want, _part_gradients(first.name, failure, batch))
    )


def _explain_by_holdings(name: str, failure: Failure, where: Location, want: Tensor) -> str:
    prepared, mesh = failure.case.prepared, failure.case.plan.mesh
    if prepared is None or name not in prepared.holdings:
        return ""
    holding = prepared.holdings[name]
    if not all(holding.is_held(mesh, rank) for rank in range(mesh.world)):
        return ""
    right = [shard_of(want, holding, mesh, rank) for rank in range(mesh.world)]
    return explain_by_ranks(where.rank_gradients, right, mesh)


def _part_gradients(name: str, failure: Failure, batch: Batch) -> dict[str, Tensor | None]:
    """Return the contribution of each part of the batch to a gradient of the original."""
    probe = Probe(failure.case, batch)
    count = len(probe.parts)
    if count < 2:
        return {}
    with original_subject(failure.case) as subject:
        shares = weighted_parts(subject, probe.parts, probe.weights)
        return {f"part {number} of {count}": found.get(name) for number, found in shares}
