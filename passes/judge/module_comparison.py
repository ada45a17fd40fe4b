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

    `output`      number of the output in the call
    places   flat indices in the original's output; None if it was not found
    `shape`  shape of the original's output
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
        place = f"{self.what} of `{self.name}`" if self.name != OF_LOSS else self.name
        said = self.pattern.short if self.cause and self.pattern.short else self.pattern.text
        because = f": {self.cause}" if self.cause else ""
        before = f"; right before it: `{self.before}`" if self.before else ""
        terms = (
            f"; ranks have terms of a sum at {quote_names(self.pending)}" if self.pending else ""
        )
        return f"{place}: {said}{because}{before}{terms}"


class ValueComparison:
    """Comparison with the original's values in float64, without tolerance for roundings.

    `factor_rtol` is the relative tolerance between two factors of one rank.
    """

    factor_rtol = 1e-6

    def __init__(self, right: RecordedStep) -> None:
        self.right = right
        self._outputs: dict[OutputKey, FullTensor] = {}

    def find_elements(self, at: OutputKey, value: Tensor) -> Tensor | None:
        """Find the places of an output in the original's; None if it is not found."""
        frame, k = at
        if at not in self._outputs:
            self._outputs[at] = FullTensor(self.right.calls[frame].outputs[k])
        places = find_elements(value, self._outputs[at])
        shape = self._outputs[at].values.shape
        return places if places is None or _covers_dims(places, shape) else None

    def is_comparable(self, at: OutputKey, value: Tensor) -> bool:
        """Return whether an output that was not found is comparable: no unknown arrangement."""
        want = self.right.calls[at[0]].outputs[at[1]]
        larger = any(a > b for a, b in zip(value.shape, want.shape))
        return value.dim() == want.dim() and not larger

    def is_right(
        self, at: OutputKey, back: bool, value: Tensor, places: Tensor, factor: float = 1.0
    ) -> bool:
        """Return whether a value equals the output or gradient at some places, times a factor."""
        full = self.right.tensor(at, back)
        want = factor * full.reshape(-1)[places]
        near = back and float((value - want).norm()) <= 1e-9 * float(full.norm())
        return near or is_close(value, want)

    def is_right_sum(
        self, at: OutputKey, back: bool, value: Tensor, places: Tensor, factor: float = 1.0
    ) -> bool:
        """Return whether a sum over ranks is right."""
        return self.is_right(at, back, value, places, factor)

    def assumed_places(self, at: OutputKey, rank: int, value: Tensor) -> Tensor:
        """Return assumed places of a wrong output; if smaller, the rank's block."""
        want = self.right.tensor(at)
        numbers = torch.arange(want.numel()).reshape(want.shape)
        for dim, (a, b) in enumerate(zip(value.shape, want.shape)):
            if a < b:
                count = -(-b // a)
                numbers = numbers.chunk(count, dim)[min(rank % count, count - 1)]
        return numbers

    def are_copies(self, a: Tensor, b: Tensor) -> bool:
        """Return whether two copies are equal."""
        return is_close(a, b)

    def factor(self, got: Tensor, want: Tensor) -> float:
        """Return the factor of a gradient, if a third of its elements agree on it; else 1."""
        there = want.abs() > 1e-6 * want.abs().max()
        ratios = got[there] / want[there]
        middle = float(ratios.median())
        agree = (ratios - middle).abs() <= 1e-6 * abs(middle)
        return middle if 3 * int(agree.sum()) >= len(ratios) else 1.0

    def join_patterns(self, patterns: Mapping[Pattern, list[int]]) -> dict[Pattern, list[int]]:
        """Join patterns of ranks that mean the same."""
        return dict(patterns)

    def pattern(
        self,
        at: OutputKey,
        back: bool,
        value: Tensor,
        places: Tensor,
        factor: float,
        sizes: Mapping[str, int],
    ) -> Pattern:
        """Explain a wrong value by the right one, or say how many of its elements are wrong."""
        want = factor * self.right.tensor(at, back).reshape(-1)[places]
        found = diagnose(value, want, sizes)
        if found and found.explains and not found.short:
            return found
        if not back and (said := _describe_permutation(value, want)):
            return Pattern(said)
        off = (value - want).abs() > 1e-9 * want.abs().max()
        text = f"{int(off.sum())} of {want.numel()} elements are wrong"
        if found and found != NO_PATTERN:  # a guess (a rounding) needs more detail
            text = found.text
        if back and want.dim() > 1 and bool((want == 0).all(-1)[off.any(-1)].all()):
            text += ", all in rows that are zero: what does not count (a label of -100) counts"
        return replace(found, text=text, explains=False)


@dataclass(frozen=True)
class StepComparison:
    """The original's step and the ranks' steps, each with the original's names of its modules.

    `comparison`  the comparison of values
    sizes    numbers by which a mistake may have divided, multiplied or split
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
        for rank, (run, names) in enumerate(self.ranks):
            for frame, seen in run.calls.items():
                calls.setdefault(names.get(frame[0], ""), []).append((rank, frame, seen))
        parts: dict[OutputKey, list[RankOutput]] = {}
        for frame, right in self.right.calls.items():
            turns = _count_calls(self.right, frame[0])
            mine = [one for one in calls.get(frame[0], ()) if one[1][1] % turns == frame[1]]
            for k, one in enumerate(right.outputs):
                parts[frame, k] = [
                    RankOutput(
                        rank,
                        here,
                        k,
                        value,
                        self.comparison.find_elements((frame, k), value),
                        one.shape,
                    )
                    for rank, here, seen in mine
                    for value in seen.outputs[k : k + 1]
                ]
        return parts

    def rank_rows(self, count: int) -> list[list[int]]:
        """Return the batch rows of the ranks' calls, if they divide `count` rows; else nothing."""
        for at, found in self.parts.items():
            full = self.right.tensor(at)
            if len(full) != count or full.dim() < 2 or any(p.places is None for p in found):
                continue
            size = full[0].numel()
            cut = {
                tuple(torch.unique(p.places // size).tolist())
                for p in found
                if p.places is not None
            }
            if len(cut) > 1 and sorted(itertools.chain(*cut)) == [*range(count)]:
                return [list(part) for part in sorted(cut)]
        return []

    def gradients(self, at: OutputKey) -> list[RankOutput]:
        """Return the ranks' gradients of an output, of parts with known places."""
        found = []
        for part in self.parts[at]:
            gradient = self.ranks[part.rank][0].calls[part.frame].gradients.get(part.output)
            if gradient is None or part.places is None or gradient.shape != part.value.shape:
                continue
            found.append(replace(part, value=gradient))
        return found

    def microbatches_and_factors(self) -> tuple[int, dict[int, float]]:
        """Return the number of microbatches, and each rank's gradient factor.

        The factor is that of the rank's first gradient in backward.
        """
        turns: list[int] = []
        for run, names in self.ranks:
            for name, meant in names.items():
                if once := _count_calls(self.right, meant):
                    turns.append(_count_calls(run, name) // once)
        factors: dict[int, float] = {}
        for at in self.right.backward_order:
            self.pair_gradients(at, factors)
            if len(factors) == len(self.ranks):
                break
        return max(turns, default=1), factors

    def pair_gradients(
        self, at: OutputKey, factors: dict[int, float]
    ) -> list[tuple[RankOutput, Tensor]]:
        """The gradients of ranks with the right ones; learn the factors of ranks that have none."""
        want = self.right.tensor(at, True).reshape(-1)
        pairs = [(p, want[p.places]) for p in self.gradients(at) if p.places is not None]
        for part, one in pairs:
            if part.rank not in factors and bool(one.any()):
                factors[part.rank] = self.comparison.factor(part.value, one)
        return pairs

    def first_difference(
        self, forward: bool, passed: Container[OutputKey] = ()
    ) -> Difference | None:
        """Return the first wrong output, or else the first wrong gradient; None: nothing compared.

        forward  whether outputs may be wrong. If the loss is right they are not, though a module
                 may return another value than the original's (before a bias is added)
        passed   outputs that are known to be such other values
        """
        before = ""
        anchors: tuple[RankOutput, ...] = ()
        words: dict[int, dict[str, tuple[int, ...]]] = {}  # by rank and module, where not all
        for at, found in self.parts.items():
            frame = at[0]
            if self._are_terms(at, found):
                want = self.right.tensor(at)
                everywhere = torch.arange(want.numel()).reshape(want.shape)
                self.parts[at] = [replace(part, places=everywhere) for part in found]
            elif (
                not forward or at in passed or not frame[0]
            ):  # the root module of a stage may return anything
                pass
            elif said := self._explain_output(at, found, anchors):
                because = _compare_positions(words)
                return Difference(
                    describe_frame(frame),
                    _THE_OUTPUT,
                    said,
                    before,
                    (),
                    at,
                    (*found,),
                    anchors,
                    because,
                )
            for part in found:
                if (some := _positions(part, self.right.tensor(at).shape)) and frame[0]:
                    words.setdefault(part.rank, {})[describe_frame(frame)] = some
            if found:
                before, anchors = describe_frame(frame), (*found, *anchors)
        return self._first_gradient()

    def right_after(self, at: OutputKey) -> Iterator[OutputKey]:
        """Yield later right outputs, the last first; partly right ones if `at` is all wrong."""
        order = [*self.parts]
        enough = any if all(self._is_all_wrong(at, part) for part in self.parts[at]) else all
        for one in reversed(order[order.index(at) + 1 :]):
            found = [part.places is not None for part in self.parts[one]]
            if one[0][0] and found and enough(found):
                yield one

    def _is_all_wrong(self, at: OutputKey, part: RankOutput) -> bool:
        """Return whether a wrong output has no right element."""
        want = self.right.tensor(at).reshape(-1)[
            self.comparison.assumed_places(at, part.rank, part.value)
        ]
        same = want.shape == part.value.shape
        near = NEAR * float(want.abs().max()) if want.numel() else 0.0
        right = bool(((part.value - want).abs() <= near).any()) if same else False
        return part.places is None and not right

    def _explain_output(
        self, at: OutputKey, parts: Sequence[RankOutput], anchors: Sequence[RankOutput]
    ) -> Pattern:
        """Describe how a module's output is wrong; empty if it is right or unknown."""
        lost = [part for part in parts if part.places is None]
        if not lost or not all(self.comparison.is_comparable(at, part.value) for part in lost):
            return Pattern("")
        shape = self.right.tensor(at).shape
        there = [_places_of_rows(p, anchors, shape) for p in lost]
        wrong = [
            replace(
                p,
                places=self.comparison.assumed_places(at, p.rank, p.value) if one is None else one,
            )
            for p, one in zip(lost, there)
        ]
        return self._explain_ranks(at, False, wrong, parts)

    def _are_terms(self, at: OutputKey, parts: Sequence[RankOutput]) -> bool:
        """Return whether ranks have terms of the right value, to be summed later."""
        want = self.right.tensor(at)
        if len(parts) < 2:
            return False
        if any(p.places is not None or p.value.shape != want.shape for p in parts):
            return False
        everywhere = torch.arange(want.numel()).reshape(want.shape)
        return self.comparison.is_right_sum(at, False, _sum(parts), everywhere)

    def _explain_ranks(
        self,
        at: OutputKey,
        back: bool,
        wrong: Sequence[RankOutput],
        parts: Sequence[RankOutput],
        factors: Mapping[int, float] | None = None,
    ) -> Pattern:
        """Join the patterns of the ranks' wrong values, and list the ranks that are right."""
        said: dict[Pattern, list[int]] = {}
        for part in wrong:
            assert part.places is not None
            factor = (factors or {}).get(part.rank, 1.0)
            one = self.comparison.pattern(at, back, part.value, part.places, factor, self.sizes)
            said.setdefault(one, []).append(part.rank)
        bad = {part.rank for part in wrong}
        good = sorted({part.rank for part in parts} - bad)
        said = self.comparison.join_patterns(said)
        texts = [f"{one.text} (rank {_join_ranks(ranks)})" for one, ranks in said.items()]
        short = [
            f"{one.short or one.text} (rank {_join_ranks(ranks)})" for one, ranks in said.items()
        ]
        more, first = [], wrong[0]
        if len(wrong) > 1 and all(_same_place(part, first) for part in wrong):
            alike = all(self.comparison.are_copies(part.value, first.value) for part in wrong)
            more.append(f"they are {'alike' if alike else 'different'} on these ranks")
            if not alike and not back and _has_equal_rows(_sum(wrong) - self.right.tensor(at)):
                more.append("their sum is right but for one row in all places: each adds a bias")
        elif back and self._are_misplaced(at, wrong, factors or {}):
            more.append("their sum is right: parts of them belong to the places of other ranks")
            return Pattern("; ".join([*texts, *more]))
        more += [f"right on rank {_join_ranks(good)}"] * bool(good)
        text, short_ = ("; ".join([*one, *more]) for one in (texts, short))
        return Pattern(text, all(one.explains for one in said), short_ if short_ != text else "")

    def _are_misplaced(
        self, at: OutputKey, wrong: Sequence[RankOutput], factors: Mapping[int, float]
    ) -> bool:
        """Return whether ranks' gradients are right as a sum, though each is misplaced."""
        if len(wrong) < 2 or len({part.value.shape for part in wrong}) > 1:
            return False
        full = self.right.tensor(at, True).reshape(-1)
        right = [
            replace(part, value=factors.get(part.rank, 1.0) * full[part.places])
            for part in wrong
            if part.places is not None
        ]
        return is_close(_sum(wrong), _sum(right))

    # -- backward

    def _first_gradient(self) -> Difference | None:
        """Return the first gradient, in backward order, without its rank's factor."""
        factors: dict[int, float] = {}
        before, pending = "", dict[str, None]()
        what = "the gradient of the output"
        for at in self.right.backward_order:
            frame, want = at[0], self.right.tensor(at, True)
            if not bool(want.any()) or all(p.places is None for p in self.parts[at]):
                continue
            known = bool(factors)
            pairs = self.pair_gradients(at, factors)
            if not pairs:
                none = Pattern("no rank has one: detached, or never asked for")
                return Difference(describe_frame(frame), what, none, before, (*pending,))
            wrong = [part for part, _ in pairs if not self._is_right(at, part, factors)]
            if wrong and self._are_pending_terms(at, wrong, factors):
                pending[describe_frame(frame)] = None
            elif wrong and not known and self._are_pending_terms(at, [p for p, _ in pairs]):
                factors.clear()  # terms of a sum have no factor
                pending[describe_frame(frame)] = None
            elif wrong:
                got = [part for part, _ in pairs]
                found = self._explain_calls(at, pairs)
                found = found or self._explain_ranks(at, True, wrong, got, factors)
                if not before:
                    sender = describe_frame(frame)
                    text = f"the gradient that it sends back to `{sender}` is not right: "
                    found = replace(found, text=text + found.text)
                own = tuple(replace(p, value=p.value / factors.get(p.rank, 1.0)) for p in got)
                name = describe_frame(frame) if before else OF_LOSS
                return Difference(name, what, found, before, (*pending,), at, own)
            else:
                before = describe_frame(frame)
        return None

    def _is_right(self, at: OutputKey, part: RankOutput, factors: Mapping[int, float]) -> bool:
        assert part.places is not None
        return self.comparison.is_right(
            at, True, part.value, part.places, factors.get(part.rank, 1.0)
        )

    def _explain_calls(self, at: OutputKey, pairs: Sequence[tuple[RankOutput, Tensor]]) -> Pattern:
        """Describe the factors of a rank's calls, if each call is right but for its factor.

        Calls are for parts of the batch, so the factor is the weight of a part.
        """
        factors: dict[int, list[float]] = {}
        for part, want in pairs:
            factor = self.comparison.factor(part.value, want)
            if not self._is_right(at, part, {part.rank: factor}):
                return Pattern("")
            factors.setdefault(part.rank, []).append(factor)
        for rank, found in factors.items():
            if max(found) - min(found) > self.comparison.factor_rtol * max(map(abs, found)):
                each = ", ".join(f"{one:.4g}" for one in found)
                return Pattern(
                    f"its {len(found)} parts of the batch have {each} times theirs (rank {rank})"
                )
        return Pattern("")

    def _are_pending_terms(
        self, at: OutputKey, wrong: Sequence[RankOutput], factors: Mapping[int, float] | None = None
    ) -> bool:
        """Return whether ranks have terms of a right sum that is still to be made.

        Without the ranks' factors, the sum may be right but for some factor.
        """
        want = self.right.tensor(at, True).reshape(-1)
        groups: dict[tuple[int, ...], list[RankOutput]] = {}
        for part in wrong:
            assert part.places is not None
            groups.setdefault(tuple(part.places.reshape(-1)[:8].tolist()), []).append(part)
        for copies in groups.values():
            group: list[RankOutput] = []  # each term once, without copies of it
            for part in copies:
                if not any(self.comparison.are_copies(part.value, one.value) for one in group):
                    group.append(part)
            first = group[0]
            if len(group) < 2 or len({part.value.shape for part in group}) > 1:
                return False
            assert first.places is not None
            if factors is None:
                mean = self.comparison.factor(_sum(group), want[first.places])
            else:
                mean = sum(factors.get(part.rank, 1.0) for part in group) / len(group)
            if not self.comparison.is_right_sum(at, True, _sum(group), first.places, mean):
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
    for one in anchors:
        if (one.rank, one.frame[1], one.value.shape[:2]) != (part.rank, part.frame[1], lead):
            continue
        if one.places is not None and one.places.dim() > 2:
            return one.places.flatten(2)[..., 0] // one.shape[2:].numel()
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
    found = torch.unique(part.places[..., 0] // shape[-1] % shape[-2]).tolist()
    return tuple(found) if len(found) < shape[-2] else ()


def _compare_positions(words: Mapping[int, Mapping[str, tuple[int, ...]]]) -> str:
    """Report modules of a rank that have equally many positions, but different ones."""
    for rank, known in words.items():
        for (a, some), (b, others) in itertools.combinations(known.items(), 2):
            if len(some) == len(others) and some != others:
                return (
                    f"on rank {rank} `{a}` has the places {[*some]}, and `{b}` has {[*others]}: "
                    "positions that are not those of its words"
                )
    return ""


def _describe_permutation(value: Tensor, want: Tensor) -> str:
    """Describe a permutation of places along a dim of a right output; "" if there is none."""
    near = NEAR * float(want.abs().max())
    for dim, size in enumerate(want.shape):
        if not 2 <= size <= MOST_PLACES:
            continue
        ours, right = (one.movedim(dim, 0).flatten(1) for one in (value, want))
        same = torch.stack([(one - right).abs().amax(1) <= near for one in ours])
        order: list[int] = []
        for place, there in enumerate(
            same
        ):  # equal slices: prefer its own index, then the next one
            known = there.nonzero().reshape(-1).tolist()
            if not known:
                break
            likely = [n for n in (place, order[-1] + 1 if order else 0) if n in known]
            order.append((likely or known)[0])
        if len(order) == size:
            return f"along dim {dim} it holds the places {order} of what is right"
    return ""


def _count_calls(run: RecordedStep, name: str) -> int:
    return sum(frame[0] == name for frame in run.calls)


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
