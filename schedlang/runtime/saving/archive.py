"""Save a program's state under any layout, and load it under any other."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from schedlang.diagnostic import Diagnostic, Refusal, quoted
from schedlang.runtime.saving import residue
from schedlang.runtime.saving.boxes import (
    FAILURES,
    INDEX,
    Boxed,
    Unreadable,
    index,
    plain_torch,
    read,
    read_value,
    reason,
    whole,
    write,
)
from schedlang.runtime.saving.holding import blocks
from schedlang.runtime.saving.moments import (
    Moments,
    described,
    grouped_otherwise,
    like_parameter,
    local,
    named,
    put_back,
)
from schedlang.runtime.storage.folder import agreed, gathered, newest, replace_folder, together
from schedlang.runtime.summing.replicas import reshard

if TYPE_CHECKING:
    from schedlang.runtime.program import Program

CONTENTS = ("schedlang",)  # where the small things lie
VERSION = 1

SAME_MODEL = "build the program of a model with these names: the one that was saved"
TRAINED = "build the program with the `freeze` rows and `requires_grad` that it was saved under"


def save(program: Program, path: str | os.PathLike[str]) -> None:
    """Save parameters, buffers, optimizer and step count in a folder; all ranks together.

    Each rank writes the parts that it speaks for, as boxes of whole tensors by original name, in
    the format of torch.distributed.checkpoint.  The path is rank 0's.  Raises Refusal S631, S632 or
    S637 on all ranks, leaving an older checkpoint at the path as it was.
    """
    a = program.assembly
    world, rank = a.ranks.mesh.world, a.ranks.rank
    target = _target(path, world)
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
    replace_folder(
        target, rank, world, lambda folder: write(folder, tensors, values), mark=INDEX,
        told=lambda error: _unwritten(target, error), failures=FAILURES,
    )  # fmt: skip


def load(program: Program, path: str | os.PathLike[str]) -> None:
    """Take over what `save` wrote, under whatever layout; all ranks together.

    A program without an optimizer takes over the rest.  Raises Refusal S633 (unreadable), S634
    (names), S635 (shapes, dtypes) or S636 (optimizer) on all ranks, before anything is changed.
    """
    a = program.assembly
    world = a.ranks.mesh.world
    target = agreed(newest(_target(path, world)), world)

    def reading(step: Callable[[], Any]) -> Any:
        return together(world, step, lambda e: _unread(target, e), (OSError, Unreadable))

    contents = reading(lambda: _contents(target))
    told = Moments(**contents["optimizer"])
    _check(program, contents, told)
    model = {t.path[-1]: t for t in _model_tensors(program, blank=True)}
    moments = _blank_moments(program, told)
    kept = residue.blank(program, contents.get("sums"))
    reading(lambda: read(target, [*model.values(), *moments.values(), *kept.values()]))
    _take_over(program, {name: tensor.local for name, tensor in model.items()})
    put_back(program, told, {key: tensor.local for key, tensor in moments.items()})
    residue.put_back(program, contents.get("sums"), kept)
    if program.loss_scale is not None:
        program.loss_scale.put_back(contents.get("loss scale"))
    program.step = contents["step"]


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
    """The rank that writes a buffer: the first whose stage uses it."""
    a = program.assembly
    stages = a.buffer_stages.get(name)
    if a.stage_axis is None or not stages:
        return 0
    mesh, axis = a.ranks.mesh, a.stage_axis
    return next(rank for rank in range(mesh.world) if mesh.index(rank, axis) == min(stages))


def _dtypes(program: Program) -> dict[str, str]:
    """The dtypes of all parameters, of this rank's and of others', and of buffers."""
    tensors = {**dict(program.assembly.module.named_parameters()), **_buffers(program)}
    return {name: str(t.dtype).removeprefix("torch.") for name, t in tensors.items()}


# -- what is read ----------------------------------------------------------------------------------


def _contents(target: Path) -> dict[str, Any]:
    """The small things of a checkpoint, whole and of a version that we know."""
    if not target.is_dir():
        raise Unreadable("there is no such folder")
    index(target)
    found = read_value(target, CONTENTS)
    if not isinstance(found, dict) or found.get("version") != VERSION:
        raise Unreadable(f"it is of another version than {VERSION}")
    return found


def _check(program: Program, contents: Mapping[str, Any], told: Moments) -> None:
    """Raise the same Refusal on all ranks where checkpoint and program do not fit."""
    a = program.assembly
    world = a.ranks.mesh.world
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
                    "S635", f"`{name}` was saved as {_kind(theirs)}, and is {_kind(ours)} here",
                    helps=("load it into a program of the same model and dtype",),
                )
            )  # fmt: skip
    kind = type(program.optimizer).__qualname__ if program.optimizer is not None else None
    found = gathered((kind, list(named(program))), world)
    kinds = [kind for kind, _ in found if kind is not None]
    if kinds:
        _check_optimizer(kinds[0], {name for _, names in found for name in names}, told)
        mixed = next((m for m in gathered(grouped_otherwise(program, told), world) if m), None)
        if mixed:
            raise _other_optimizer(f"it had other groups: {quoted(mixed)} were in two")


def _check_optimizer(kind: str, names: set[str], told: Moments) -> None:
    if told.kind is None:
        raise _other_optimizer("the checkpoint was saved without one")
    if told.kind != kind:
        raise _other_optimizer(f"it was saved from `{told.kind}`, and here is `{kind}`")
    _same_names(
        "S636", "the checkpoint's optimizer trained other parameters", told.of, names, TRAINED
    )


def _same_names(
    code: str, title: str, saved: Iterable[str], here: Iterable[str], help_: str
) -> None:
    missing, unknown = sorted(set(here) - set(saved)), sorted(set(saved) - set(here))
    notes = [f"missing in the checkpoint: {quoted(missing)}"] if missing else []
    notes += [f"unknown here: {quoted(unknown)}"] if unknown else []
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


def _target(path: str | os.PathLike[str], world: int) -> Path:
    return Path(agreed(os.path.abspath(path), world))


def _kind(found: tuple[str, list[int]]) -> str:
    return f"{found[0]}{found[1]}"


def _unwritten(target: Path, error: BaseException) -> Diagnostic:
    return Diagnostic(
        "S631", f"the checkpoint `{target}` cannot be written",
        notes=(reason(error), "what was there before is as it was"),
        helps=("give another folder, one that every rank can write",),
    )  # fmt: skip


def _unread(target: Path, error: BaseException) -> Diagnostic:
    return Diagnostic(
        "S633", f"the checkpoint `{target}` cannot be read",
        notes=(reason(error), "the program is as it was"),
        helps=("name the folder that `program.save` wrote",),
    )  # fmt: skip


def _other_optimizer(note: str) -> Refusal:
    return Refusal(
        Diagnostic(
            "S636", "the checkpoint is of another optimizer", notes=(note,),
            helps=("build the program with the optimizer that was saved",
                   "or without one, to take over the model alone"),
        )
    )  # fmt: skip
