"""The function `transfer`: copy values from one layout to another, each missing byte sent once."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from schedlang.diagnostics.diagnostic import (
    Diagnostic,
    Refusal,
    kind_of,
    quote_names,
    refuse_at_caller,
)
from schedlang.ir.model import AdapterChange
from schedlang.runtime import device as devices
from schedlang.runtime.checkpointing import checkpoint_folders
from schedlang.runtime.checkpointing.archive import FAILURES, check_optimizer
from schedlang.runtime.checkpointing.boxes import describe_failure, is_out_of_memory, out_of_memory
from schedlang.runtime.checkpointing.optimizer_state import (
    SavedOptimizer,
    describe_optimizer,
    load_optimizer,
)
from schedlang.runtime.comm import world as comm
from schedlang.runtime.comm.agreement import checksum
from schedlang.runtime.program import Program
from schedlang.runtime.redistribution.execution import (
    Traffic,
    bucket_device,
    bucket_size,
    redistribute_tensors,
)
from schedlang.runtime.redistribution.route import (
    Route,
    TensorLayout,
    UncoveredElements,
    find_route,
)
from schedlang.runtime.storage.folder import run_on_all_ranks
from schedlang.runtime.storage.offloaded_gradients import local_tensor
from schedlang.runtime.storage.quantized_parameters import open_quantized
from schedlang.runtime.transfer.ends import (
    EndTensors,
    ProgramEnd,
    ProgramLayout,
    StateEnd,
    StateLayout,
    end_refusal,
    moment_name,
    size_of,
    state_tensors,
)
from schedlang.runtime.transfer.folders import folder_tensors, open_folder, read_folder

BUCKET = 64 << 20
End = ProgramEnd | StateEnd
# anchor of an end -> (mark of its last transfer, checksums of its tensors then)
_KNOWN: Any = WeakIdKeyDictionary()


@dataclass(frozen=True)
class Transferred:
    """The result of a transfer: moved bytes of all ranks, and of this rank.

    bytes     sent by all ranks; `bound`: the fewest that any transfer must send
    sent, received, copied   by this rank; copied: bytes that it held already, copied locally
    messages  sent by all ranks
    tensors   how many were moved; `left`: how many were not, because they had not changed
    held      the most bytes of buckets that this rank had at a time
    """

    bytes: int
    bound: int
    messages: int
    tensors: int
    left: int
    sent: int
    received: int
    copied: int
    held: int
    route: Route

    def __repr__(self) -> str:
        left = f", {self.left} unchanged" if self.left else ""
        return (
            f"<{self.tensors} tensors transferred{left}: {self.bytes:,} bytes in"
            f" {self.messages:,} messages, of which at least {self.bound:,} bytes were needed>"
        )


@refuse_at_caller()
def transfer(
    a: object,
    b: object,
    *,
    optimizer: bool = False,
    changed_only: bool = False,
    bucket_bytes: int = BUCKET,
) -> Transferred:
    """Copy the values of `a` into `b`, between any layouts; all ranks of the job must call this.

    `a` is a program, a module or a state dict (plain tensors are full, DTensors are shards), or the
    path of a checkpoint or of a folder of safetensors, from which each rank reads its shards.  `b`
    is a program, a module or a state dict, and its tensors are written in place.  A rank without a
    part of `a` or `b` passes None for it.  Names, shapes and dtypes must agree.

    optimizer      between programs: the optimizer's state, the step and the loss scale, too
    changed_only   only tensors whose values differ from those of the last transfer from `a` to `b`
    bucket_bytes   bytes of a message; a rank has at most four buckets at once, besides its tensors

    Each rank receives each element that it will hold and does not hold yet exactly once, so no
    transfer can send less.  Raises Refusal S634 (names), S635 (shapes, dtypes), S636 (optimizer) or
    S642 (an object that cannot be an end) on all ranks, before anything is changed.
    """
    written = open_quantized(b.assembly.parameters.values() if isinstance(b, Program) else ())
    with written, comm.enter_ranks(()):  # whatever part of the job the ends are on
        if any(comm.distinct_objects(isinstance(a, str | os.PathLike))):
            return _read(a, b, optimizer, bucket_bytes)
        ends = _Ends.met(a, b, optimizer, changed_only, bucket_bytes)
        with ends.at_home():
            return ends.move()


@dataclass
class _Ends:
    """Both ends on this rank, and the layouts of all tensors of both."""

    a: End | None
    b: End | None
    source: EndTensors
    target: EndTensors
    optimizer: bool
    changed_only: bool
    bucket: int
    device: torch.device
    before: str | None  # the last transfer, if both ends of all ranks took part in it

    @staticmethod
    def met(a: object, b: object, optimizer: bool, changed_only: bool, bucket_bytes: int) -> _Ends:
        """Build the ends, and exchange their layouts; all ranks must call this.

        Raises Refusal S642 or S635 on all ranks.
        """
        ends: list[End | None] = [None, None]
        wrong: Diagnostic | None = None
        layouts: list[Any] = [None, None]
        try:
            if type(bucket_bytes) is not int or bucket_bytes < 1:
                title = f"`bucket_bytes` must be a positive whole number, not {bucket_bytes!r}"
                raise end_refusal(title, "leave it out: buckets of 64 MiB")
            ends = [_end(one, optimizer) for one in (a, b)]
            layouts = [one.layout() if one is not None else None for one in ends]
        except Refusal as refusal:
            wrong = refusal.diagnostic
        lies = sorted({t.device.type for e in ends if e is not None for t in e.local().values()})
        marks = [_KNOWN.get(e.anchor, ("", {}))[0] if e is not None else None for e in ends]
        asked = optimizer, changed_only, bucket_bytes
        everyone = comm.ranks_by_object((wrong, layouts, lies, marks, asked))
        for (odd, *_), _ in everyone:
            if odd is not None:
                raise Refusal(odd)
        if len({each[-1] for each, _ in everyone}) > 1:
            raise end_refusal(
                "ranks have called `transfer` with different options",
                "give the same `optimizer`, `changed_only` and `bucket_bytes` on all ranks",
            )
        size = comm.current_world().size
        sides = [
            _side([(each[1][k], ranks) for each, ranks in everyone], size, "ab"[k]) for k in (0, 1)
        ]
        before = {mark for each, _ in everyone for mark in each[3] if mark is not None}
        return _Ends(
            ends[0],
            ends[1],
            sides[0],
            sides[1],
            optimizer,
            changed_only,
            bucket_bytes,
            _wire({kind for each, _ in everyone for kind in each[2]}, ends),
            before.pop() if len(before) == 1 else None,
        )

    @contextmanager
    def at_home(self) -> Iterator[None]:
        """Context in which optimizer state that is offloaded to other ranks is on this rank."""
        with ExitStack() as stack:
            for end in (self.a, self.b) if self.optimizer else ():
                if isinstance(end, ProgramEnd) and end.program.offloaded is not None:
                    stack.enter_context(
                        end.program.offloaded.load_peer_state(end.program.optimizer)
                    )
            yield

    def move(self) -> Transferred:
        """Check both ends, move the tensors, and update the target."""
        names = _match_names(self.source, self.target)
        _check_ties(self.source, self.target)
        _check_tied_values(self.a, self.source, self.target)
        optim, state = self._moments(names)
        here, there = self._local(state)
        moved = {name: self.source.layouts[at] for name, at in names.items()}
        digests = self._digests(here, there, names) if self.changed_only else ({}, {})
        if self.changed_only and self.before:
            changed = self._changed(digests, names)
            moved = {name: one for name, one in moved.items() if name in changed}
        wanted = {name: self.target.layouts[name] for name in moved}
        try:
            found, done = redistribute_tensors(
                moved,
                wanted,
                lambda name: here[names[name]],
                there.__getitem__,
                self.bucket,
                self.device,
            )
        except UncoveredElements as odd:
            raise _uncovered_refusal(odd) from None
        self._finish(optim, state)
        if self.changed_only:
            self._remember(digests, there, moved)
        return _result_of(found, done, bucket_size(self.bucket), len(names) - len(moved))

    def _moments(
        self, names: dict[str, str]
    ) -> tuple[SavedOptimizer, dict[tuple[str, str], Tensor]]:
        """Return the optimizer state of `a` and tensors for it in `b`; add its names to `names`."""
        if not self.optimizer:
            return SavedOptimizer(), {}
        giving = self.a.program if isinstance(self.a, ProgramEnd) else None
        taking = self.b.program if isinstance(self.b, ProgramEnd) else None
        optim = describe_optimizer(giving)
        if not check_optimizer(taking, optim):
            return SavedOptimizer(), {}
        for name, parts in optim.parts.items():
            for key, dtype in parts.items():
                for side, at in ((self.source, names[name]), (self.target, name)):
                    lies = TensorLayout(side.layouts[at].sharding, size_of(dtype))
                    side.layouts[moment_name(name, key)] = lies
                names[moment_name(name, key)] = moment_name(name, key)
        return optim, self.b.allocate_state(optim) if isinstance(self.b, ProgramEnd) else {}

    def _local(
        self, state: Mapping[tuple[str, str], Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return this rank's tensors by name: of `a`, which are read, of `b`, which are written."""
        here = self.a.local() if self.a is not None else {}
        there = self.b.local() if self.b is not None else {}
        if state or self.optimizer and isinstance(self.a, ProgramEnd):
            here |= self.a.moments() if isinstance(self.a, ProgramEnd) else {}
            there |= {moment_name(*key): local_tensor(value) for key, value in state.items()}
        return here, there

    def _finish(self, optim: SavedOptimizer, state: Mapping[tuple[str, str], Tensor]) -> None:
        """Give `b` the step, the loss scale and the optimizer state of `a`, and drop old copies."""
        if self.optimizer:
            giving = self.a.program if isinstance(self.a, ProgramEnd) else None
            scale = giving.loss_scale if giving is not None else None
            plain = None
            if giving is not None:
                plain = giving.step, scale.state() if scale is not None else None
            step, factor = next(one for one in comm.distinct_objects(plain) if one is not None)
            if isinstance(self.b, ProgramEnd):
                taking = self.b.program
                taking.step = step
                if taking.loss_scale is not None:
                    taking.loss_scale.restore(factor)
                if optim.kind is not None:
                    load_optimizer(taking, optim, state)
        if self.b is not None:
            self.b.drop_old_copies()

    # -- changed tensors only ----------------------------------------------------------------------

    def _digests(
        self, here: Mapping[str, Tensor], there: Mapping[str, Tensor], names: Mapping[str, str]
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Return the checksums of this rank's parts at both ends, by the names of `b`."""
        return (
            {name: checksum(here[at]) for name, at in names.items() if at in here},
            {name: checksum(there[name]) for name in names if name in there},
        )

    def _changed(
        self, digests: tuple[dict[str, str], dict[str, str]], names: Mapping[str, str]
    ) -> set[str]:
        """Return the tensors that changed since the last transfer, on any rank, at either end."""
        mine = set()
        for end, now in zip((self.a, self.b), digests):
            if end is not None:
                known = _KNOWN[end.anchor][1]
                mine |= {name for name in names if now.get(name) != known.get(name)}
        return {name for some in comm.distinct_objects(sorted(mine)) for name in some}

    def _remember(
        self,
        digests: tuple[dict[str, str], dict[str, str]],
        there: Mapping[str, Tensor],
        moved: Mapping[str, TensorLayout],
    ) -> None:
        """Store the checksums of both ends for the next transfer."""
        mark = comm.broadcast_object(0, secrets.token_hex(8))
        sent, received = digests
        received |= {name: checksum(there[name]) for name in moved if name in there}
        for end, now in ((self.a, sent), (self.b, received)):
            if end is not None:
                _KNOWN[end.anchor] = mark, now


# -- arguments of the ranks ------------------------------------------------------------------------


def _end(one: object, optimizer: bool) -> End | None:
    """Return the end for an argument of a rank.  Raises Refusal S642."""
    if one is None:
        return None
    if isinstance(one, Program):
        return ProgramEnd(one)
    if optimizer:
        raise end_refusal(
            f"`optimizer=True` goes between programs, and this is {kind_of(one)}",
            "leave `optimizer` out, or pass the program itself",
        )
    if isinstance(one, nn.Module):
        return StateEnd(one.state_dict(keep_vars=True), one)
    if isinstance(one, Mapping):
        return StateEnd(one, next(iter(one.values()), None))
    raise end_refusal(
        f"{kind_of(one)} cannot be an end of a transfer",
        "pass a program, a module, or a state dict of tensors; on a rank without a part, None",
    )


def _side(layouts: Sequence[tuple[Any, tuple[int, ...]]], world: int, which: str) -> EndTensors:
    """Return the tensors of one end from its (layout, ranks) pairs.  Raises Refusal S642."""
    there = [(one, ranks) for one, ranks in layouts if one is not None]
    if not there:
        raise end_refusal(
            f"no rank has passed `{which}`",
            "pass it on each rank that has a part of it, and None on the others",
        )
    if all(isinstance(one, StateLayout) for one, _ in there):
        return state_tensors(there, world)
    first = there[0][0]
    if not isinstance(first, ProgramLayout) or any(one != first for one, _ in there):
        raise end_refusal(
            f"ranks have passed different things as `{which}`",
            "pass the same program on all of its ranks, or state dicts on all",
        )
    passed = sorted(rank for _, ranks in there for rank in ranks)
    if passed != sorted(first.ranks):
        raise end_refusal(
            f"the program `{which}` is of ranks {_list_ranks(first.ranks)}, and was passed on"
            f" {_list_ranks(passed)}",
            "pass it on all ranks that it was built on",
        )
    return first.tensors(world, takes=which == "b")


def _list_ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, sorted(ranks)[:8])) + (", ..." if len(ranks) > 8 else "")


def _match_names(source: EndTensors, target: EndTensors) -> dict[str, str]:
    """Return the name in `a` of each tensor of `b`.  Raises Refusal S634 or S635."""
    found: dict[str, str] = {}
    others: dict[str, list[str]] = {}
    for other, name in target.aliases.items():
        others.setdefault(name, []).append(other)
    for name in target.layouts:
        known = (source.name_of(one) for one in (name, *others.get(name, ())))
        if (at := next((one for one in known if one is not None), None)) is not None:
            found[name] = at
    missing = [name for name in target.layouts if name not in found]
    aliases = {source.name_of(one) for one in target.aliases}
    unknown = [name for name in source.layouts if name not in {*found.values(), *aliases}]
    notes = (f"missing in `a`: {quote_names(missing)}",) * bool(missing)
    notes += (f"not in `b`: {quote_names(unknown)}",) * bool(unknown)
    if notes:
        title, help_ = "the two ends have different tensors", "transfer between ends of one model"
        raise Refusal.of("S634", title, notes=notes, helps=(help_,))
    for name, at in found.items():
        ours, theirs = (
            f"{side.dtypes[one]}{[*side.layouts[one].sharding.shape]}"
            for side, one in ((target, name), (source, at))
        )
        if ours != theirs:
            title = f"`{name}` is {theirs} in `a`, but {ours} in `b`"
            help_ = "transfer between ends of the same model and dtype"
            raise Refusal.of("S635", title, helps=(help_,))
    return found


def _check_ties(source: EndTensors, target: EndTensors) -> None:
    """Refuse programs of models with different ties (S642)."""
    if source.program and target.program and source.aliases != target.aliases:
        odd = min(set(source.aliases.items()) ^ set(target.aliases.items()))
        where = "a" if odd in source.aliases.items() else "b"
        raise end_refusal(
            f"`{odd[0]}` and `{odd[1]}` are one tensor in `{where}` only",
            "transfer between programs of the same model",
        )


def _check_tied_values(end: End | None, source: EndTensors, target: EndTensors) -> None:
    """Refuse to copy different tensors of `a` into one tied tensor of `b` (S642)."""
    separate = []
    for other, name in target.aliases.items():
        at, to = source.name_of(name), source.name_of(other)
        if at is not None and to is not None and at != to:
            separate.append((name, other, at, to))
    if not separate:
        return
    here = end.local() if end is not None else {}
    odd = [
        (name, other)
        for name, other, at, to in separate
        if (at in here) != (to in here) or at in here and not _equal(here[at], here[to])
    ]
    if odd := next(filter(None, comm.distinct_objects(odd)), []):
        name, other = odd[0]
        raise end_refusal(
            f"`{name}` and `{other}` are one tensor in `b`, and two that differ in `a`",
            "transfer to a model in which they are not tied",
        )


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def _uncovered_refusal(odd: UncoveredElements) -> Refusal:
    if odd.missing:
        return end_refusal(
            f"parts of `{odd.name}` of `a` are on no rank",
            "pass `a` on all ranks that have a part of it",
        )
    return end_refusal(
        f"parts of `{odd.name}` of `a` overlap on several ranks without being equal",
        "pass full tensors, or DTensors over one mesh",
    )


def _wire(kinds: set[str], ends: Sequence[End | None]) -> torch.device:
    """Return the device of buckets: the tensors' accelerator if its backend can send from there."""
    for kind in sorted(kinds):
        if bucket_device(torch.device(kind)) != devices.HOST:
            own = [t.device for end in ends if end is not None for t in end.local().values()]
            mine = next((one for one in own if one.type == kind), None)
            return mine if mine is not None else comm.current_world().device_for(torch.device(kind))
    return devices.HOST


def load_initial_values(program: Program, folder: str | os.PathLike[str]) -> None:
    """Read the values of a folder directly into the shards of a program that has no values yet."""
    with comm.enter_ranks(program.assembly.ranks.world.ranks_in_job):
        _read(folder, program, False, BUCKET, fresh=True)


def lacks_added_parameters(program: Program, path: str | os.PathLike[str]) -> bool:
    """Return whether a checkpoint of `save` has none of the parameters that rows add to the model.

    All ranks must call this.  False for a checkpoint that cannot be read: loading it refuses later.
    """
    changes, found = program.assembly.adapter_changes, False
    if changes and comm.rank() == 0:
        with suppress(*FAILURES):
            index = checkpoint_folders.checked_index(
                *checkpoint_folders.find_checkpoint(checkpoint_folders.resolve_folder(path))
            )
            names = [key.removeprefix("model.") for key in index.tensors if key[:6] == "model."]
            found = not any(_is_added_by(change, name) for change in changes for name in names)
    return comm.broadcast_object(0, found) if changes else False


def _is_added_by(change: AdapterChange, name: str) -> bool:
    """Return whether a change adds this parameter to the model."""
    try:
        return change.initializer_of(name) is not None
    except Refusal:  # added, but other parameters must have values before it is initialised
        return True


def _without_added(program: object, source: EndTensors, target: EndTensors) -> EndTensors:
    """Return a program's tensors without added parameters that a folder does not have.

    These keep their initial values.  Raises Refusal S623 for initial values that depend on values
    of the folder.
    """
    assert isinstance(program, Program)
    changes = program.assembly.adapter_changes
    own = {
        name
        for name in target.layouts
        if source.name_of(name) is None
        and any(change.initializer_of(name) is not None for change in changes)
    }
    return replace(target, layouts={n: one for n, one in target.layouts.items() if n not in own})


def _read(a: Any, b: object, optimizer: bool, bucket: int, fresh: bool = False) -> Transferred:
    """Read a folder into `b`; no tensors are sent between ranks."""
    if len({str(one) for one in comm.distinct_objects(a)}) > 1:
        raise end_refusal("ranks have passed different things as `a`", "pass one path on all ranks")
    if optimizer and isinstance(b, Program):
        run_on_all_ranks(lambda: b.load(a), lambda error: Diagnostic("S633", str(error)), ())
    elif optimizer:
        run_on_all_ranks(lambda: _end(b, True), lambda error: Diagnostic("S633", str(error)), ())
    ends = _Ends.met({}, b, False, False, bucket)
    end, world = ends.b, comm.current_world()
    done = Traffic()
    if not optimizer:
        module, parts = _model(b)
        path, wanted = Path(os.path.realpath(a)), (*ends.target.layouts, *ends.target.aliases)
        folder = run_on_all_ranks(
            lambda: open_folder(path, wanted, module, parts, ends.bucket, fresh),
            partial(_read_diagnostic, path),
            (Exception,),
        )
        source = folder_tensors(folder, world.size)
        target = _without_added(b, source, ends.target) if fresh else ends.target
        names = _match_names(source, target)
        local = end.local() if end is not None else {}
        diagnose = partial(_read_diagnostic, path)
        done.copied = read_folder(folder, names, ends.target, local, world.rank, diagnose)
        if end is not None:
            end.drop_old_copies()
    none = find_route((), world.size)
    return replace(_result_of(none, done, ends.bucket, 0), tensors=len(ends.target.layouts))


def _model(b: object) -> tuple[nn.Module | None, bool]:
    """Return the model of the target, if it has one, and whether it has shards of parameters."""
    if isinstance(b, Program):
        return b.assembly.module, True
    if not isinstance(b, nn.Module):
        return None, False
    return b, any(hasattr(parameter, "placements") for parameter in b.parameters())


def _read_diagnostic(path: Path, error: BaseException) -> Diagnostic:
    if is_out_of_memory(error):
        return out_of_memory(path, error)
    helps = ("give a folder that `program.save`, `program.export` or `save_pretrained` wrote",)
    return Diagnostic(
        "S633", f"cannot read `{path}`", notes=(describe_failure(error),), helps=helps
    )


def _result_of(found: Route, done: Traffic, bucket: int, left: int) -> Transferred:
    return Transferred(
        int(found.bytes.sum()),
        int(found.bound.sum()),
        found.messages(bucket),
        sum(len(kind.names) for kind in found.kinds),
        left,
        done.sent,
        done.received,
        done.copied,
        done.most,
        found,
    )
