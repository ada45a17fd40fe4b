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
from schedlang.runtime.transfer.dcp_optimizer import DcpOptimizer
from schedlang.runtime.transfer.deepspeed_optimizer import DeepSpeedOptimizer
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

    bytes                   sent by all ranks; `bound`: the fewest that any transfer must send
    sent, received, copied  by this rank; copied: bytes that it held already, copied locally
    messages                sent by all ranks
    tensors                 how many were moved; `left`: how many were not, because they had not
                            changed
    held                    the most bytes of buckets that this rank had at a time
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
        unchanged = f", {self.left} unchanged" if self.left else ""
        return (
            f"<{self.tensors} tensors transferred{unchanged}: {self.bytes:,} bytes in"
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
        problem: Diagnostic | None = None
        layouts: list[Any] = [None, None]
        try:
            if type(bucket_bytes) is not int or bucket_bytes < 1:
                message = f"`bucket_bytes` must be a positive whole number, not {bucket_bytes!r}"
                raise end_refusal(message, "leave it out: buckets of 64 MiB")
            ends = [_end(end, optimizer) for end in (a, b)]
            layouts = [end.layout() if end is not None else None for end in ends]
        except Refusal as refusal:
            problem = refusal.diagnostic
        kinds = sorted({t.device.type for e in ends if e is not None for t in e.local().values()})
        marks = [_KNOWN.get(e.anchor, ("", {}))[0] if e is not None else None for e in ends]
        options = optimizer, changed_only, bucket_bytes
        records = comm.ranks_by_object((problem, layouts, kinds, marks, options))
        for (odd, *_), _ in records:
            if odd is not None:
                raise Refusal(odd)
        if len({record[-1] for record, _ in records}) > 1:
            raise end_refusal(
                "ranks have called `transfer` with different options",
                "give the same `optimizer`, `changed_only` and `bucket_bytes` on all ranks",
            )
        size = comm.current_world().size
        sides = [
            _side([(record[1][k], ranks) for record, ranks in records], size, "ab"[k])
            for k in (0, 1)
        ]
        marks_before = {mark for record, _ in records for mark in record[3] if mark is not None}
        return _Ends(
            ends[0],
            ends[1],
            sides[0],
            sides[1],
            optimizer,
            changed_only,
            bucket_bytes,
            _wire({kind for record, _ in records for kind in record[2]}, ends),
            marks_before.pop() if len(marks_before) == 1 else None,
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
        sources, targets = self._local(state)
        moved = {name: self.source.layouts[source] for name, source in names.items()}
        digests = self._digests(sources, targets, names) if self.changed_only else ({}, {})
        if self.changed_only and self.before:
            changed = self._changed(digests, names)
            moved = {name: layout for name, layout in moved.items() if name in changed}
        target_layouts = {name: self.target.layouts[name] for name in moved}
        try:
            route, traffic = redistribute_tensors(
                moved,
                target_layouts,
                lambda name: sources[names[name]],
                targets.__getitem__,
                self.bucket,
                self.device,
            )
        except UncoveredElements as uncovered:
            raise _uncovered_refusal(uncovered) from None
        self._finish(optim, state)
        if self.changed_only:
            self._remember(digests, targets, moved)
        return _result_of(route, traffic, bucket_size(self.bucket), len(names) - len(moved))

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
                for side, tensor_name in ((self.source, names[name]), (self.target, name)):
                    layout = TensorLayout(side.layouts[tensor_name].sharding, size_of(dtype))
                    side.layouts[moment_name(name, key)] = layout
                names[moment_name(name, key)] = moment_name(name, key)
        return optim, self.b.allocate_state(optim) if isinstance(self.b, ProgramEnd) else {}

    def _local(
        self, state: Mapping[tuple[str, str], Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return this rank's tensors by name: of `a`, which are read, of `b`, which are written."""
        sources = self.a.local() if self.a is not None else {}
        targets = self.b.local() if self.b is not None else {}
        if state or self.optimizer and isinstance(self.a, ProgramEnd):
            sources |= self.a.moments() if isinstance(self.a, ProgramEnd) else {}
            targets |= {moment_name(*key): local_tensor(value) for key, value in state.items()}
        return sources, targets

    def _finish(self, optim: SavedOptimizer, state: Mapping[tuple[str, str], Tensor]) -> None:
        """Give `b` the step, the loss scale and the optimizer state of `a`, and drop old copies."""
        if self.optimizer:
            giving = self.a.program if isinstance(self.a, ProgramEnd) else None
            scale = giving.loss_scale if giving is not None else None
            extras = None
            if giving is not None:
                extras = giving.step, scale.state() if scale is not None else None
            step, factor = next(
                value for value in comm.distinct_objects(extras) if value is not None
            )
            if isinstance(self.b, ProgramEnd):
                target_program = self.b.program
                target_program.step = step
                if target_program.loss_scale is not None:
                    target_program.loss_scale.restore(factor)
                if optim.kind is not None:
                    load_optimizer(target_program, optim, state)
        if self.b is not None:
            self.b.drop_old_copies()

    # -- changed tensors only ----------------------------------------------------------------------

    def _digests(
        self, sources: Mapping[str, Tensor], targets: Mapping[str, Tensor], names: Mapping[str, str]
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Return the checksums of this rank's parts at both ends, by the names of `b`."""
        return (
            {
                name: checksum(sources[source])
                for name, source in names.items()
                if source in sources
            },
            {name: checksum(targets[name]) for name in names if name in targets},
        )

    def _changed(
        self, digests: tuple[dict[str, str], dict[str, str]], names: Mapping[str, str]
    ) -> set[str]:
        """Return the tensors that changed since the last transfer, on any rank, at either end."""
        changed = set()
        for end, new in zip((self.a, self.b), digests):
            if end is not None:
                old = _KNOWN[end.anchor][1]
                changed |= {name for name in names if new.get(name) != old.get(name)}
        return {name for listed in comm.distinct_objects(sorted(changed)) for name in listed}

    def _remember(
        self,
        digests: tuple[dict[str, str], dict[str, str]],
        targets: Mapping[str, Tensor],
        moved: Mapping[str, TensorLayout],
    ) -> None:
        """Store the checksums of both ends for the next transfer."""
        mark = comm.broadcast_object(0, secrets.token_hex(8))
        sent, received = digests
        received |= {name: checksum(targets[name]) for name in moved if name in targets}
        for end, checksums in ((self.a, sent), (self.b, received)):
            if end is not None:
                _KNOWN[end.anchor] = mark, checksums


# -- arguments of the ranks ------------------------------------------------------------------------


def _end(value: object, optimizer: bool) -> End | None:
    """Return the end for an argument of a rank.  Raises Refusal S642."""
    if value is None:
        return None
    if isinstance(value, Program):
        return ProgramEnd(value)
    if optimizer:
        raise end_refusal(
            f"`optimizer=True` goes between programs, and this is {kind_of(value)}",
            "leave `optimizer` out, or pass the program itself",
        )
    if isinstance(value, nn.Module):
        return StateEnd(value.state_dict(keep_vars=True), value)
    if isinstance(value, Mapping):
        return StateEnd(value, next(iter(value.values()), None))
    raise end_refusal(
        f"{kind_of(value)} cannot be an end of a transfer",
        "pass a program, a module, or a state dict of tensors; on a rank without a part, None",
    )


def _side(layouts: Sequence[tuple[Any, tuple[int, ...]]], world: int, end_name: str) -> EndTensors:
    """Return the tensors of one end from its (layout, ranks) pairs.  Raises Refusal S642."""
    present = [(layout, ranks) for layout, ranks in layouts if layout is not None]
    if not present:
        raise end_refusal(
            f"no rank has passed `{end_name}`",
            "pass it on each rank that has a part of it, and None on the others",
        )
    if all(isinstance(layout, StateLayout) for layout, _ in present):
        return state_tensors(present, world)
    first = present[0][0]
    if not isinstance(first, ProgramLayout) or any(layout != first for layout, _ in present):
        raise end_refusal(
            f"ranks have passed different things as `{end_name}`",
            "pass the same program on all of its ranks, or state dicts on all",
        )
    passed = sorted(rank for _, ranks in present for rank in ranks)
    if passed != sorted(first.ranks):
        raise end_refusal(
            f"the program `{end_name}` is of ranks {_list_ranks(first.ranks)}, and was passed on"
            f" {_list_ranks(passed)}",
            "pass it on all ranks that it was built on",
        )
    return first.tensors(world, takes=end_name == "b")


def _list_ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, sorted(ranks)[:8])) + (", ..." if len(ranks) > 8 else "")


def _match_names(source: EndTensors, target: EndTensors) -> dict[str, str]:
    """Return the name in `a` of each tensor of `b`.  Raises Refusal S634 or S635."""
    matches: dict[str, str] = {}
    aliases_of: dict[str, list[str]] = {}
    for alias, name in target.aliases.items():
        aliases_of.setdefault(name, []).append(alias)
    for name in target.layouts:
        candidates = (source.name_of(key) for key in (name, *aliases_of.get(name, ())))
        if (match := next((key for key in candidates if key is not None), None)) is not None:
            matches[name] = match
    missing = [name for name in target.layouts if name not in matches]
    aliases = {source.name_of(key) for key in target.aliases}
    unknown = [name for name in source.layouts if name not in {*matches.values(), *aliases}]
    notes = (f"missing in `a`: {quote_names(missing)}",) * bool(missing)
    notes += (f"not in `b`: {quote_names(unknown)}",) * bool(unknown)
    if notes:
        message, help_ = "the two ends have different tensors", "transfer between ends of one model"
        raise Refusal.of("S634", message, notes=notes, helps=(help_,))
    for name, match in matches.items():
        target_text, source_text = (
            f"{side.dtypes[key]}{[*side.layouts[key].sharding.shape]}"
            for side, key in ((target, name), (source, match))
        )
        if target_text != source_text:
            message = f"`{name}` is {source_text} in `a`, but {target_text} in `b`"
            help_ = "transfer between ends of the same model and dtype"
            raise Refusal.of("S635", message, helps=(help_,))
    return matches


def _check_ties(source: EndTensors, target: EndTensors) -> None:
    """Refuse programs of models with different ties (S642)."""
    if source.program and target.program and source.aliases != target.aliases:
        odd = min(set(source.aliases.items()) ^ set(target.aliases.items()))
        side = "a" if odd in source.aliases.items() else "b"
        raise end_refusal(
            f"`{odd[0]}` and `{odd[1]}` are one tensor in `{side}` only",
            "transfer between programs of the same model",
        )


def _check_tied_values(end: End | None, source: EndTensors, target: EndTensors) -> None:
    """Refuse to copy different tensors of `a` into one tied tensor of `b` (S642)."""
    separate = []
    for alias, name in target.aliases.items():
        first, second = source.name_of(name), source.name_of(alias)
        if first is not None and second is not None and first != second:
            separate.append((name, alias, first, second))
    if not separate:
        return
    local = end.local() if end is not None else {}
    odd = [
        (name, alias)
        for name, alias, first, second in separate
        if (first in local) != (second in local)
        or first in local
        and not _equal(local[first], local[second])
    ]
    if odd := next(filter(None, comm.distinct_objects(odd)), []):
        name, alias = odd[0]
        raise end_refusal(
            f"`{name}` and `{alias}` are one tensor in `b`, and two that differ in `a`",
            "transfer to a model in which they are not tied",
        )


def _equal(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and torch.equal(first, second)


def _uncovered_refusal(uncovered: UncoveredElements) -> Refusal:
    if uncovered.missing:
        return end_refusal(
            f"parts of `{uncovered.name}` of `a` are on no rank",
            "pass `a` on all ranks that have a part of it",
        )
    return end_refusal(
        f"parts of `{uncovered.name}` of `a` overlap on several ranks without being equal",
        "pass full tensors, or DTensors over one mesh",
    )


def _wire(kinds: set[str], ends: Sequence[End | None]) -> torch.device:
    """Return the device of buckets: the tensors' accelerator if its backend can send from there."""
    for kind in sorted(kinds):
        if bucket_device(torch.device(kind)) != devices.HOST:
            used = [t.device for end in ends if end is not None for t in end.local().values()]
            matching = [own for own in used if own.type == kind]
            return matching[0] if matching else comm.current_world().device_for(torch.device(kind))
    return devices.HOST


def load_initial_values(program: Program, folder: str | os.PathLike[str]) -> None:
    """Read the values of a folder directly into the shards of a program that has no values yet."""
    with comm.enter_ranks(program.assembly.ranks.world.ranks_in_job):
        _read(folder, program, False, BUCKET, fresh=True)


def lacks_added_parameters(program: Program, path: str | os.PathLike[str]) -> bool:
    """Return whether a checkpoint of `save` has none of the parameters that rows add to the model.

    All ranks must call this.  False for a checkpoint that cannot be read: loading it refuses later.
    """
    changes, lacks_all = program.assembly.adapter_changes, False
    if changes and comm.rank() == 0:
        with suppress(*FAILURES):
            index = checkpoint_folders.checked_index(
                *checkpoint_folders.find_checkpoint(checkpoint_folders.resolve_folder(path))
            )
            names = [key.removeprefix("model.") for key in index.tensors if key[:6] == "model."]
            lacks_all = not any(_is_added_by(change, name) for change in changes for name in names)
    return comm.broadcast_object(0, lacks_all) if changes else False


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
    added = {
        name
        for name in target.layouts
        if source.name_of(name) is None
        and any(change.initializer_of(name) is not None for change in changes)
    }
    return replace(target, layouts={n: one for n, one in target.layouts.items() if n not in added})


def _read(a: Any, b: object, optimizer: bool, bucket: int, fresh: bool = False) -> Transferred:
    """Read a folder into `b`; no tensors are sent between ranks."""
    if len({str(value) for value in comm.distinct_objects(a)}) > 1:
        raise end_refusal("ranks have passed different things as `a`", "pass one path on all ranks")
    if optimizer and isinstance(b, Program):
        load = partial(_load_others, b, bucket) if checkpoint_folders.is_of_others(a) else b.load
        run_on_all_ranks(lambda: load(a), lambda error: Diagnostic("S633", str(error)), ())
    elif optimizer:
        run_on_all_ranks(lambda: _end(b, True), lambda error: Diagnostic("S633", str(error)), ())
    ends = _Ends.met({}, b, False, False, bucket)
    end, world = ends.b, comm.current_world()
    traffic = Traffic()
    if not optimizer:
        module, parts = _model(b)
        path = Path(os.path.realpath(a))
        folder = run_on_all_ranks(
            lambda: open_folder(path, ends.target, module, parts, ends.bucket, fresh),
            partial(_read_diagnostic, path),
            (Exception,),
        )
        source = folder_tensors(folder, world.size)
        target = _without_added(b, source, ends.target) if fresh else ends.target
        names = _match_names(source, target)
        local = end.local() if end is not None else {}
        diagnose = partial(_read_diagnostic, path)
        traffic.copied = read_folder(folder, names, ends.target, local, world.rank, diagnose)
        if end is not None:
            end.drop_old_copies()
    no_route = find_route((), world.size)
    return replace(_result_of(no_route, traffic, ends.bucket, 0), tensors=len(ends.target.layouts))


def _load_others(b: Program, bucket: int, path: str | os.PathLike[str]) -> None:
    """Read weights and optimizer state that another program has written, on all ranks of `b`."""
    folder = Path(os.path.realpath(path))
    diagnose = partial(_read_diagnostic, folder)
    with comm.enter_ranks(b.assembly.ranks.world.ranks_in_job):
        other = DeepSpeedOptimizer if checkpoint_folders.find_deepspeed(folder) else DcpOptimizer
        state = other.of(b, folder, diagnose) if b.optimizer is not None else None
        _read(path, b, False, bucket)
        if state is not None:
            state.load(b, diagnose)


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
    helps = checkpoint_folders.convert_helps(path) or (
        "give a folder that `program.save`, `program.export` or `save_pretrained` wrote",
    )
    return Diagnostic(
        "S633", f"cannot read `{path}`", notes=(describe_failure(error),), helps=helps
    )


def _result_of(route: Route, traffic: Traffic, bucket: int, unchanged: int) -> Transferred:
    return Transferred(
        int(route.bytes.sum()),
        int(route.bound.sum()),
        route.messages(bucket),
        sum(len(kind.names) for kind in route.kinds),
        unchanged,
        traffic.sent,
        traffic.received,
        traffic.copied,
        traffic.most,
        route,
    )
