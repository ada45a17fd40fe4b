"""Dropout of a judged program: the original's masks, at the places that ranks hold.

A mask is a function of the seed, the step, the original's module, the call, and the place in the
tensor that the original drops from. Places on a rank are found by values, as layouts of parameters
are: before training, both sides run every batch without dropout, and the input of each of a rank's
dropout calls is looked up in the original's inputs. Rows, heads, tokens and features may therefore
be divided in any way, by wrappers, in DTensors or by hand, and in any number of microbatches.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._python_dispatch import _disable_current_modes

from schedlang.passes.judge.async_collectives import MONITORED, WORK, CallMonitor, as_bytes
from schedlang.passes.judge.module_calls import infers_shapes
from schedlang.passes.judge.tensor_search import FullTensor, find_elements
from schedlang.passes.verify.observe import Condition
from schedlang.runtime import scope
from schedlang.runtime.modes import ATTRIBUTE_ACCESS
from schedlang.runtime.rng.logical_dropout import (
    ConstantDraws,
    NoDropout,
    function_text,
    stream_numbers,
)
from schedlang.runtime.rng.logical_functions import (
    LOGICAL,
    RECURRENT_FUNCTIONS,
    draws_illogically,
    draws_logically,
    may_draw,
)

BITS = 53
DROPOUTS = frozenset(
    {f for f in LOGICAL if "dropout" in function_text(f)}
    | {F.scaled_dot_product_attention, *RECURRENT_FUNCTIONS}
)
_DRAWS = DROPOUTS | LOGICAL.keys()  # all other functions are called directly


# ---- Dropout calls: their inputs, and the places of their masks.


@dataclass
class DropoutCall:
    """One dropout call of the original.

    site    the module
    call    the number of the call in the module
    inputs  the inputs that tell where the mask applies
    shape   of the mask
    """

    site: str
    call: int
    kind: str
    inputs: list[Tensor]
    shape: tuple[int, ...]  # of its mask
    _full_inputs: list[FullTensor] = field(default_factory=list)

    def find_elements(self, kind: str, parts: Sequence[Tensor]) -> Tensor | None:
        """Find which mask elements a rank's inputs need; None: another call's inputs."""
        if kind != self.kind or len(parts) != len(self.inputs):
            return None
        if not self._full_inputs:
            self._full_inputs = [FullTensor(one) for one in self.inputs]
        if kind == "plain":
            return find_elements(parts[0], self._full_inputs[0])
        windows = [full.find_window(part) for full, part in zip(self._full_inputs, parts)]
        if any(one is None for one in windows):
            return None
        first, last = windows[0], windows[-1]
        assert first is not None and last is not None
        index = [*first[:-1], last[-2]] if kind == "attention" else first[:2]
        positions = torch.zeros([1] * len(index), dtype=torch.long)
        for dim, (size, one) in enumerate(zip(self.shape, index)):
            shape = [-1 if d == dim else 1 for d in range(len(index))]
            positions = positions * size + one.reshape(shape)
        return positions


def dropout_inputs(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[str, list[Tensor]]:
    """Return the kind of a dropout, and the inputs that tell which part of a mask it needs."""
    if func in RECURRENT_FUNCTIONS:
        return "recurrent", [args[0] if args[-1] else args[0].transpose(0, 1)]
    if func is F.scaled_dot_product_attention:
        names = ("query", "key")
        return "attention", [args[k] if len(args) > k else kwargs[w] for k, w in enumerate(names)]
    value = args[0] if args else kwargs["input"]
    return ("feature" if "feature" in function_text(func) else "plain"), [value]


def mask_shape(kind: str, tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the shape of the mask for these inputs, without trailing dims."""
    if kind == "attention":
        return (*tensors[0].shape[:-1], tensors[1].shape[-2])
    return tuple(tensors[0].shape if kind == "plain" else tensors[0].shape[:2])


def _local_tensors(tensors: Sequence[Tensor]) -> list[Tensor] | None:
    """Return local parts; None if some tensor is partial."""
    if any(p.is_partial() for t in tensors if isinstance(t, DTensor) for p in t.placements):
        return None
    return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]


# ---- Modes: record the original's dropout, find a rank's parts of it, drop.


class WithoutDropout(NoDropout):
    """Mode without dropout. Random draws in gradient hooks (of compression) stay as they are."""

    def __init__(self) -> None:
        super().__init__(ConstantDraws())

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        # a recomputation enables gradients
        of_hook = in_recomputation() and not torch.is_grad_enabled()
        if of_hook and func not in DROPOUTS and may_draw(func, kwargs):
            return func(*args, **kwargs)
        return super().__torch_function__(func, types, args, kwargs)


class DropoutRecorder(WithoutDropout):
    """Mode without dropout that records every dropout call of a training step."""

    def __init__(self) -> None:
        super().__init__()
        self.drops: list[DropoutCall] = []
        self.others: set[tuple[str, str]] = set()  # (site, function) of other random numbers

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if may_draw(func, kwargs) and in_training_step():
            if func in DROPOUTS:
                if draws_logically(func, args, kwargs) and not draws_illogically(
                    func, args, kwargs
                ):
                    # checkpointing counts tensors that autograd saves, and operators
                    with torch.no_grad(), _disable_current_modes():
                        self.record(*dropout_inputs(func, args, kwargs))
            elif func in LOGICAL or draws_illogically(func, args, kwargs):
                self.others.add((scope.current_site(), function_text(func)))
        return super().__torch_function__(func, types, args, kwargs)

    def record(self, kind: str, tensors: list[Tensor]) -> None:
        """Record a dropout call with copies of its inputs."""
        site = scope.current_site()
        copies = [tensor.detach().clone() for tensor in tensors]
        self.drops.append(
            DropoutCall(site, scope.count_call(site), kind, copies, mask_shape(kind, tensors))
        )


def in_training_step() -> bool:
    """Return whether a training step runs here; nothing is dropped in evaluation."""
    current = scope.current()
    return current is not None and not current.evaluation


def in_evaluation() -> bool:
    """Return whether an evaluation runs here."""
    current = scope.current()
    return current is not None and bool(current.evaluation)


MaskPlace = tuple[str, int, "Tensor | None"]  # original's module, call, mask places


class ModuleNames(Protocol):
    """Interface to a rank's module names."""

    def original_module(self, name: str) -> str | None:
        """Return the original's name of a module here."""

    def declared_part(self, name: str, full: Tensor) -> Tensor | None:
        """Return the part of a mask that the user declares for this rank."""


class PlaceFinder(DropoutRecorder):
    """Mode without dropout that finds a rank's dropout calls among the original's.

    found  places by the rank's module, in the order of its calls; None: not found
    names  gives the original's name of a module, and places that the user declares
    """

    def __init__(self, drops: Sequence[DropoutCall]) -> None:
        super().__init__()
        self.known = drops
        self.names: ModuleNames | None = None
        self.found: dict[str, list[MaskPlace | None]] = defaultdict(list)

    def record(self, kind: str, tensors: list[Tensor]) -> None:
        """Look a dropout call up, unless it is a recomputation, or learns shapes."""
        site = scope.current_site()
        if not (in_recomputation() or infers_shapes()):
            self.found[site].append(self._find_place(site, scope.count_call(site), kind, tensors))

    def _find_place(
        self, site: str, call: int, kind: str, tensors: list[Tensor]
    ) -> MaskPlace | None:
        assert self.names is not None
        local = [drop for drop in self.known if drop.site == self.names.original_module(site)]
        for drop in local:
            full = torch.arange(math.prod(drop.shape)).reshape(drop.shape)
            declared = (
                self.names.declared_part(site, full) if drop.call == call % len(local) else None
            )
            if declared is not None:
                return drop.site, drop.call, declared
        parts = _local_tensors(tensors)
        if parts is None:
            return None
        for drops in (local, [drop for drop in self.known if drop not in local]):
            matches = [(d, p) for d in drops if (p := d.find_elements(kind, parts)) is not None]
            same_call = [m for m in matches if m[0].call == call] if len(matches) > 1 else matches
            if len(same_call) == 1:
                drop, places = same_call[0]
                return drop.site, drop.call, places
        return None


def _next_state() -> bytes:
    """Return a digest of the generator's state, and draw, as the program's dropout would."""
    state = _digest(torch.default_generator.get_state())
    torch.rand(())
    return state


def _digest(*tensors: Tensor) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.digest()


class DropoutByMasks(WithoutDropout):
    """Mode that drops by masks that depend on the step, the module, the call and the place.

    off        modules that drop nothing
    rows       the batch's row numbers that are present, in order; None: all
    evaluated  modules that would drop in evaluation; they do not
    """

    def __init__(self, seed: int, off: frozenset[str], rows: Sequence[int] | None = None) -> None:
        super().__init__()
        self.seed, self.off, self.rows = seed, off, rows
        self.evaluated: set[str] = set()
        self._drawn_place: tuple[str, int, Tensor | None] = "", 0, None
        self._drawn_count = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if type(func) is ATTRIBUTE_ACCESS:  # fast path: a third of all calls
            return func(*args, **kwargs)
        if func not in _DRAWS:
            return self.run(func, types, args, kwargs)
        drops = func in DROPOUTS and draws_logically(func, args, kwargs)
        if drops and in_evaluation():
            self.evaluated.add(scope.current_site())
        if not drops or not in_training_step() or draws_illogically(func, args, kwargs):
            return super().__torch_function__(func, types, args, kwargs)
        with _disable_current_modes():  # selective checkpointing counts operators
            place = self.next_place(dropout_inputs(func, args, kwargs)[1])
        if place is None or place[0] in self.off:
            return super().__torch_function__(func, types, args, kwargs)
        self._drawn_place, self._drawn_count = place, 0
        return _run_on_local(lambda *a, **k: LOGICAL[func](self, func, *a, **k), args, kwargs)

    def next_place(self, tensors: Sequence[Tensor]) -> tuple[str, int, Tensor | None] | None:
        """Return the module and call of a dropout, and its places; None: all places."""
        site = scope.current_site()
        return site, scope.count_call(site), None

    @_disable_current_modes()
    def keep(self, shape: Sequence[int], p: float, device: torch.device) -> Tensor:
        """See Draw."""
        current = scope.current()
        assert current is not None
        site, call, places = self._drawn_place
        text = repr((self.seed, current.moment, site, call, self._drawn_count)).encode()
        key = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)
        self._drawn_count += 1  # one dropout call of an RNN draws between any two layers
        if places is None:
            places = self._places_of_rows(shape)
        tail = tuple(shape)[places.dim() :]  # trailing dims that no rank divides
        if math.prod(tail) > 1:
            offsets = torch.arange(math.prod(tail)).reshape(tail)
            places = places.reshape(*places.shape, *[1] * len(tail)) * math.prod(tail) + offsets
        bits = stream_numbers(places.reshape(tuple(shape)) + 1, torch.tensor(key))
        return torch.ge(bits, round(p * 2**BITS))

    def _places_of_rows(self, shape: Sequence[int]) -> Tensor:
        """Return all places of a mask, or those of the rows that are present."""
        row_size = math.prod(shape)
        if self.rows is None or not shape or shape[0] % len(self.rows):
            return torch.arange(row_size).reshape(tuple(shape))
        row_size //= len(self.rows)
        starts = torch.tensor(list(self.rows)) * row_size
        return (starts[:, None] + torch.arange(row_size)).reshape(tuple(shape))


class UnknownDropout(DropoutByMasks):
    """Mode that drops only in some modules, where dropout is not found in the original."""

    def __init__(
        self, seed: int, places: Mapping[str, Sequence[MaskPlace | None]], sites: Sequence[str]
    ) -> None:
        super().__init__(seed, frozenset())
        self.sites = sites
        self._places = {site: iter(site_places) for site, site_places in places.items()}

    def next_place(self, tensors: Sequence[Tensor]) -> MaskPlace | None:
        """See Dropping; a recomputation does not drop."""
        site = scope.current_site()
        if in_recomputation() or infers_shapes():
            return None
        place = next(self._places.get(site, iter(())), ("", 0, None))
        if place is not None or site not in self.sites:
            return None
        return site, scope.count_call(site), None


def covers_all(
    drops: Sequence[DropoutCall], ranks: Sequence[Mapping[str, Sequence[MaskPlace | None]]]
) -> bool:
    """Return whether the places that ranks found are all elements of all masks of the original."""
    covered = {
        (drop.site, drop.call): torch.zeros(math.prod(drop.shape), dtype=torch.bool)
        for drop in drops
    }
    for place in (p for found in ranks for calls in found.values() for p in calls):
        if place is not None and place[2] is not None:
            covered[place[:2]][place[2].reshape(-1)] = True
    return all(bool(elements.all()) for elements in covered.values())


class RankDropout(DropoutByMasks):
    """Mode that drops on a rank at the places that were found, and monitors other calls.

    irregular_modules       modules whose dropout calls now differ from those that were found
    generator_states        digest of the generator's state, by the original's module, the call and
                            the places
    unequal_recomputations  modules that are recomputed with a generator state of no earlier call
    """

    def __init__(self, seed: int, off: frozenset[str]) -> None:
        super().__init__(seed, off)
        self.irregular_modules: set[str] = set()
        self.calls = CallMonitor()
        self.generator_states: dict[tuple[str, int, bytes], bytes] = {}
        self.unequal_recomputations: set[str] = set()
        self._states: dict[str, set[bytes]] = defaultdict(set)
        self._places: Mapping[str, Iterator[MaskPlace | None]] = {}
        self._before: dict[tuple[str, bytes], list[MaskPlace | None]] = {}

    def run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """See Ambient."""
        if kwargs or func in MONITORED:
            self.calls.record(func, args, kwargs)
        args, kwargs = as_bytes(func, args, kwargs)
        out = super().run(func, types, args, kwargs)
        self.calls.keep(func, args, kwargs, out)
        return self.calls.monitor(func, out) if type(out) is WORK else out

    def begin(self, places: Mapping[str, Sequence[MaskPlace | None]]) -> None:
        """Begin a step with the places of its batch."""
        self._places = {site: iter(site_places) for site, site_places in places.items()}
        self._before = defaultdict(list)
        self._states.clear()

    def next_place(self, tensors: Sequence[Tensor]) -> tuple[str, int, Tensor | None] | None:
        """See Dropping; a recomputation drops as before, and is recognised by its values."""
        site, state = scope.current_site(), _next_state()
        if infers_shapes():
            return None
        parts = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
        before = self._before[site, _digest(*(tensor.detach().double() for tensor in parts))]
        if in_recomputation():
            place = before[0] if len(before) == 1 else ("", 0, None)
            self.unequal_recomputations |= set() if state in self._states[site] else {site}
        else:
            place = next(self._places.get(site, iter(())), ("", 0, None))
            before.append(place)
            self._states[site].add(state)
            # torch synchronises draws of DTensors
            full = not any(isinstance(tensor, DTensor) for tensor in tensors)
            if full and place is not None and place[2] is not None:
                self.generator_states.setdefault((*place[:2], _digest(place[2])), state)
        if place is not None and place[2] is None:
            self.irregular_modules.add(site)
            return None
        return place


def in_recomputation() -> bool:
    """Return whether backward runs here: a forward inside it is a recomputation."""
    return torch._C._current_graph_task_id() >= 0


def _run_on_local(call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a function on local parts of DTensors, and return a DTensor."""
    template = next((a for a in (*args, *kwargs.values()) if isinstance(a, DTensor)), None)
    if template is None:
        return call(*args, **kwargs)
    placements = [Replicate() if p.is_partial() else p for p in template.placements]

    def own(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        return value.redistribute(placements=placements).to_local()

    out = call(*map(own, args), **{k: own(v) for k, v in kwargs.items()})
    last = out.shape[-1] if out.shape[-1] != own(template).shape[-1] else template.shape[-1]
    shape = torch.Size((*template.shape[:-1], last))  # attention's last dim is that of its values
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        out, template.device_mesh, placements, run_check=False, shape=shape, stride=stride
    )


# ---- Dropout calls of both sides.


@dataclass(frozen=True)
class OriginalDropout:
    """Dropout calls of the original, stored in a folder, and modules that drop on neither side.

    numbers  the batch number of a condition's step; the file of the batch has that name
    sites    modules that drop
    others   modules that draw other random numbers, with the function
    still    modules that are in eval mode in every training step
    off      modules that drop nothing on both sides
    drawn    by batch number: the generators that a step draws from, and their end states
    """

    folder: str
    seed: int
    numbers: Mapping[tuple[str, int], int]
    sites: tuple[str, ...] = ()
    others: tuple[tuple[str, str], ...] = ()
    still: frozenset[str] = frozenset()
    off: frozenset[str] = frozenset()
    drawn: Mapping[int, Mapping[str, frozenset[object]]] = field(default_factory=dict)

    @property
    def generators(self) -> list[str]:
        """The names of the generators that some step draws from."""
        return sorted({name for drawn in self.drawn.values() for name in drawn})

    def batch_number(self, condition: Condition, step: int) -> int:
        """Return the batch number of a step; steps past the last batch start over."""
        return self.numbers[condition.name, step % len(condition.batches)]

    def read_batch(self, number: int) -> list[DropoutCall]:
        """Read the dropout calls of the original in a batch."""
        drops: list[DropoutCall] = torch.load(
            f"{self.folder}/{number}", weights_only=False, mmap=True
        )
        return drops


EVALUATING = "ranks drop there, and the original has it in eval mode"
NO_DROPOUT = "ranks drop there, and the original drops nothing"
IN_EXCESS = (
    "ranks drop there, and the original does not: all of its dropout is found elsewhere, and this "
    "dropout changes the gradients"
)
IN_EVALUATION = "ranks drop there in `evaluate`, and the original drops nothing in evaluation"


@dataclass(frozen=True)
class RankDropoutSites:
    """Dropout calls seen on ranks.

    sites    the original's modules whose dropout was found on some rank
    unknown  a rank's module without a known place -> the original's module, "?" if unknown
    others   modules of ranks that draw other random numbers
    excess   modules of ranks that drop more than the original does
    """

    sites: frozenset[str] = frozenset()
    unknown: Mapping[str, str] = field(default_factory=dict)
    others: frozenset[str] = frozenset()
    excess: frozenset[str] = frozenset()

    def disabled_modules(self, drops: OriginalDropout) -> frozenset[str]:
        """Return the original's modules to disable: those of which some place is unknown."""
        originals = frozenset(self.unknown.values())
        return frozenset(drops.sites) if "?" in originals else originals | drops.off

    def extra_modules(self, drops: OriginalDropout) -> dict[str, str]:
        """Return modules that drop on ranks though the original drops nothing there, and why."""
        evaluating = drops.still.intersection(self.unknown.values()).difference(drops.sites)
        extra = dict.fromkeys(evaluating, EVALUATING)
        extra |= {n: IN_EXCESS for n in self.excess if self.unknown.get(n) not in extra}
        if not drops.sites and not drops.others:
            extra |= {n: NO_DROPOUT for n, name in self.unknown.items() if name not in extra}
        return dict(sorted(extra.items()))

    def missing_modules(self, drops: OriginalDropout) -> list[str]:
        """Return the original's modules that drop on no rank; none if that cannot be determined."""
        if self.unknown or self.others - {site for site, _ in drops.others}:
            return []
        return [site for site in drops.sites if site not in self.sites]
