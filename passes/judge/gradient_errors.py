"""Explain one wrong gradient in float64: by parts of the batch, copies on ranks, or factors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from schedlang.diagnostics.diagnostic import quote_names
from schedlang.passes.judge.batch_parts import ROWS, BatchParts, PartGradients
from schedlang.passes.judge.regions import RankCopy
from schedlang.passes.localize.diagnosis import Pattern, diagnose, is_close
from schedlang.report import Row

SPARE_EQUATIONS = 3  # equations beyond the unknowns, so that no fit is by chance


class PartPattern(Pattern):
    """A sentence: the gradient is a sum of right gradients of parts of the batch."""


def explain_gradient(
    expected: Tensor | None,
    actual: Tensor | None,
    copies: Sequence[RankCopy],
    sizes: Mapping[str, int],
    parts: BatchParts,
    row: Row,
    others: Mapping[str, Tensor | None] | None = None,
) -> Pattern:
    """Explain a wrong gradient by the right one, ranks' copies, parts of the batch, `others`."""
    if expected is None:
        return Pattern("the original has none" if actual is not None else "")
    if actual is None:
        return Pattern("no rank has one: detached, or never computed")
    flat = expected.reshape(-1).double()
    if text := explain_copies(flat, copies) or _explain_absent(flat, copies):
        return Pattern(text)
    texts = (
        _explain_by_parts(expected.double(), actual.double(), cut)
        for cut in parts.split_by_rows(*_key_of(row))
    )
    if text := next(filter(None, texts), ""):
        return PartPattern(text)
    diagnosis = diagnose(actual, expected, {**sizes, **parts.label_counts(row.condition)}, others)
    if diagnosis and diagnosis.explains and not diagnosis.short:
        return diagnosis
    if text := _explain_ranks(flat, copies, parts.label_counts_by_part(row.condition)):
        return Pattern(text)
    texts = (
        _explain_by_parts(expected.double(), actual.double(), cut)
        for cut in (*parts.split_by_tokens(*_key_of(row)), *parts.split_into_rows(*_key_of(row)))
    )
    text = next(filter(None, texts), "")
    return PartPattern(text) if text else diagnosis


def _key_of(row: Row) -> tuple[str, str]:
    return row.name, row.condition


def _explain_by_parts(expected: Tensor, actual: Tensor, cut: PartGradients) -> str:
    """Explain a gradient as the plain mean, or a weighted sum, of the gradients of parts."""
    if not bool(actual.isfinite().all()):
        return ""
    mean = torch.stack(list(cut.parts)).mean(0)
    if not _is_parallel(actual, mean) or _is_parallel(expected, mean):
        return _explain_weights(expected, actual, cut)
    return describe_part_mean(expected, cut)


def describe_part_mean(expected: Tensor, cut: PartGradients) -> str:
    """Describe a plain mean over parts, and why it is not the right gradient."""
    text = f"it is the plain mean of what {len(cut.parts)} parts of {cut.unit} give by themselves"
    columns = torch.stack([part.reshape(-1) for part in cut.parts], 1)
    weights = torch.linalg.lstsq(columns, expected.reshape(-1, 1)).solution
    if is_close((columns @ weights).reshape(expected.shape), expected):
        shares = ", ".join(f"{float(w / weights.sum()):.3g}" for w in weights)
        return (
            f"{text}, but they weigh {shares}: divide the sum of all losses by the count of all "
            "labels (or rows)"
        )
    return (
        f"{text}; the original sees the whole batch at once (statistics of a batch norm, a loss "
        "over all rows)"
    )


def _explain_weights(expected: Tensor, actual: Tensor, cut: PartGradients) -> str:
    """Explain a gradient as a sum over parts with other weights than the right one."""
    columns = torch.stack([part.reshape(-1) for part in cut.parts], 1)
    if len(columns) < len(cut.parts) + SPARE_EQUATIONS:
        return ""  # too few elements
    targets = torch.stack([actual.reshape(-1), expected.reshape(-1)], 1)
    weights, _, rank, _ = torch.linalg.lstsq(columns, targets, driver="gelsd")
    sums = zip((columns @ weights).T, targets.T)
    if int(rank) < len(cut.parts) or not all(is_close(a, b) for a, b in sums):
        return ""
    times = (weights[:, 0] / weights[:, 1]).tolist()
    largest = max(map(abs, times))
    differ = max(times) - min(times) >= 1e-6 * largest > 1e-12  # else zero, or one factor for all
    if not all(map(math.isfinite, times)) or not differ:
        return ""
    return describe_part_counts([n if abs(n) > 1e-6 else 0.0 for n in times], cut.unit)


def describe_part_counts(times: Sequence[float], unit: str) -> str:
    """Describe how often parts of a batch count that should count once."""
    if unit == ROWS:
        return _describe_row_counts(times)
    counts = ", ".join(f"{factor:.4g}" for factor in times)
    return f"{len(times)} parts of {unit} count {counts} times what they should"


def _describe_row_counts(times: Sequence[float]) -> str:
    """Describe how often rows count, most of them last."""
    rows: dict[str, list[int]] = {}
    for row, factor in enumerate(times):
        rows.setdefault(f"{factor:.4g}", []).append(row)
    *named, usual = sorted(rows, key=lambda factor: len(rows[factor]))
    texts = [
        f"rows {', '.join(map(str, rows[factor]))} of the batch count {factor} times"
        if len(rows[factor]) > 1
        else f"row {rows[factor][0]} of the batch counts {factor} times"
        for factor in named
    ]
    return f"{', '.join(texts)}, instead of once; all others count {usual} times"


def _is_parallel(x: Tensor, r: Tensor) -> bool:
    """Return whether two tensors are equal but for a positive factor, which clipping may leave."""
    if x.shape != r.shape or not x.any() or not r.any():
        return False
    factor = float((x * r).sum() / (r * r).sum())
    return factor > 0 and is_close(x, factor * r)


def explain_copies(expected: Tensor, copies: Sequence[RankCopy]) -> str:
    """Describe how copies of the same elements differ, on several ranks or one; "" if equal."""
    groups: dict[bytes, list[RankCopy]] = {}
    for copy in copies:
        if len(copy.original_region):
            groups.setdefault(copy.places.sort().values.numpy().tobytes(), []).append(copy)
    texts = {_explain_group(expected, group) for group in groups.values()}
    texts.discard("")
    return sorted(texts)[0] if texts else ""


def _explain_group(expected: Tensor, group: Sequence[RankCopy]) -> str:
    present = [copy for copy in group if copy.stored is not None]
    absent = [copy for copy in group if copy.stored is None]
    if len(group) < 2 or not present:
        return ""
    order = present[0].places.sort().values
    ref = expected[order]
    values = [copy.values[copy.places.argsort()].double() for copy in present]  # type: ignore[index]
    different: list[Tensor] = []
    for value in values:
        if not any(is_close(value, one) for one in different):
            different.append(value)
    if len(different) == 1 and not (absent and is_close(different[0], ref)):
        return ""
    right_copies = [copy for copy, value in zip(present, values) if is_close(value, ref)]
    wrong_copies = [copy for copy in group if not any(copy is one for one in right_copies)]
    if right_copies:
        none = all(copy.stored is None for copy in wrong_copies)
        verb = "has" if len(_ranks_of(right_copies)) == 1 else "have"
        return (
            f"only {_list_ranks(right_copies)} {verb} the right value: "
            f"{'there is none' if none else 'it is not the same'} on {_list_ranks(wrong_copies)}"
        )
    one_rank = len({copy.rank for copy in group}) < len(group)
    holders = "copies" if one_rank else "ranks"
    names = sorted({copy.name for copy in group})
    tie = f": a tie is broken between {quote_names(names)}" if len(names) > 1 else ""
    total, all_values = torch.stack(different).sum(0), torch.stack(values)
    if is_close(total, ref) or is_close(all_values.sum(0), ref):
        return f"{holders} differ and their sum is right: a sum over {holders} is missing{tie}"
    if is_close(all_values.mean(0), ref) or is_close(total / len(different), ref):
        return f"{holders} differ and their mean is right: they are not averaged{tie}"
    factor = float((total * ref).sum() / (ref * ref).sum()) if ref.any() else 0.0
    if factor and is_close(total, factor * ref):
        return (
            f"{holders} differ and their sum is {factor:.6g} times the right value: a sum over "
            f"{holders} is missing{tie}"
        )
    return f"{holders} differ, and neither their sum nor their mean is right{tie}"


def _explain_absent(expected: Tensor, copies: Sequence[RankCopy]) -> str:
    """Describe the ranks that have no gradient of their part, if all others are right."""
    held = [copy for copy in copies if len(copy.original_region)]
    present = [copy for copy in held if copy.values is not None]
    absent = [copy for copy in held if copy.values is None]
    if not present or not absent:
        return ""
    if not all(is_close(copy.values.double(), expected[copy.places]) for copy in present):  # type: ignore[union-attr]
        return ""
    where = _list_ranks(absent)
    return f"right on {_list_ranks(present)}; there is none on {where}: frozen or detached there"


def _explain_ranks(
    expected: Tensor, copies: Sequence[RankCopy], counts: Sequence[Sequence[int]] = ()
) -> str:
    """Describe which ranks' parts are wrong, and by which factor or label count.

    `counts` are the numbers of labels in ranks' parts of the batch, for possible divisions.
    """
    correct: list[RankCopy] = []
    wrong_copies: dict[str, list[RankCopy]] = {}
    factors: dict[int, float] = {}
    for copy in copies:
        if copy.stored is None or not len(copy.original_region):
            continue
        assert copy.values is not None
        part, value = expected[copy.places], copy.values.double()
        if is_close(value, part) or not part.any() and not value.any():
            correct.append(copy)
            continue
        factor = float((value * part).sum() / (part * part).sum()) if part.any() else math.nan
        proportional = is_close(value, factor * part)
        factors[copy.rank] = factor if proportional else math.nan
        text = f"{factor:.6g} times the right value" if proportional else "wrong"
        wrong_copies.setdefault("zero" if not value.any() else text, []).append(copy)
    if not wrong_copies or (not correct and len(wrong_copies) < 2):
        return ""
    if not correct and (label_text := _explain_label_counts([*factors.values()], counts)):
        return label_text
    texts = [f"what {_list_ranks(group)} holds is {text}" for text, group in wrong_copies.items()]
    return f"{'; '.join(texts)}" + (f"; that of {_list_ranks(correct)} is right" if correct else "")


def _explain_label_counts(factors: Sequence[float], counts: Sequence[Sequence[int]]) -> str:
    """Explain ranks' factors as one over the label count of each rank's own rows."""
    distinct: list[float] = []
    for value in sorted(factors):
        if not distinct or not math.isclose(value, distinct[-1], rel_tol=1e-6):
            distinct.append(value)
    for part_counts in counts:
        unique = sorted({*part_counts}, reverse=True)
        if len(unique) != len(distinct) or len(unique) < 2 or not unique[-1]:
            continue
        products = [factor * count for factor, count in zip(distinct, unique, strict=True)]
        if all(math.isclose(value, products[0], rel_tol=1e-6) for value in products):
            count_text = ", ".join(map(str, part_counts))
            text = (
                "each rank divides what it holds of the sum over all labels by the count of its own"
            )
            return f"{text} ({count_text} of {sum(part_counts)})"
    return ""


def _list_ranks(copies: Sequence[RankCopy]) -> str:
    ranks = _ranks_of(copies)
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _ranks_of(copies: Sequence[RankCopy]) -> list[int]:
    return sorted({copy.rank for copy in copies})
