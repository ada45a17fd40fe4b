"""A recorded model as a value: the units that one forward calls, their order, what feeds what."""

from __future__ import annotations

import ast
import linecache
import os
import re
import sys
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from schedlang.diagnostics.diagnostic import Diagnostic, Facts, Refusal
from schedlang.runtime.batch import called
from schedlang.runtime.tracing.meta import hollow_model, without_values
from schedlang.runtime.tracing.torch_calls import KNOWN

# ---- A recorded model as a value: which unit outputs feed which units, and its cut into stages.


# (unit, leaf of its output), or (unit, -1 - k) for the k-th leaf that hooks inside of it are told
Token = tuple[int, int]


def refusal(
    code: str, place: str, reason: str, *helps: str, note: str = "", facts: Facts = ()
) -> Refusal:
    """A model that cannot be cut as asked: why, where, and what would help."""
    title = f"`{place}` {reason}" if place else reason
    notes = (note,) if note else ()
    return Refusal(Diagnostic(code, title, notes=notes, helps=helps, facts=facts))


@dataclass(frozen=True)
class Leaf:
    """One tensor in the output of a unit, as it was when recorded.

    `mutated`: the model writes into it after the unit has returned it.
    """

    shape: tuple[int, ...]
    dtype: str
    differentiable: bool
    mutated: bool = False


@dataclass(frozen=True)
class Reads:
    """The values that a unit, with the code between units that feeds it, reads of the model's rest.

    `inner` are units of whose inside it reads a value that they do not return.
    """

    tokens: frozenset[Token] = frozenset()
    inner: frozenset[int] = frozenset()
    params: frozenset[str] = frozenset()
    buffers: frozenset[str] = frozenset()


def labels(units: Sequence[str]) -> tuple[str, ...]:
    """The name of each unit in messages: `name#k` for the k-th call of a module of several."""
    counts, turns = Counter(units), Counter[str]()
    found = []
    for name in units:
        found.append(f"{name}#{turns[name]}" if counts[name] > 1 else name)
        turns[name] += 1
    return tuple(found)


@dataclass(frozen=True)
class StageGraph:
    """The units of a model in call order and what flows between them; a value without tensors.

    `units` are modules; one whose calls are units of their own stands here once for each.
    `final` is what the loss and the outputs read. `between[k]` are the parameters and buffers that
    the code before unit k touches (k = number of units: after the last). `owners` are the units
    that read a parameter themselves; one that only code between units reads is owned by none.
    `partial` are outputs (by path) made of values inside the units given: only the stages of
    those units have them. Of one forward of each unit `flops` are its floating-point operations,
    `saved` the bytes that it keeps for the backward beside parameters, `given` those of its
    tensor arguments.
    """

    units: tuple[str, ...]
    reads: tuple[Reads, ...]
    final: Reads
    leaves: Mapping[Token, Leaf]
    between: tuple[Reads, ...]
    owners: Mapping[str, frozenset[int]]
    partial: Mapping[str, frozenset[int]] = field(default_factory=dict)
    flops: tuple[int, ...] = field(default=(), compare=False)
    saved: tuple[int, ...] = field(default=(), compare=False)
    given: tuple[int, ...] = field(default=(), compare=False)

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """The units' names in messages."""
        return labels(self.units)

    @property
    def glue(self) -> tuple[str, ...]:
        """Parameters that no unit reads itself: held by containers, or by modules called twice."""
        used = set(self.final.params).union(*(r.params for r in self.reads))
        return tuple(sorted(n for n in used if not self.owners.get(n)))


@dataclass(frozen=True)
class Cut:
    """A graph cut into stages: `stage_of[unit]`, rising in call order."""

    graph: StageGraph
    stage_of: tuple[int, ...]

    @cached_property
    def stages(self) -> int:
        """The number of stages."""
        return self.stage_of[-1] + 1

    def units(self, stage: int) -> range:
        """The units of a stage, a run in call order."""
        first = self.stage_of.index(stage)
        return range(first, first + self.stage_of.count(stage))

    @cached_property
    def routes(self) -> Mapping[tuple[int, int], tuple[Token, ...]]:
        """(from stage, to stage) to the unit outputs that are sent, in the order of sending."""
        found: dict[tuple[int, int], set[Token]] = {}
        for stage in range(self.stages) if self.stages > 1 else ():
            for token in self._reads(stage).tokens:
                source = self.stage_of[token[0]]
                if source != stage:
                    found.setdefault((source, stage), set()).add(token)
        return {edge: tuple(sorted(tokens)) for edge, tokens in sorted(found.items())}

    @property
    def constant(self) -> bool:
        """Whether a float is sent to another stage that gets no gradient."""
        sent = (self.graph.leaves[token] for tokens in self.routes.values() for token in tokens)
        return any("float" in leaf.dtype and not leaf.differentiable for leaf in sent)

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """The transfers between stages, for a timeline."""
        return tuple(self.routes)

    def parameters(self, stage: int) -> frozenset[str]:
        """Names of the parameters that a stage must hold; one name per tied parameter."""
        return self._reads(stage).params

    def buffers(self, stage: int) -> frozenset[str]:
        """Names of the buffers that a stage must hold."""
        return self._reads(stage).buffers

    @cached_property
    def shared(self) -> Mapping[str, tuple[int, ...]]:
        """Parameters that several stages hold: their gradients must be summed over those stages."""
        holders: dict[str, list[int]] = {}
        for stage in range(self.stages):
            for name in self.parameters(stage):
                holders.setdefault(name, []).append(stage)
        return {name: tuple(s) for name, s in sorted(holders.items()) if len(s) > 1}

    def _reads(self, stage: int) -> Reads:
        # a stage replays the code between units up to the first unit of the next, also where the
        # result does not matter to it: what that code touches must be there
        parts = [*self.graph.between[: self.units(stage).stop + 1]]
        parts += [self.graph.reads[u] for u in self.units(stage)]
        if stage == self.stages - 1:
            parts.append(self.graph.final)
        return Reads(
            frozenset().union(*(p.tokens for p in parts)),
            frozenset().union(*(p.inner for p in parts)),
            frozenset().union(*(p.params for p in parts)),
            frozenset().union(*(p.buffers for p in parts)),
        )

    @cached_property
    def missing(self) -> tuple[str, ...]:
        """Outputs (by path) that the last stage cannot give, such as caches of earlier units."""
        last = self.stages - 1
        return tuple(
            path
            for path, units in self.graph.partial.items()
            if any(self.stage_of[u] != last for u in units)
        )


def cut(graph: StageGraph, stage_of: Sequence[int]) -> Cut:
    """Cut a graph into stages. `stage_of` gives each unit's stage, 0, 0, .., 1, .. in call order.

    Raises Refusal S610 where a stage would read a value from inside a unit of another stage.
    """
    rising = all(b - a in (0, 1) for a, b in zip(stage_of, stage_of[1:]))
    if len(stage_of) != len(graph.units) or not stage_of or stage_of[0] != 0 or not rising:
        n = len(graph.units)
        raise refusal("S613", "", f"stages {list(stage_of)} are not runs of the {n} units")
    made = Cut(graph, tuple(stage_of))
    readers = [*zip(graph.labels, graph.reads, stage_of), ("loss", graph.final, stage_of[-1])]
    for name, reads, stage in readers:
        foreign = sorted(u for u in reads.inner if stage_of[u] != stage)
        if foreign:
            unit = graph.labels[foreign[0]]
            raise refusal(
                "S610",
                name,
                f"reads a value inside `{unit}` that `{unit}` does not return",
                f"keep `{unit}` and the module that reads it in one stage",
                note=f"stage {stage} would need it from stage {stage_of[foreign[0]]}",
            )
    return made


# the whole model as one stage, which reads nothing of others
UNCUT = Cut(StageGraph(("",), (Reads(),), Reads(), {}, (Reads(), Reads()), {}), (0,))


# ---- Which modules one forward calls, in which order, and from where in the model's own code.


TORCH = os.path.join("torch", "nn", "modules", "")


@dataclass(frozen=True)
class Calls:
    """The modules called, one entry for each call; where a module's second call was made."""

    order: tuple[str, ...]
    again: Mapping[str, tuple[str, int]] = field(default_factory=dict)

    @cached_property
    def counts(self) -> Mapping[str, int]:
        """The number of calls of each module."""
        return Counter(self.order)

    def place(self, name: str) -> str:
        """Describe where a module is called again: file, line, and the loop around it; "" if it is
        not."""
        if name not in self.again:
            return ""
        file, line = self.again[name]
        at, said = _loop(file, line) or (line, linecache.getline(file, line).strip())
        way = "in a loop at" if at != line else "again at"
        return f"called {way} {Path(file).name}:{at}, `{said}`"


def once(model: nn.Module, entries: Mapping[str, int]) -> Calls | None:
    """The calls of a forward that was seen to call modules so often; None where it must be asked.

    `entries` stand in the order of first calls, which is that of all calls where each is one.
    """
    for name, times in entries.items():
        bare = next(model.get_submodule(name).parameters(), None) is None
        if times > 1 and not (bare and not name.rpartition(".")[2].isdigit()):
            return None
    return Calls(tuple(entries)) if entries else None


def calls_of(model: nn.Module, kwargs: Mapping[str, Any], meta: bool) -> Calls:
    """Run one forward and write down every call; with `meta` on a copy on the meta device."""
    model = hollow_model(model, {}) if meta else model
    where = without_values(kwargs) if meta else nullcontext((dict(kwargs), None))
    order: list[str] = []
    first: dict[str, list[FrameType]] = {}
    again: dict[str, tuple[str, int]] = {}
    handles = []
    for name, module in model.named_modules():

        def before(module: nn.Module, args: Any, name: str = name) -> None:
            order.append(name)
            if name not in first:
                first[name] = list(_frames(sys._getframe(1)))
            elif name not in again:
                again[name] = _common(first[name], _frames(sys._getframe(1)))

        handles.append(module.register_forward_pre_hook(before))
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), where as (given, _):
            called(model, given)
    except NotImplementedError as error:
        raise asks_for_values(error) from error
    finally:
        for handle in handles:
            handle.remove()
    return Calls(tuple(order), again)


def asks_for_values(error: Exception) -> Refusal:
    """The refusal of a model that reads values of tensors which, without data, have none."""
    said = str(error).split("\n")[0]
    lost = re.match(r"(\w+::\w+)[\w.]*: attempted to run this operator with Meta tensors", said)
    if lost:
        reason = f"calls `{lost[1]}`, whose shape torch does not know without data"
        help_ = "register its shape in the model file: a kernel for the key `Meta`, by"
        return refusal("S612", line_of(error), reason, f"{help_} `torch.library.impl`")
    helps: tuple[str, ...] = ()
    if "lengths" in said:  # of `pack_padded_sequence`
        helps = ("pad instead of packing, and take the last state of each row by its length",)
    reason = "reads the value of a tensor while it is recorded without data"
    return refusal("S612", line_of(error), reason, *helps, note=said)


def line_of(error: BaseException) -> str:
    """File and line of the model's own code that an error came out of; "" if it has none."""
    frames = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    own = [f for f in frames if not os.path.realpath(f[0]).startswith(KNOWN)]
    return f"{Path(own[-1][0]).name}:{own[-1][1]}" if own else ""


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames on the stack outside of torch, innermost first; none of this file."""
    while frame is not None and frame.f_code.co_filename != __file__:
        if TORCH not in frame.f_code.co_filename:
            yield frame
        frame = frame.f_back


def _common(first: Sequence[FrameType], now: Iterable[FrameType]) -> tuple[str, int]:
    """File and line, now, of the innermost frame from which both calls were made."""
    before = set(first)
    for frame in now:
        if frame in before:
            return frame.f_code.co_filename, frame.f_lineno
    return "", 0


def _loop(file: str, line: int) -> tuple[int, str] | None:
    """Line and head of the innermost loop around a line."""
    inside = [
        node for node in _loops(file) if node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    if not inside:
        return None
    at = max(node.lineno for node in inside)
    return at, linecache.getline(file, at).strip()


@cache
def _loops(file: str) -> tuple[Any, ...]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ()
    kinds = (ast.For, ast.While, ast.AsyncFor, ast.comprehension)
    return tuple(n for n in ast.walk(tree) if isinstance(n, kinds) and hasattr(n, "lineno"))
