"""Explain one wrong gradient in float64: by parts of the batch, copies on ranks, or factors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from schedlang.diagnostics.diagnostic import quote_names
from schedlang.passes.judge.batch_parts import BatchParts, PartGradients
from schedlang.passes.judge.rank_copies import RankCopy
from schedlang.passes.localize.diagnosis import Pattern, diagnose, is_close
from schedlang.report import Row

SPARE_EQUATIONS = 3  # equations beyond the unknowns, so that no fit is by chance


class PartPattern(Pattern):
    """A sentence: the gradient is a sum of right gradients of parts of the batch."""


def explain_gradient(
    want: Tensor | None,
    got: Tensor | None,
    copies: Sequence[RankCopy],
    sizes: Mapping[str, int],
    parts: BatchParts,
    row: Row,
    others: Mapping[str, Tensor | None] | None = None,
) -> Pattern:
    """Explain a wrong gradient by the right one, ranks' copies, parts of the batch, `others`."""
    if want is None:
        return Pattern("the original has none" if got is not None else "")
    if got is None:
        return Pattern("no rank has one: detached, or never computed")
    flat = want.reshape(-1).double()
    text = explain_copies(flat, copies)
    if text:
        return Pattern(text)
    said = (
        _explain_by_parts(want.double(), got.double(), cut)
        for cut in parts.split_by_rows(*_key_of(row))
    )
    if text := next(filter(None, said), ""):
        return PartPattern(text)
    found = diagnose(got, want, {**sizes, **parts.label_counts(row.condition)}, others)
    if found and found.explains and not found.short:
        return found
    if text := _explain_ranks(flat, copies, parts.label_counts_by_part(row.condition)):
        return Pattern(text)
    said = (
        _explain_by_parts(want.double(), got.double(), cut)
        for cut in parts.split_by_tokens(*_key_of(row))
    )
    text = next(filter(None, said), "")
    return PartPattern(text) if text else found


def _key_of(row: Row) -> tuple[str, str]:
    return row.name, row.condition


def _explain_by_parts(want: Tensor, got: Tensor, cut: PartGradients) -> str:
    """Explain a gradient as the plain mean, or a weighted sum, of the gradients of parts."""
    if not bool(got.isfinite().all()):
        return ""
    mean = torch.stack(list(cut.parts)).mean(0)
    if not _is_parallel(got, mean) or _is_parallel(want, mean):
        return _explain_weights(want, got, cut)
    return describe_part_mean(want, cut)


def describe_part_mean(want: Tensor, cut: PartGradients) -> str:
    """Describe a plain mean over parts, and why it is not the right gradient."""
    said = f"it is the plain mean of what {len(cut.parts)} parts of {cut.unit} give by themselves"
    columns = torch.stack([part.reshape(-1) for part in cut.parts], 1)
    weights = torch.linalg.lstsq(columns, want.reshape(-1, 1)).solution
    if is_close((columns @ weights).reshape(want.shape), want):
        each = ", ".join(f"{float(w / weights.sum()):.3g}" for w in weights)
        return (
            f"{said}, but they weigh {each}: divide the sum of all losses by the count of all "
            "labels (or rows)"
        )
    return (
        f"{said}; the original sees the whole batch at once (statistics of a batch norm, a loss "
        "over all rows)"
    )


def _explain_weights(want: Tensor, got: Tensor, cut: PartGradients) -> str:
    """Explain a gradient as a sum over parts with other weights than the right one."""
    columns = torch.stack([part.reshape(-1) for part in cut.parts], 1)
    if len(columns) < len(cut.parts) + SPARE_EQUATIONS:
        return ""  # too few elements
    both = torch.stack([got.reshape(-1), want.reshape(-1)], 1)
    weights, _, rank, _ = torch.linalg.lstsq(columns, both, driver="gelsd")
    sums = zip((columns @ weights).T, both.T)
    if int(rank) < len(cut.parts) or not all(is_close(a, b) for a, b in sums):
        return ""
    times = (weights[:, 0] / weights[:, 1]).tolist()
    most = max(map(abs, times))
    apart = max(times) - min(times) >= 1e-6 * most > 1e-12  # else zero, or one factor for all
    if not all(map(math.isfinite, times)) or not apart:
        return ""
    return describe_part_counts([one if abs(one) > 1e-6 else 0.0 for one in times], cut.unit)


def describe_part_counts(times: Sequence[float], unit: str) -> str:
    """Describe how often parts of a batch count that should count once."""
    each = ", ".join(f"{one:.4g}" for one in times)
    return f"{len(times)} parts of {unit} count {each} times what they should"


def _is_parallel(x: Tensor, r: Tensor) -> bool:
    """Return whether two tensors are equal but for a positive factor, which clipping may leave."""
    if x.shape != r.shape or not x.any() or not r.any():
        return False
    factor = float((x * r).sum() / (r * r).sum())
    return factor > 0 and is_close(x, factor * r)


def explain_copies(want: Tensor, copies: Sequence[RankCopy]) -> str:
    """Describe how copies of the same elements differ, on several ranks or one; "" if equal."""
    groups: dict[bytes, list[RankCopy]] = {}
    for copy in copies:
        if len(copy.original_region):
            groups.setdefault(copy.places.sort().values.numpy().tobytes(), []).append(copy)
    said = {_explain_group(want, group) for group in groups.values()}
    said.discard("")
    return sorted(said)[0] if said else ""


def _explain_group(want: Tensor, group: Sequence[RankCopy]) -> str:
    there = [copy for copy in group if copy.stored is not None]
    absent = [copy for copy in group if copy.stored is None]
    if len(group) < 2 or not there:
        return ""
    order = there[0].places.sort().values
    right = want[order]
    values = [copy.values[copy.places.argsort()].double() for copy in there]  # type: ignore[index]
    different: list[Tensor] = []
    for value in values:
        if not any(is_close(value, one) for one in different):
            different.append(value)
    if len(different) == 1 and not (absent and is_close(different[0], right)):
        return ""
    good = [copy for copy, value in zip(there, values) if is_close(value, right)]
    bad = [copy for copy in group if not any(copy is one for one in good)]
    if good:
        none = all(copy.stored is None for copy in bad)
        have = "has" if len(_ranks_of(good)) == 1 else "have"
        return (
            f"only {_list_ranks(good)} {have} the right value: "
            f"{'there is none' if none else 'it is not the same'} on {_list_ranks(bad)}"
        )
    one_rank = len({copy.rank for copy in group}) < len(group)
    where = "copies" if one_rank else "ranks"
    names = sorted({copy.name for copy in group})
    tie = f": a tie is broken between {quote_names(names)}" if len(names) > 1 else ""
    total, each = torch.stack(different).sum(0), torch.stack(values)
    if is_close(total, right) or is_close(each.sum(0), right):
        return f"{where} differ and their sum is right: a sum over {where} is missing{tie}"
    if is_close(each.mean(0), right) or is_close(total / len(different), right):
        return f"{where} differ and their mean is right: they are not averaged{tie}"
    factor = float((total * right).sum() / (right * right).sum()) if right.any() else 0.0
    if factor and is_close(total, factor * right):
        return (
            f"{where} differ and their sum is {factor:.6g} times the right value: a sum over "
            f"{where} is missing{tie}"
        )
    return f"{where} differ, and neither their sum nor their mean is right{tie}"


def _explain_ranks(
    want: Tensor, copies: Sequence[RankCopy], counts: Sequence[Sequence[int]] = ()
) -> str:
    """Describe which ranks' parts are wrong, and by which factor or label count.

    `counts` are the numbers of labels in ranks' parts of the batch, for possible divisions.
    """
    right: list[RankCopy] = []
    wrong: dict[str, list[RankCopy]] = {}
    factors: dict[int, float] = {}
    for copy in copies:
        if copy.stored is None or not len(copy.original_region):
            continue
        assert copy.values is not None
        part, value = want[copy.places], copy.values.double()
        if is_close(value, part) or not part.any() and not value.any():
            right.append(copy)
            continue
        factor = float((value * part).sum() / (part * part).sum()) if part.any() else math.nan
        near = is_close(value, factor * part)
        factors[copy.rank] = factor if near else math.nan
        text = f"{factor:.6g} times the right value" if near else "wrong"
        wrong.setdefault("zero" if not value.any() else text, []).append(copy)
    if not wrong or (not right and len(wrong) < 2):
        return ""
    if not right and (own := _explain_label_counts([*factors.values()], counts)):
        return own
    said = [f"what {_list_ranks(ones)} holds is {text}" for text, ones in wrong.items()]
    return f"{'; '.join(said)}" + (f"; that of {_list_ranks(right)} is right" if right else "")


def _explain_label_counts(factors: Sequence[float], counts: Sequence[Sequence[int]]) -> str:
    """Explain ranks' factors as one over the label count of each rank's own rows."""
    own: list[float] = []
    for one in sorted(factors):
        if not own or not math.isclose(one, own[-1], rel_tol=1e-6):
            own.append(one)
    for each in counts:
        alone = sorted({*each}, reverse=True)
        if len(alone) != len(own) or len(alone) < 2 or not alone[-1]:
            continue
        products = [factor * count for factor, count in zip(own, alone, strict=True)]
        if all(math.isclose(one, products[0], rel_tol=1e-6) for one in products):
            said = ", ".join(map(str, each))
            text = (
                "each rank divides what it holds of the sum over all labels by the count of its own"
            )
            return f"{text} ({said} of {sum(each)})"
    return ""


def _list_ranks(copies: Sequence[RankCopy]) -> str:
    ranks = _ranks_of(copies)
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _ranks_of(copies: Sequence[RankCopy]) -> list[int]:
    return sorted({copy.rank for copy in copies})
