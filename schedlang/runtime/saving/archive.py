"""Save a program's state under any layout, and load it under any other."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from schedlang.diagnostic import Diagnostic, Refusal, quoted
from schedlang.runtime.collectives import comm
from schedlang.runtime.saving import residue, steps
from schedlang.runtime.saving.boxes import (
    Boxed,
    indexed,
    plain_torch,
    read,
    read_value,
    reason,
    whole,
    write,
)
from schedlang.runtime.saving.contents import VERSION, checked
from schedlang.runtime.saving.holding import blocks
from schedlang.runtime.saving.index import Index, Unreadable, state_of
from schedlang.runtime.saving.moments import (
    Moments,
    described,
    grouped_otherwise,
    like_parameter,
    local,
    named,
    put_back,
    unfit,
)
from schedlang.runtime.storage.folder import together
from schedlang.runtime.summing.replicas import reshard

if TYPE_CHECKING:
    from schedlang.runtime.program import Program

CONTENTS = ("schedlang",)  # where the small things lie
TRIES = 8  # of a load while another job saves and takes old checkpoints away

FAILURES = (OSError, Unreadable)

SAME_MODEL = "build the program of a model with these names: the model that was saved"
TRAINED = "build the program with the `freeze` rows and `requires_grad` that it was saved under"


def save(program: Program, path: str | os.PathLike[str], keep: int | None = 3) -> None:
    """Save parameters, buffers, optimizer and step count as a new checkpoint; all ranks together.

    `path` is a folder of checkpoints, rank 0's: each lies in a folder of its own, `step-00000012`,
    and `latest` names the last when all of it is on the disk.  Then of the older ones `keep - 1`
    stay (None: all).  Each rank writes the parts that it speaks for, as boxes of whole tensors by
    original name, in the format of torch.distributed.checkpoint.  Raises Refusal S631, S632, S637
    or S638 on all ranks, leaving every older checkpoint as it was.
    """
    a = program.assembly
    world, rank = a.ranks.mesh.world, a.ranks.rank
    if keep is not None and (type(keep) is not int or keep < 1):
        raise _keeps(keep)
    target, id_ = comm.told_by(0, (steps.resolved(path), secrets.token_hex(8)))
    moments = described(program)
    contents = {
        "version": VERSION, "step": program.step, "optimizer": moments.plain(),
        "parameters": {name: list(h.layout.shape) for name, h in a.holdings.items()},
        "buffers": {name: list(buffer.shape) for name, buffer in _buffers(program).items()},
        "dtypes": _dtypes(program), "ties": [list(names) for names in a.ties],
        "sums": residue.described(program),
        "loss scale": program.loss_scale.described() if program.loss_scale is not None else None,
    }  # fmt: skip
    values: dict[tuple[str, ...], Any] = {CONTENTS: contents} if rank == 0 else {}
    tensors = [*_model_tensors(program), *_moment_tensors(program), *residue.tensors(program)]
    told = partial(_unwritten, target, f"rank {rank}: " if world > 1 else "")

    def fill(folder: Path) -> None:
        mine = together(lambda: write(folder, id_, rank, tensors, values), told, (Exception,))
        everyone = comm.at_first(mine)
        together(lambda: indexed(folder, id_, everyone) if rank == 0 else None, told)

    steps.save_step(target, id_, program.step, rank, keep, fill, told)


@dataclass
class _Found:
    """What a checkpoint has for this rank, read whole and looked at."""

    contents: dict[str, Any]
    told: Moments
    model: dict[str, Boxed]
    moments: dict[tuple[str, str], Boxed]
    kept: dict[tuple[str, str], Boxed]


def load(program: Program, path: str | os.PathLike[str]) -> None:
    """Take over what `save` wrote, under whatever layout; all ranks together.

    `path` is a folder of checkpoints, of which the last is taken, or one of these.  A program
    without an optimizer takes over the rest.  Nothing that is read is run.  Raises Refusal S633
    (unreadable, damaged), S634 (names), S635 (shapes, dtypes) or S636 (optimizer) on all ranks,
    before anything is changed.
    """
    folder = comm.told_by(0, steps.resolved(path))
    for _ in range(TRIES):
        target, id_ = comm.told_by(0, together(
            lambda: _last(program, folder), partial(_unread, folder, folder), FAILURES
        ))  # fmt: skip
        try:
            found = _read(program, folder, target, id_)
            break
        except Refusal as refusal:  # another job may have saved, and taken this one away
            if refusal.diagnostic.code != "S633" or not comm.told_by(0, _moved(folder, target)):
                raise
            missed = refusal
    else:
        raise missed
    _take_over(program, {name: tensor.local for name, tensor in found.model.items()})
    put_back(program, found.told, {key: tensor.local for key, tensor in found.moments.items()})
    residue.put_back(program, found.contents.get("sums"), found.kept)
    if program.loss_scale is not None:
        program.loss_scale.put_back(found.contents.get("loss scale"))
    program.step = found.contents["step"]


def _last(program: Program, folder: Path) -> tuple[Path, str | None]:
    """On the first rank: what is to be loaded."""
    return steps.to_load(folder) if program.assembly.ranks.rank == 0 else (folder, None)


def _moved(folder: Path, target: Path) -> bool:
    """Is another checkpoint the last one now?"""
    try:
        return steps.to_load(folder)[0] != target
    except FAILURES:
        return False


def _read(program: Program, folder: Path, target: Path, id_: str | None) -> _Found:
    """All of this rank's parts, none of which is in the program yet."""

    def reading(step: Callable[[], Any]) -> Any:  # whatever a crafted folder leads to
        return together(step, partial(_unread, folder, target), (Exception,))

    before, index, contents = reading(lambda: _contents(target, id_))
    first = comm.told_by(0, index.mark)
    told = Moments(**contents["optimizer"])
    _check(program, contents, told)
    model, moments, kept = reading(lambda: _blank(program, contents, told))
    every = [*model.values(), *moments.values(), *kept.values()]
    reading(lambda: read(target, index, every))
    reading(lambda: _unmoved(target, before, index.mark == first))
    return _Found(contents, told, model, moments, kept)


def _blank(program: Program, contents: Mapping[str, Any], told: Moments) -> Any:
    """Room for this rank's parts: of the model, of the optimizer's state, of compressed sums."""
    model = {t.path[-1]: t for t in _model_tensors(program, blank=True)}
    sums = residue.blank(program, contents.get("sums"))
    return model, _blank_moments(program, told), sums


def _unmoved(target: Path, before: tuple[int, ...], same: bool) -> None:
    if not same:
        raise Unreadable("the ranks have read different checkpoints")
    if state_of(target) != before:
        raise Unreadable("it was changed while it was read")


# -- what there is to save -------------------------------------------------------------------------


def _model_tensors(program: Program, blank: bool = False) -> list[Boxed]:
    """This rank's parts of parameters, and all buffers; `blank`: empty ones on the CPU."""
    a = program.assembly
    out = []
    for name, parameter in a.parameters.items():
        part = local(parameter)
        out.append(
            _part(program, name, ("model", name), _empty(part, part.dtype) if blank else part)
        )
    place = a.ranks.rank
    for name, buffer in _buffers(program).items():
        tensor = _empty(buffer, buffer.dtype) if blank else buffer.detach()
        out.append(whole(("model", name), tensor, speaks=place == _speaker(program, name)))
    return out


def _moment_tensors(program: Program) -> list[Boxed]:
    optimizer = program.optimizer
    return [
        _part(program, name, _moment_path(name, key), local(value))
        for name, parameter in named(program).items()
        for key, value in (optimizer.state.get(parameter, {}) if optimizer else {}).items()
        if like_parameter(value, parameter)
    ]


def _blank_moments(program: Program, told: Moments) -> dict[tuple[str, str], Boxed]:
    return {
        (name, key): _part(
            program, name, _moment_path(name, key), _empty(local(parameter), getattr(torch, dtype))
        )
        for name, parameter in named(program).items()
        for key, dtype in told.parts.get(name, {}).items()
    }


def _moment_path(name: str, key: str) -> tuple[str, ...]:
    return ("optim", "state", name, key)


def _part(program: Program, name: str, path: tuple[str, ...], tensor: Tensor) -> Boxed:
    a = program.assembly
    holding, mesh, rank = a.holdings[name], a.ranks.mesh, a.ranks.rank
    shape = holding.layout.shape
    boxes = tuple(blocks(holding.segments(mesh, rank), shape))
    return Boxed(path, tensor, shape, boxes, holding.primary(mesh, rank))


def _empty(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros, so that padding is what it always is; on the CPU, whatever function mode is on."""
    with plain_torch():
        return torch.zeros(like.shape, dtype=dtype)


def _buffers(program: Program) -> dict[str, Tensor]:
    """The buffers of the state dict."""
    a = program.assembly
    return {name: buffer for name, buffer in a.buffers.items() if name in a.keys}


def _speaker(program: Program, name: str) -> int:
    """The rank that writes a buffer: the first at the place whose value counts."""
    a = program.assembly
    home = a.buffer_homes.get(name)
    if a.stage_axis is None or home is None:
        return 0
    mesh, axis = a.ranks.mesh, a.stage_axis
    return next(rank for rank in range(mesh.world) if mesh.index(rank, axis) == home)


def _dtypes(program: Program) -> dict[str, str]:
    """The dtypes of all parameters, of this rank's and of others', and of buffers."""
    tensors = {**dict(program.assembly.module.named_parameters()), **_buffers(program)}
    return {name: str(t.dtype).removeprefix("torch.") for name, t in tensors.items()}


# -- what is read ----------------------------------------------------------------------------------


def _contents(target: Path, id_: str | None) -> tuple[tuple[int, ...], Index, dict[str, Any]]:
    """The index and the small things of a checkpoint, and how the index looks on the disk."""
    index = steps.checked_index(target, id_)
    return state_of(target), index, checked(read_value(target, index, CONTENTS))


def _check(program: Program, contents: Mapping[str, Any], told: Moments) -> None:
    """Raise the same Refusal on all ranks where checkpoint and program do not fit."""
    a = program.assembly
    here = {name: list(holding.layout.shape) for name, holding in a.holdings.items()}
    here |= {name: list(buffer.shape) for name, buffer in _buffers(program).items()}
    saved = {**contents["parameters"], **contents["buffers"]}
    _same_names("S634", "the checkpoint does not fit this model", saved, here, SAME_MODEL)
    dtypes = _dtypes(program)
    for name, shape in here.items():
        ours, theirs = (dtypes[name], shape), (contents["dtypes"][name], saved[name])
        if ours != theirs:
            raise Refusal(
                Diagnostic(
                    "S635", f"`{name}` was saved as {_kind(theirs)}, but is {_kind(ours)}",
                    helps=("load it into a program of the same model and dtype",),
                )
            )  # fmt: skip
    kind = type(program.optimizer).__qualname__ if program.optimizer is not None else None
    found = comm.distinct((kind, list(named(program))))
    kinds = [kind for kind, _ in found if kind is not None]
    if kinds:
        _check_optimizer(kinds[0], {name for _, names in found for name in names}, told)
        mixed = next((m for m in comm.distinct(grouped_otherwise(program, told)) if m), None)
        if mixed:
            raise _other_optimizer(f"its parameter groups differ: {quoted(mixed)} were in two")
        odd = next((key for key in comm.distinct(unfit(program, told)) if key), None)
        if odd:
            raise _other_optimizer(f"`{odd}` of its groups has a different type here")


def _check_optimizer(kind: str, names: set[str], told: Moments) -> None:
    if told.kind is None:
        raise _other_optimizer("the checkpoint was saved without an optimizer")
    if told.kind != kind:
        raise _other_optimizer(f"it was saved from `{told.kind}`, but the program has `{kind}`")
    _same_names(
        "S636", "the optimizer of the checkpoint trained other parameters", told.of, names, TRAINED
    )


def _same_names(
    code: str, title: str, saved: Iterable[str], here: Iterable[str], help_: str
) -> None:
    missing, unknown = sorted(set(here) - set(saved)), sorted(set(saved) - set(here))
    notes = [f"missing in the checkpoint: {quoted(missing)}"] if missing else []
    notes += [f"not in the model: {quoted(unknown)}"] if unknown else []
    if notes:
        raise Refusal(Diagnostic(code, title, notes=tuple(notes), helps=(help_,)))


def _take_over(program: Program, values: Mapping[str, Tensor]) -> None:
    a = program.assembly
    with torch.no_grad():
        for name, parameter in a.parameters.items():
            local(parameter).copy_(values[name])
        for name, buffer in _buffers(program).items():
            buffer.copy_(values[name])
    reshard(a.sliced)


# -- messages --------------------------------------------------------------------------------------


def _kind(found: tuple[str, list[int]]) -> str:
    return f"{found[0]}{found[1]}"


def _unwritten(target: Path, where: str, error: BaseException) -> Diagnostic:
    return Diagnostic(
        "S631", f"cannot write a checkpoint into `{target}`",
        notes=(where + reason(error), "what was there before is unchanged"),
        helps=("give a different folder, one that every rank can write",),
    )  # fmt: skip


def _keeps(keep: Any) -> Refusal:
    return Refusal(
        Diagnostic(
            "S631", f"`keep` must be None, or 1 or more, not {keep!r}",
            notes=("the new checkpoint is always kept",),
            helps=("`keep=3`: it and the two before it", "`keep=None`: all"),
        )
    )  # fmt: skip


def _unread(folder: Path, target: Path, error: BaseException) -> Diagnostic:
    older = steps.last_whole(folder, target)
    return Diagnostic(
        "S633", f"cannot read the checkpoint `{target}`",
        notes=(reason(error), "the program is unchanged"),
        helps=("give the folder that `program.save` wrote",) if older is None
        else (f"load another checkpoint of this folder: `{older}`",),
    )  # fmt: skip


def _other_optimizer(note: str) -> Refusal:
    return Refusal(
        Diagnostic(
            "S636", "the checkpoint is of a different optimizer", notes=(note,),
            helps=("build the program with the optimizer of the checkpoint",
                   "or without an optimizer, to load only the model"),
        )
    )  # fmt: skip
