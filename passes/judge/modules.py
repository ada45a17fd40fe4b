"""Find where a judged program begins to differ: the first module with a wrong output or gradient.

The original and the program run one step on one batch, with a hook on every module. What a module
of a rank returns is looked up by its numbers in what the original's returns, as dropout is; terms
of a pending sum are added up over ranks. Backward, a rank may have its own factor (what averages
divide by), which is that of the gradient that the loss sends back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import quoted
from schedlang.passes.judge.masks import Whole, placed
from schedlang.passes.localize.diagnose import NONE, diagnose, fits
from schedlang.runtime.isolated import Frame, parts_of
from schedlang.runtime.modes import ambient

OF_LOSS = "the loss"
_OUTPUT, UNKNOWN = "the output", "elements are wrong"


@dataclass
class Seen:
    """Outputs of a call of a module, and the gradient that comes back to it; by float tensor."""

    outputs: list[Tensor]
    gradients: dict[int, Tensor] = field(default_factory=dict)


@dataclass
class Run:
    """The calls of a step, in the order in which they return, and that of their gradients."""

    calls: dict[Frame, Seen] = field(default_factory=dict)
    back: list[tuple[Frame, int]] = field(default_factory=list)
    live: dict[tuple[Frame, int], Tensor] = field(default_factory=dict)  # themselves, if asked for


def followed(
    modules: Mapping[str, nn.Module], step: Callable[[], Any], *modes: Any, live: bool = False
) -> Run:
    """Run a step, and note what modules, each by its name, give and get back; `live`: itself."""
    run, turns = Run(), dict.fromkeys(modules, 0)
    handles = []

    def hook(name: str) -> Any:
        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            if torch._C._current_graph_task_id() >= 0:
                return  # computed again
            frame = name, turns[name]
            turns[name] += 1
            floats = [t for t in parts_of(output)[0] if t.is_floating_point() and t.dim()]
            with torch.no_grad():
                run.calls[frame] = Seen([_whole(t) for t in floats])
            for k, tensor in enumerate(floats):
                if live:
                    run.live[frame, k] = tensor
                if tensor.requires_grad:
                    tensor.register_hook(_noting(run, frame, k))  # type: ignore[no-untyped-call]

        return after

    for name, module in modules.items():
        handles.append(module.register_forward_hook(hook(name)))
    try:
        with ambient(*modes):
            step()
    finally:
        for handle in handles:
            handle.remove()
    return run


def settled(modules: Mapping[str, nn.Module], step: Callable[[], Any], *modes: Any) -> Run:
    """Run a step, and again; the first unless it calls modules that the second does not.

    A first step may try modules on numbers that nobody made, to learn shapes, as pipelines do.
    """
    first, second = (followed(modules, step, *modes) for _ in range(2))
    return first if first.calls.keys() == second.calls.keys() else second


def _noting(run: Run, frame: Frame, k: int) -> Callable[[Tensor], None]:
    def note(gradient: Tensor) -> None:
        with torch.no_grad():
            run.calls[frame].gradients[k] = _whole(gradient)
        run.back.append((frame, k))

    return note


def _whole(tensor: Tensor) -> Tensor:
    """A copy, of a DTensor all of it."""
    value = tensor.detach()
    full = getattr(value, "full_tensor", None)
    return (full() if full is not None else value).clone()


# ---- The comparison, of one process: all ranks' runs with the original's.


@dataclass(frozen=True)
class Part:
    """Result of one call on a rank: where it lies in the original's, or None."""

    rank: int
    frame: Frame
    k: int
    value: Tensor
    places: Tensor | None


@dataclass(frozen=True)
class Found:
    """The first thing that differs: of which module, in what, how; and what was right before it."""

    name: str
    what: str
    pattern: str
    before: str = ""
    pending: tuple[str, ...] = ()  # where ranks have terms of a sum
    at: tuple[Frame, int] = (("", 0), 0)
    parts: tuple[Part, ...] = ()  # what ranks have of it, of a gradient without their factors
    anchors: tuple[Part, ...] = ()  # what they have of the output that is right before it
    because: str = ""

    @property
    def back(self) -> bool:
        """Whether it is a gradient."""
        return self.what != _OUTPUT

    @property
    def unknown(self) -> bool:
        """Whether the pattern says no more than where it is wrong."""
        return UNKNOWN in self.pattern or self.pattern.startswith("right, but for places")

    @property
    def text(self) -> str:
        """All of it."""
        place = f"{self.what} of `{self.name}`" if self.name != OF_LOSS else self.name
        because = f": {self.because}" if self.because else ""
        before = f"; right before it: `{self.before}`" if self.before else ""
        terms = f"; ranks have terms of a sum at {quoted(self.pending)}" if self.pending else ""
        return f"{place}: {self.pattern}{because}{before}{terms}"


def first_difference(
    right: Run, ranks: Sequence[tuple[Run, Mapping[str, str]]], sizes: Mapping[str, int]
) -> Found | None:
    """The first output that is wrong, else the first gradient; None where nothing is compared.

    `ranks` have each its run, and the original's names of its modules.
    """
    parts: dict[tuple[Frame, int], list[Part]] = {}
    for frame, seen in right.calls.items():
        for k, output in enumerate(seen.outputs):
            parts[frame, k] = list(_parts(frame, k, output, ranks, _turns(right, frame[0])))
    before = ""
    anchors: tuple[Part, ...] = ()
    for (frame, k), found in parts.items():
        want = right.calls[frame].outputs[k]
        if _terms(want, found):
            everywhere = torch.arange(want.numel()).reshape(want.shape)
            parts[frame, k] = [replace(part, places=everywhere) for part in found]
        elif frame[0] and (said := _output(want, found, sizes)):  # a stage returns what it has
            at = (frame, k)
            return Found(_named(frame), _OUTPUT, said, before, (), at, (*found,), anchors)
        if found:
            before, anchors = _named(frame), (*found,)
    return _backward(right, ranks, parts, sizes)


def turns_and_factors(
    right: Run, ranks: Sequence[tuple[Run, Mapping[str, str]]]
) -> tuple[int, dict[int, float]]:
    """Return how often a rank runs what the original runs once, and its factor of gradients.

    That factor is of the first gradient in backward that the rank has.
    """
    turns: list[int] = []
    for run, names in ranks:
        for name, meant in names.items():
            if once := _turns(right, meant):
                turns.append(_turns(run, name) // once)
    factors: dict[int, float] = {}
    for frame, k in right.back:
        want = right.calls[frame].gradients[k].reshape(-1)
        output = right.calls[frame].outputs[k]
        for part in _parts(frame, k, output, ranks, _turns(right, frame[0])):
            got = ranks[part.rank][0].calls[part.frame].gradients.get(k)
            if part.places is None or got is None or got.shape != part.places.shape:
                continue
            if part.rank not in factors and bool(want[part.places].any()):
                factors[part.rank] = _factor(got, want[part.places])
        if len(factors) == len(ranks):
            break
    return max(turns, default=1), factors


def _turns(run: Run, name: str) -> int:
    return sum(frame[0] == name for frame in run.calls)


def _parts(
    frame: Frame,
    k: int,
    want: Tensor,
    ranks: Sequence[tuple[Run, Mapping[str, str]]],
    turns: int,
) -> Iterator[Part]:
    """Yield what the ranks' calls of a module give, where it is called as often in each pass."""
    whole = Whole(want)
    for rank, (run, names) in enumerate(ranks):
        for (name, turn), seen in run.calls.items():
            if names.get(name) != frame[0] or turn % turns != frame[1] or k >= len(seen.outputs):
                continue
            value = seen.outputs[k]
            yield Part(rank, (name, turn), k, value, placed(value, whole))


def _output(want: Tensor, parts: Sequence[Part], sizes: Mapping[str, int]) -> str:
    """Say how the output of a module is wrong; "" if it is right, or not known."""
    unknown = [part for part in parts if part.places is None]
    if not unknown or any(_larger(part.value, want) for part in unknown):
        return ""
    return _of_ranks([(p, _block(p, want, sizes)) for p in unknown], parts, sizes)


def _terms(want: Tensor, parts: Sequence[Part]) -> bool:
    """Whether ranks have terms of the right value, whose sum is still to be made."""
    if len(parts) < 2 or any(p.places is not None or p.value.shape != want.shape for p in parts):
        return False
    return fits(torch.stack([part.value for part in parts]).sum(0), want)


def _larger(value: Tensor, want: Tensor) -> bool:
    """Whether this can be no part: it has more dims, or more of one."""
    return value.dim() != want.dim() or any(a > b for a, b in zip(value.shape, want.shape))


def _block(part: Part, want: Tensor, sizes: Mapping[str, int]) -> Tensor:
    """The block of the right value that a rank has by its number, where its part is smaller."""
    for dim, (a, b) in enumerate(zip(part.value.shape, want.shape)):
        if a < b:
            count = -(-b // a)
            want = want.chunk(count, dim)[min(part.rank % count, count - 1)]
    return want


def _of_ranks(
    wrong: Sequence[tuple[Part, Tensor]], parts: Sequence[Part], sizes: Mapping[str, int]
) -> str:
    """The pattern of each rank's wrong value, and which ranks are right."""
    said: dict[str, list[int]] = {}
    for part, want in wrong:
        text = diagnose(part.value, want, sizes)
        if text.startswith(NONE) or not text:
            count = int(((part.value - want).abs() > 1e-9 * want.abs().max()).sum())
            text = f"{count} of {want.numel()} {UNKNOWN}"
        said.setdefault(text, []).append(part.rank)
    bad = {part.rank for part, _ in wrong}
    good = sorted({part.rank for part in parts} - bad)
    texts = [f"{text} (rank {_list(ranks)})" for text, ranks in said.items()]
    values = [part.value for part, _ in wrong]
    wants = [want for _, want in wrong]
    if len(values) > 1 and all(w.shape == wants[0].shape and fits(w, wants[0]) for w in wants):
        alike = all(fits(value, values[0]) for value in values)
        texts.append(f"they are {'alike' if alike else 'different'} on these ranks")
    return "; ".join(texts) + (f"; right on rank {_list(good)}" if good else "")


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, dict.fromkeys(ranks)))


# -- backward


def _backward(
    right: Run,
    ranks: Sequence[tuple[Run, Mapping[str, str]]],
    parts: Mapping[tuple[Frame, int], list[Part]],
    sizes: Mapping[str, int],
) -> Found | None:
    """The first gradient, in the order of backward, that has not its rank's factor."""
    factors: dict[int, float] = {}
    before, pending = "", dict[str, None]()
    for frame, k in right.back:
        want = right.calls[frame].gradients[k]
        there = [p for p in parts.get((frame, k), ()) if p.places is not None]
        got = [
            replace(p, value=g)
            for p in there
            if (g := ranks[p.rank][0].calls[p.frame].gradients.get(k)) is not None
            and g.shape == p.value.shape
        ]
        if not bool(want.any()) or not there:
            continue
        if not got:
            none = "no rank has one: detached, or never asked for"
            return Found(_named(frame), "the gradient of the output", none, before, (*pending,))
        whole = want.reshape(-1)
        pairs = [(p, whole[p.places]) for p in got if p.places is not None]
        for part, one in pairs:
            if part.rank not in factors and one.any():
                factors[part.rank] = _factor(part.value, one)
        wanted = [(p, one * factors.get(p.rank, 1.0)) for p, one in pairs]
        wrong = [(p, one) for p, one in wanted if not _same(p.value, one, want)]
        if wrong and _pending(wrong):
            pending[_named(frame)] = None
        elif wrong:
            name = _named(frame) if before else OF_LOSS
            text = _of_calls(pairs) or _of_ranks(wrong, got, sizes)
            if not before:
                text = f"the gradient that it sends back to `{_named(frame)}` is not right: {text}"
            own = tuple(replace(p, value=p.value / factors.get(p.rank, 1.0)) for p in got)
            what = "the gradient of the output"
            return Found(name, what, text, before, (*pending,), (frame, k), own)
        else:
            before = _named(frame)
    return None


def _factor(got: Tensor, want: Tensor) -> float:
    """Return the factor of a gradient, if a third of its numbers agree on that."""
    there = want.abs() > 1e-6 * want.abs().max()
    ratios = got[there] / want[there]
    middle = float(ratios.median())
    agree = (ratios - middle).abs() <= 1e-6 * abs(middle)
    return middle if 3 * int(agree.sum()) >= len(ratios) else 1.0


def _of_calls(pairs: Sequence[tuple[Part, Tensor]]) -> str:
    """Say by which factors the calls on a rank differ, if each is right but for its own.

    Calls are for parts of the batch: the factor is what a part weighs.
    """
    factors: dict[int, list[float]] = {}
    for part, want in pairs:
        factor = _factor(part.value, want)
        if not _same(part.value, factor * want, want):
            return ""
        factors.setdefault(part.rank, []).append(factor)
    for rank, found in factors.items():
        if max(found) - min(found) > 1e-6 * max(map(abs, found)):
            each = ", ".join(f"{one:.4g}" for one in found)
            return f"its {len(found)} parts of the batch have {each} times theirs (rank {rank})"
    return ""


def _same(got: Tensor, want: Tensor, scale: Tensor) -> bool:
    return fits(got, want) or float((got - want).norm()) <= 1e-9 * float(scale.norm())


def _pending(wrong: Sequence[tuple[Part, Tensor]]) -> bool:
    """Whether ranks have terms of a sum that is right, and still to be made."""
    groups: dict[tuple[int, ...], list[tuple[Part, Tensor]]] = {}
    for part, want in wrong:
        assert part.places is not None
        groups.setdefault(tuple(part.places.reshape(-1)[:8].tolist()), []).append((part, want))
    for group in groups.values():
        if len(group) < 2 or len({part.value.shape for part, _ in group}) > 1:
            return False
        total = torch.stack([part.value for part, _ in group]).sum(0)
        mean = torch.stack([want for _, want in group]).mean(0)
        if not fits(total, mean):
            return False
    return True


def _named(frame: Frame) -> str:
    name, turn = frame
    return (name or "the model") + (f" (call {turn + 1})" if turn else "")
