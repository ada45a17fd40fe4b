"""Find the first module of a judged program with a wrong output or gradient.

The original and the program run one step on one batch, with hooks on all modules. A rank's output
is found by value in the original's output. Terms of a pending sum are added over ranks. In backward
a rank may have its own constant factor (from an average): the factor of its first gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from schedlang.diagnostics.diagnostic import quote_names
from schedlang.passes.judge.module_calls import ModuleCall, OutputKey, RecordedStep
from schedlang.passes.judge.tensor_search import FullTensor, find_elements
from schedlang.passes.localize.diagnosis import NO_PATTERN, Pattern, diagnose, is_close
from schedlang.runtime.isolated_modules import CallFrame, describe_frame

OF_LOSS = "the loss"
_THE_OUTPUT = "the output"
MOST_PLACES, NEAR = 32, 1e-9


@dataclass(frozen=True)
class RankOutput:
    """Output of one call on a rank.

    output  number of the output in the call
    places  flat indices in the original's output; None if it was not found
    shape   shape of the original's output
    """

    rank: int
    frame: CallFrame
    output: int
    value: Tensor
    places: Tensor | None
    shape: torch.Size


@dataclass(frozen=True)
class Difference:
    """The first difference: in which module, in what, how, and what was right before it."""

    name: str
    what: str
    pattern: Pattern
    before: str = ""
    pending: tuple[str, ...] = ()  # modules where ranks have terms of a sum
    at: OutputKey = (("", 0), 0)
    parts: tuple[RankOutput, ...] = ()  # ranks' values, gradients without factors
    anchors: tuple[RankOutput, ...] = ()  # right outputs before it, the last first
    cause: str = ""

    @property
    def is_gradient(self) -> bool:
        """Whether the difference is in a gradient."""
        return self.what != _THE_OUTPUT

    @property
    def text(self) -> str:
        """The difference as a sentence."""
        location = f"{self.what} of `{self.name}`" if self.name != OF_LOSS else self.name
        description = self.pattern.short if self.cause and self.pattern.short else self.pattern.text
        cause = f": {self.cause}" if self.cause else ""
        right_before = f"; right before it: `{self.before}`" if self.before else ""
        terms = (
            f"; ranks have terms of a sum at {quote_names(self.pending)}" if self.pending else ""
        )
        return f"{location}: {description}{cause}{right_before}{terms}"


class ValueComparison:
    """Comparison with the original's values in float64, without tolerance for roundings.

    `factor_rtol` is the relative tolerance between two factors of one rank.
    """

    factor_rtol = 1e-6

    def __init__(self, right: RecordedStep) -> None:
        self.right = right
        self._outputs: dict[OutputKey, FullTensor] = {}

    def find_elements(self, key: OutputKey, value: Tensor) -> Tensor | None:
        """Find the places of an output in the original's; None if it is not found."""
        frame, k = key
        if key not in self._outputs:
            self._outputs[key] = FullTensor(self.right.calls[frame].outputs[k])
        places = find_elements(value, self._outputs[key])
        shape = self._outputs[key].values.shape
        return places if places is None or _covers_dims(places, shape) else None

    def is_comparable(self, key: OutputKey, value: Tensor) -> bool:
        """Return whether an output that was not found is comparable: no unknown arrangement."""
        expected = self.right.calls[key[0]].outputs[key[1]]
        larger = any(a > b for a, b in zip(value.shape, expected.shape))
        return value.dim() == expected.dim() and not larger

    def is_right(
        self, key: OutputKey, grad: bool, value: Tensor, places: Tensor, factor: float = 1.0
    ) -> bool:
        """Return whether a value equals the output or gradient at some places, times a factor."""
        full = self.right.tensor(key, grad)
        expected = factor * full.reshape(-1)[places]
        negligible = grad and float((value - expected).norm()) <= 1e-9 * float(full.norm())
        return negligible or is_close(value, expected)

    def is_right_sum(
        self, key: OutputKey, grad: bool, value: Tensor, places: Tensor, factor: float = 1.0
    ) -> bool:
        """Return whether a sum over ranks is right."""
        return self.is_right(key, grad, value, places, factor)

    def assumed_places(self, key: OutputKey, rank: int, value: Tensor) -> Tensor:
        """Return assumed places of a wrong output; if smaller, the rank's block."""
        expected = self.right.tensor(key)
        numbers = torch.arange(expected.numel()).reshape(expected.shape)
        for dim, (a, b) in enumerate(zip(value.shape, expected.shape)):
            if a < b:
                count = -(-b // a)
                numbers = numbers.chunk(count, dim)[min(rank % count, count - 1)]
        return numbers

    def are_copies(self, a: Tensor, b: Tensor) -> bool:
        """Return whether two copies are equal."""
        return is_close(a, b)

    def factor(self, actual: Tensor, expected: Tensor) -> float:
        """Return the factor of a gradient, if a third of its elements agree on it; else 1."""
        nonzero = expected.abs() > 1e-6 * expected.abs().max()
        ratios = actual[nonzero] / expected[nonzero]
        median = float(ratios.median())
        agree = (ratios - median).abs() <= 1e-6 * abs(median)
        return median if median and 3 * int(agree.sum()) >= len(ratios) else 1.0

    def join_patterns(self, patterns: Mapping[Pattern, list[int]]) -> dict[Pattern, list[int]]:
        """Join patterns of ranks that mean the same."""
        return dict(patterns)

    def pattern(
        self,
        key: OutputKey,
        grad: bool,
        value: Tensor,
        places: Tensor,
        factor: float,
        sizes: Mapping[str, int],
    ) -> Pattern:
        """Explain a wrong value by the right one, or say how many of its elements are wrong."""
        expected = factor * self.right.tensor(key, grad).reshape(-1)[places]
        diagnosis = diagnose(value, expected, sizes)
        if diagnosis and diagnosis.explains and not diagnosis.short:
            return diagnosis
        if not grad and (permutation := _describe_permutation(value, expected)):
            return Pattern(permutation)
        off = (value - expected).abs() > 1e-9 * expected.abs().max()
        text = f"{int(off.sum())} of {expected.numel()} elements are wrong"
        if diagnosis and diagnosis != NO_PATTERN:  # a guess (a rounding) needs more detail
            text = diagnosis.text
        if grad and expected.dim() > 1 and bool((expected == 0).all(-1)[off.any(-1)].all()):
            text += ", all in rows that are zero: what does not count (a label of -100) counts"
        return replace(diagnosis, text=text, explains=False)


@dataclass(frozen=True)
class StepComparison:
    """The original's step and the ranks' steps, each with the original's names of its modules.

    comparison  the comparison of values
    sizes       numbers by which a mistake may have divided, multiplied or split
    """

    comparison: ValueComparison
    ranks: Sequence[tuple[RecordedStep, Mapping[str, str]]]
    sizes: Mapping[str, int]

    @property
    def right(self) -> RecordedStep:
        """The original's step."""
        return self.comparison.right

    @cached_property
    def parts(self) -> dict[OutputKey, list[RankOutput]]:
        """Outputs of the ranks' module calls, by output of the original."""
        calls: dict[str, list[tuple[int, CallFrame, ModuleCall]]] = {}
        for rank, (step, names) in enumerate(self.ranks):
            for frame, call in step.calls.items():
                calls.setdefault(names.get(frame[0], ""), []).append((rank, frame, call))
        parts: dict[OutputKey, list[RankOutput]] = {}
        for frame, original_call in self.right.calls.items():
            count = _count_calls(self.right, frame[0])
            matching = [one for one in calls.get(frame[0], ()) if one[1][1] % count == frame[1]]
            for k, one in enumerate(original_call.outputs):
                parts[frame, k] = [
                    RankOutput(
                        rank,
                        rank_frame,
                        k,
                        value,
                        self.comparison.find_elements((frame, k), value),
                        one.shape,
                    )
                    for rank, rank_frame, call in matching
                    for value in call.outputs[k : k + 1]
                ]
        return parts

    def rank_rows(self, count: int) -> list[list[int]]:
        """Return the batch rows of the ranks' calls, if they divide `count` rows; else nothing."""
        for key, outputs in self.parts.items():
            full = self.right.tensor(key)
            if len(full) != count or full.dim() < 2 or any(p.places is None for p in outputs):
                continue
            size = full[0].numel()
            row_sets = {
                tuple(torch.unique(p.places // size).tolist())
                for p in outputs
                if p.places is not None
            }
            if len(row_sets) > 1 and sorted(itertools.chain(*row_sets)) == [*range(count)]:
                return [list(part) for part in sorted(row_sets)]
        return []

    def gradients(self, key: OutputKey) -> list[RankOutput]:
        """Return the ranks' gradients of an output, of parts with known places."""
        gradients = []
        for part in self.parts[key]:
            gradient = self.ranks[part.rank][0].calls[part.frame].gradients.get(part.output)
            if gradient is None or part.places is None or gradient.shape != part.value.shape:
                continue
            gradients.append(replace(part, value=gradient))
        return gradients

    def microbatches_and_factors(self) -> tuple[int, dict[int, float]]:
        """Return the number of microbatches, and each rank's gradient factor.

        The factor is that of the rank's first gradient in backward.
        """
        counts: list[int] = []
        for step, names in self.ranks:
            for name, original_name in names.items():
                if original_count := _count_calls(self.right, original_name):
                    counts.append(_count_calls(step, name) // original_count)
        factors: dict[int, float] = {}
        for key in self.right.backward_order:
            self.pair_gradients(key, factors)
            if len(factors) == len(self.ranks):
                break
        return max(counts, default=1), factors

    def pair_gradients(
        self, key: OutputKey, factors: dict[int, float]
    ) -> list[tuple[RankOutput, Tensor]]:
        """The gradients of ranks with the right ones; learn the factors of ranks that have none."""
        right_values = self.right.tensor(key, True).reshape(-1)
        pairs = [(p, right_values[p.places]) for p in self.gradients(key) if p.places is not None]
        for part, expected in pairs:
            if part.rank not in factors and bool(expected.any()):
                factors[part.rank] = self.comparison.factor(part.value, expected)
        return pairs

    def first_difference(
        self, forward: bool, passed: Container[OutputKey] = ()
    ) -> Difference | None:
        """Return the first wrong output, or else the first wrong gradient; None: nothing compared.

        forward  whether outputs may be wrong. If the loss is right they are not, though a module
                 may return another value than the original's (before a bias is added)
        passed   outputs that are known to be such other values
        """
        last_right = ""
        anchors: tuple[RankOutput, ...] = ()
        by_rank: dict[int, dict[str, tuple[int, ...]]] = {}  # by rank and module, where not all
        for key, outputs in self.parts.items():
            frame = key[0]
            if self._are_terms(key, outputs):
                expected = self.right.tensor(key)
                everywhere = torch.arange(expected.numel()).reshape(expected.shape)
                self.parts[key] = [replace(part, places=everywhere) for part in outputs]
            elif (
                not forward or key in passed or not frame[0]
            ):  # the root module of a stage may return anything
                pass
            elif pattern := self._explain_output(key, outputs, anchors):
                cause = _compare_positions(by_rank)
                return Difference(
                    describe_frame(frame),
                    _THE_OUTPUT,
                    pattern,
                    last_right,
                    (),
                    key,
                    (*outputs,),
                    anchors,
                    cause,
                )
            for part in outputs:
                if (positions := _positions(part, self.right.tensor(key).shape)) and frame[0]:
                    by_rank.setdefault(part.rank, {})[describe_frame(frame)] = positions
            if outputs:
                last_right, anchors = describe_frame(frame), (*outputs, *anchors)
        return self._first_gradient()

    def right_after(self, key: OutputKey) -> Iterator[OutputKey]:
        """Yield later right outputs, the last first; partly right ones if `key` is all wrong."""
        order = [*self.parts]
        enough = any if all(self._is_all_wrong(key, part) for part in self.parts[key]) else all
        for later_key in reversed(order[order.index(key) + 1 :]):
            matched = [part.places is not None for part in self.parts[later_key]]
            if later_key[0][0] and matched and enough(matched):
                yield later_key

    def _is_all_wrong(self, key: OutputKey, part: RankOutput) -> bool:
        """Return whether a wrong output has no right element."""
        expected = self.right.tensor(key).reshape(-1)[
            self.comparison.assumed_places(key, part.rank, part.value)
        ]
        same = expected.shape == part.value.shape
        tolerance = NEAR * float(expected.abs().max()) if expected.numel() else 0.0
        any_right = bool(((part.value - expected).abs() <= tolerance).any()) if same else False
        return part.places is None and not any_right

    def _explain_output(
        self, key: OutputKey, parts: Sequence[RankOutput], anchors: Sequence[RankOutput]
    ) -> Pattern:
        """Describe how a module's output is wrong; empty if it is right or unknown."""
        lost = [part for part in parts if part.places is None]
        if not lost or not all(self.comparison.is_comparable(key, part.value) for part in lost):
            return Pattern("")
        shape = self.right.tensor(key).shape
        known_places = [_places_of_rows(p, anchors, shape) for p in lost]
        wrong = [
            replace(
                p,
                places=self.comparison.assumed_places(key, p.rank, p.value) if pos is None else pos,
            )
            for p, pos in zip(lost, known_places)
        ]
        return self._explain_ranks(key, False, wrong, parts)

    def _are_terms(self, key: OutputKey, parts: Sequence[RankOutput]) -> bool:
        """Return whether ranks have terms of the right value, to be summed later."""
        expected = self.right.tensor(key)
        if len(parts) < 2:
            return False
        if any(p.places is not None or p.value.shape != expected.shape for p in parts):
            return False
        everywhere = torch.arange(expected.numel()).reshape(expected.shape)
        return self.comparison.is_right_sum(key, False, _sum(parts), everywhere)

    def _explain_ranks(
        self,
        key: OutputKey,
        grad: bool,
        wrong: Sequence[RankOutput],
        parts: Sequence[RankOutput],
        factors: Mapping[int, float] | None = None,
    ) -> Pattern:
        """Join the patterns of the ranks' wrong values, and list the ranks that are right."""
        joined: dict[Pattern, list[int]] = {}
        for part in wrong:
            assert part.places is not None
            factor = (factors or {}).get(part.rank, 1.0)
            one = self.comparison.pattern(key, grad, part.value, part.places, factor, self.sizes)
            joined.setdefault(one, []).append(part.rank)
        wrong_ranks = {part.rank for part in wrong}
        right_ranks = sorted({part.rank for part in parts} - wrong_ranks)
        joined = self.comparison.join_patterns(joined)
        texts = [f"{one.text} (rank {_join_ranks(ranks)})" for one, ranks in joined.items()]
        short_texts = [
            f"{one.short or one.text} (rank {_join_ranks(ranks)})" for one, ranks in joined.items()
        ]
        notes, first = [], wrong[0]
        if len(wrong) > 1 and all(_same_place(part, first) for part in wrong):
            alike = all(self.comparison.are_copies(part.value, first.value) for part in wrong)
            notes.append(f"they are {'alike' if alike else 'different'} on these ranks")
            expected = self.right.tensor(key, grad).reshape(-1)[first.places]
            if not alike and not grad and _has_equal_rows(_sum(wrong) - expected):
                notes.append("their sum is right but for one row in all places: each adds a bias")
        elif grad and self._are_misplaced(key, wrong, factors or {}):
            notes.append("their sum is right: parts of them belong to the places of other ranks")
            return Pattern("; ".join([*texts, *notes]))
        notes += [f"right on rank {_join_ranks(right_ranks)}"] * bool(right_ranks)
        text, short_ = ("; ".join([*one, *notes]) for one in (texts, short_texts))
        return Pattern(text, all(one.explains for one in joined), short_ if short_ != text else "")

    def _are_misplaced(
        self, key: OutputKey, wrong: Sequence[RankOutput], factors: Mapping[int, float]
    ) -> bool:
        """Return whether ranks' gradients are right as a sum, though each is misplaced."""
        if len(wrong) < 2 or len({part.value.shape for part in wrong}) > 1:
            return False
        full = self.right.tensor(key, True).reshape(-1)
        right_outputs = [
            replace(part, value=factors.get(part.rank, 1.0) * full[part.places])
            for part in wrong
            if part.places is not None
        ]
        return is_close(_sum(wrong), _sum(right_outputs))

    # -- backward

    def _first_gradient(self) -> Difference | None:
        """Return the first gradient, in backward order, without its rank's factor."""
        factors: dict[int, float] = {}
        last_right, pending = "", dict[str, None]()
        subject = "the gradient of the output"
        for key in self.right.backward_order:
            frame, expected = key[0], self.right.tensor(key, True)
            if not bool(expected.any()) or all(p.places is None for p in self.parts[key]):
                continue
            had_factors = bool(factors)
            pairs = self.pair_gradients(key, factors)
            if not pairs:
                none = Pattern("no rank has one: detached, or never asked for")
                return Difference(describe_frame(frame), subject, none, last_right, (*pending,))
            wrong = [part for part, _ in pairs if not self._is_right(key, part, factors)]
            if wrong and self._are_pending_terms(key, wrong, factors):
                pending[describe_frame(frame)] = None
            elif wrong and not had_factors and self._are_pending_terms(key, [p for p, _ in pairs]):
                factors.clear()  # terms of a sum have no factor
                pending[describe_frame(frame)] = None
            elif wrong:
                parts = [part for part, _ in pairs]
                pattern = self._explain_calls(key, pairs)
                pattern = pattern or self._explain_ranks(key, True, wrong, parts, factors)
                if not last_right:
                    sender = describe_frame(frame)
                    text = f"the gradient that it sends back to `{sender}` is not right: "
                    pattern = replace(pattern, text=text + pattern.text)
                scaled = tuple(replace(p, value=p.value / factors.get(p.rank, 1.0)) for p in parts)
                name = describe_frame(frame) if last_right else OF_LOSS
                return Difference(name, subject, pattern, last_right, (*pending,), key, scaled)
            else:
                last_right = describe_frame(frame)
        return None

    def _is_right(self, key: OutputKey, part: RankOutput, factors: Mapping[int, float]) -> bool:
        assert part.places is not None
        return self.comparison.is_right(
            key, True, part.value, part.places, factors.get(part.rank, 1.0)
        )

    def _explain_calls(self, key: OutputKey, pairs: Sequence[tuple[RankOutput, Tensor]]) -> Pattern:
        """Describe the factors of a rank's calls, if each call is right but for its factor.

        Calls are for parts of the batch, so the factor is the weight of a part.
        """
        factors: dict[int, list[float]] = {}
        for part, expected in pairs:
            factor = self.comparison.factor(part.value, expected)
            if not self._is_right(key, part, {part.rank: factor}):
                return Pattern("")
            factors.setdefault(part.rank, []).append(factor)
        for rank, values in factors.items():
            if max(values) - min(values) > self.comparison.factor_rtol * max(map(abs, values)):
                text = ", ".join(f"{value:.4g}" for value in values)
                return Pattern(
                    f"its {len(values)} parts of the batch have {text} times theirs (rank {rank})"
                )
        return Pattern("")

    def _are_pending_terms(
        self,
        key: OutputKey,
        wrong: Sequence[RankOutput],
        factors: Mapping[int, float] | None = None,
    ) -> bool:
        """Return whether ranks have terms of a right sum that is still to be made.

        Without the ranks' factors, the sum may be right but for some factor.
        """
        expected = self.right.tensor(key, True).reshape(-1)
        groups: dict[tuple[int, ...], list[RankOutput]] = {}
        for part in wrong:
            assert part.places is not None
            groups.setdefault(tuple(part.places.reshape(-1)[:8].tolist()), []).append(part)
        for copies in groups.values():
            group: list[RankOutput] = []  # each term once, without copies of it
            for part in copies:
                if not any(self.comparison.are_copies(part.value, term.value) for term in group):
                    group.append(part)
            first_term = group[0]
            if len(group) < 2 or len({part.value.shape for part in group}) > 1:
                return False
            assert first_term.places is not None
            if factors is None:
                mean = self.comparison.factor(_sum(group), expected[first_term.places])
            else:
                mean = sum(factors.get(part.rank, 1.0) for part in group) / len(group)
            if not self.comparison.is_right_sum(key, True, _sum(group), first_term.places, mean):
                return False
        return True


def _covers_dims(places: Tensor, shape: torch.Size) -> bool:
    """Return whether each dim of the original's size has all of its indices."""
    if places.dim() != len(shape):
        return True
    for dim, size in enumerate(places.shape):
        line = places.movedim(dim, 0).reshape(size, -1)[:, 0]
        pairs = zip(torch.unravel_index(line, shape), shape)
        count, full = max((len(torch.unique(index)), full) for index, full in pairs)
        if count < size and full == size:
            return False
    return True


def find_rows(part: RankOutput, anchors: Sequence[RankOutput], shape: torch.Size) -> Tensor | None:
    """Return a part's rows (of the first two dims), known from right outputs before it."""
    lead = part.value.shape[:2]
    wanted = part.rank, part.frame[1], lead, shape[:2]
    for prior in anchors:  # whose first dims may be others, as rows and heads
        facts = prior.rank, prior.frame[1], prior.value.shape[:2], prior.shape[:2]
        if facts == wanted and prior.places is not None and prior.places.dim() > 2:
            return prior.places.flatten(2)[..., 0] // prior.shape[2:].numel()
    full = torch.arange(shape[:2].numel()).reshape(shape[:2])
    return full if lead == shape[:2] else None


def _places_of_rows(
    part: RankOutput, anchors: Sequence[RankOutput], shape: torch.Size
) -> Tensor | None:
    """Return the places of a wrong output, assuming that it has the rows of outputs before it."""
    if part.value.dim() < 3 or part.value.shape[2:] != shape[2:]:
        return None
    rows, size = find_rows(part, anchors, shape), shape[2:].numel()
    if rows is None:
        return None
    return (rows[..., None] * size + torch.arange(size)).reshape(part.value.shape)


def _positions(part: RankOutput, shape: torch.Size) -> tuple[int, ...]:
    """Return a rank's positions along the second-to-last dim, if they are not all."""
    if part.places is None or part.places.dim() != len(shape) or len(shape) < 2:
        return ()
    positions = torch.unique(part.places[..., 0] // shape[-1] % shape[-2]).tolist()
    return tuple(positions) if len(positions) < shape[-2] else ()


def _compare_positions(by_rank: Mapping[int, Mapping[str, tuple[int, ...]]]) -> str:
    """Report modules of a rank that have equally many positions, but different ones."""
    for rank, modules in by_rank.items():
        for (a, left), (b, right) in itertools.combinations(modules.items(), 2):
            if len(left) == len(right) and left != right:
                return (
                    f"on rank {rank} `{a}` has the places {[*left]}, and `{b}` has {[*right]}: "
                    "positions that are not those of its words"
                )
    return ""


def _describe_permutation(value: Tensor, expected: Tensor) -> str:
    """Describe a permutation of places along a dim of a right output; "" if there is none."""
    tolerance = NEAR * float(expected.abs().max())
    for dim, size in enumerate(expected.shape):
        if not 2 <= size <= MOST_PLACES:
            continue
        slices, right_slices = (x.movedim(dim, 0).reshape(size, -1) for x in (value, expected))
        matches = torch.stack([(x - right_slices).abs().amax(1) <= tolerance for x in slices])
        order: list[int] = []
        # equal slices: prefer its own index, then the next one
        for index, row in enumerate(matches):
            equal = row.nonzero().reshape(-1).tolist()
            if not equal:
                break
            preferred = [n for n in (index, order[-1] + 1 if order else 0) if n in equal]
            order.append((preferred or equal)[0])
        if len(order) == size:
            return f"along dim {dim} it holds the places {order} of what is right"
    return ""


def _count_calls(step: RecordedStep, name: str) -> int:
    return sum(frame[0] == name for frame in step.calls)


def _sum(parts: Sequence[RankOutput]) -> Tensor:
    return torch.stack([part.value.double() for part in parts]).sum(0)


def _has_equal_rows(gap: Tensor) -> bool:
    """Return whether all rows of a tensor are equal."""
    flat = gap.reshape(-1, gap.shape[-1]) if gap.dim() > 1 else gap[:0, None]
    return len(flat) > 1 and bool(flat.any()) and is_close(flat, flat[:1].expand_as(flat))


def _same_place(a: RankOutput, b: RankOutput) -> bool:
    return a.places is not None and b.places is not None and torch.equal(a.places, b.places)


def _join_ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, dict.fromkeys(ranks)))
