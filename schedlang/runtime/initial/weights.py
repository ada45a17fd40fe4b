"""Values of a model from files of safetensors: each rank reads the slices that it holds."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal, closest
from schedlang.runtime.redistribution.spread import Part

FLOATS = ("F64", "F32", "F16", "BF16")  # by their names there; any is cast to that of the model
ONE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class Room:
    """A part of a tensor on this rank, whose values are still to come.

    names     of the whole tensor: more than one where it is tied
    original  the whole in the model that was scheduled, without values or with others
    part      written in place
    cells     dim by dim the runs that it has: in the part, in the whole, how long
    """

    names: tuple[str, ...]
    original: Tensor
    part: Tensor
    cells: Part

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return tuple(self.original.shape)

    def take(self, whole: Any) -> None:
        """Copy this part out of the whole: a tensor, or what gives slices of one."""
        with torch.no_grad():
            for runs in itertools.product(*self.cells):
                into = tuple(slice(at, at + length) for at, _, length in runs)
                out_of = tuple(slice(start, start + length) for _, start, length in runs)
                self.part[into].copy_(whole[out_of])


@dataclass(frozen=True)
class Files:
    """Files of safetensors that together hold the tensors of a model.

    files   by the name of a tensor
    prefix  in front of a model's names that names in files may lack, or have in addition
    """

    path: Path
    files: Mapping[str, Path]
    prefix: str = ""

    def digest(self) -> str:
        """Equal where files of the same names hold tensors of the same names."""
        told = sorted((name, file.name, file.stat().st_size) for name, file in self.files.items())
        return hashlib.blake2b(repr(told).encode(), digest_size=8).hexdigest()

    def fill(self, rooms: Sequence[Room]) -> None:
        """Read all parts, slice by slice.  Raises Refusal S643 before any is written."""
        from safetensors import safe_open

        with ExitStack() as stack:
            open_ = {}
            for file in dict.fromkeys(self.files[self._name(room)] for room in rooms):
                try:
                    open_[file] = stack.enter_context(safe_open(file, "pt"))
                except Exception as error:  # a file of any contents
                    raise self._unread(f"`{file.name}` cannot be read: {error}") from error
            names = [self._name(room) for room in rooms]
            for room, name in zip(rooms, names):
                self._check(room, name, open_[self.files[name]])
            for room, name in zip(rooms, names):
                file = open_[self.files[name]]
                room.take(file.get_slice(name) if room.shape else file.get_tensor(name))

    def _name(self, room: Room) -> str:
        for name in self._names(room):
            if name in self.files:
                return name
        near = closest(room.names[0], tuple(self.files))
        raise self._unread(
            f"there is no `{room.names[0]}`",
            *((f"the nearest name there is `{near}`",) if near else ()),
            helps=(
                "give files with the names of the model, as `program.export` writes them",
                "or load them into the model as its library does, and build it with its values",
            ),
        )

    def _names(self, room: Room) -> Iterator[str]:
        yield from room.names
        if self.prefix:
            for name in room.names:
                yield f"{self.prefix}.{name}"
                if name.startswith(f"{self.prefix}."):
                    yield name.removeprefix(f"{self.prefix}.")

    def _check(self, room: Room, name: str, file: Any) -> None:
        whole = file.get_slice(name)
        shape, kind = tuple(whole.get_shape()), whole.get_dtype()
        if shape != room.shape:
            raise self._unread(f"`{name}` has the shape {shape}, in the model {room.shape}")
        if (kind in FLOATS) != room.part.is_floating_point():
            raise self._unread(
                f"`{name}` is {kind}, in the model {str(room.part.dtype).removeprefix('torch.')}",
                "quantised values mean something only with scales, which are other tensors",
                helps=("give the weights as they were before they were quantised",),
            )

    def _unread(self, *notes: str, helps: Sequence[str] = ()) -> Refusal:
        return unread(self.path, *notes, helps=helps)


def files_of(path: str | os.PathLike[str], model: nn.Module) -> Files:
    """Return the files of a path: one file, or a folder with one or with an index of several.

    Raises Refusal S643 where there are none, or where a file that the index names is missing.
    """
    from safetensors import safe_open

    where = Path(path)
    prefix = str(getattr(model, "base_model_prefix", "") or "")
    if where.is_dir():
        where = where / (INDEX if (where / INDEX).exists() else ONE)
    if not where.exists():
        raise unread(
            Path(path),
            f"there is no `{where.name}`" if Path(path).is_dir() else "it does not exist",
            helps=(
                f"give a file of safetensors, or a folder with `{ONE}` or `{INDEX}`",
                "or a folder that `program.save` has written",
            ),
        )
    try:
        if where.name.endswith(".json"):
            told = json.loads(where.read_text())["weight_map"]
            files = {str(name): where.parent / Path(file).name for name, file in told.items()}
        else:
            with safe_open(where, "pt") as file:
                files = dict.fromkeys(file.keys(), where)
    except Exception as error:  # a file of any contents
        raise unread(Path(path), f"`{where.name}` cannot be read: {error}") from error
    for file in sorted({*files.values()}):
        if not file.exists():
            raise unread(
                Path(path),
                f"the index names `{file.name}`, which is not there",
                helps=("fetch all files of the model",),
            )
    return Files(Path(path), files, prefix)


def unread(path: Path, *notes: str, helps: Sequence[str] = ()) -> Refusal:
    """Return the refusal of a path of weights."""
    title = f"cannot take the weights from `{path}`"
    return Refusal.of("S643", title, notes=notes, helps=tuple(helps))
