"""Values of a model from safetensors files: each rank reads the slices that it holds.

`files_of` reads the heads of the files; `Files.fill` reads the values.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal, find_closest
from schedlang.runtime.checkpointing.index import DTYPES
from schedlang.runtime.initial.lazy_tensors import KINDS, Box, FileTensor, LazyTensor, read_part
from schedlang.runtime.initial.library_loading import NamedTensors, load_names, other_names
from schedlang.runtime.redistribution.sharding import TensorSlice

FLOATS = ("F64", "F32", "F16", "BF16")  # dtypes of safetensors; all are cast to the model's dtype
ONE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"


@dataclass(frozen=True)
class FileSlice:
    """A box of a tensor in a file, and its bytes."""

    file: str
    name: str
    box: Box
    bytes: int


@dataclass(frozen=True)
class _RecordingLeaf(FileTensor):
    """A tensor of a file that records the boxes that are read, and returns meta tensors."""

    boxes: list[FileSlice] = field(repr=False, compare=False)

    def read(self, box: Box) -> Tensor:
        """Record a box."""
        shape = [high - low for low, high in box]
        made = torch.empty(shape, dtype=DTYPES[KINDS.get(self.kind, "uint8")], device="meta")
        size = math.prod(shape) * made.element_size()
        self.boxes.append(FileSlice(self.file.name, self.name, box, size))
        return made


@dataclass(frozen=True)
class TargetPart:
    """A part of a tensor on this rank whose values are to be filled in.

    names     of the full tensor: several if it is tied
    original  the full tensor in the scheduled model, without values or with other ones
    part      the local tensor, written in place
    cells     by dim the runs of the part: start in the part, in the full tensor, length
    """

    names: tuple[str, ...]
    original: Tensor
    part: Tensor
    cells: TensorSlice

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the full tensor."""
        return tuple(self.original.shape)


@dataclass(frozen=True)
class WeightFiles:
    """Safetensors files that together hold the tensors of a model.

    leaves  the tensors of the files, by their names there
    model   the model, whose library may rename, split and fuse tensors
    config  the configuration in the folder
    """

    path: Path
    leaves: Mapping[str, FileTensor]
    model: nn.Module
    config: Mapping[str, Any]

    def digest(self) -> str:
        """Return a text that is equal for files with equal names, shapes and dtypes of tensors."""
        every = self.leaves.values()
        facts = sorted((leaf.file.name, leaf.name, leaf.kind, leaf.shape) for leaf in every)
        return hashlib.blake2b(repr(facts).encode(), digest_size=8).hexdigest()

    def fill(self, rooms: Sequence[TargetPart]) -> None:
        """Read all parts, slice by slice. Raises Refusal S643 before any is written."""
        self._check_model()
        every = load_names(self.leaves, self.model)
        found = [self._find(room, every) for room in rooms]
        try:
            with torch.no_grad():
                for room, one in zip(rooms, found, strict=True):
                    read_part(one, room.part, room.cells)
        finally:
            for leaf in self.leaves.values():
                leaf.open_.clear()

    def plan_reads(self, rooms: Sequence[TargetPart]) -> tuple[FileSlice, ...]:
        """Return the slices that `fill` would read, for parts on the meta device; raises alike."""
        boxes: list[FileSlice] = []
        noted = {
            name: _RecordingLeaf(leaf.file, leaf.name, leaf.kind, leaf.shape, leaf.open_, boxes)
            for name, leaf in self.leaves.items()
        }
        replace(self, leaves=noted).fill(rooms)
        return tuple(boxes)

    def _find(self, room: TargetPart, every: NamedTensors) -> LazyTensor:
        """Return the tensor of the files for a part, after checks of shape and dtype."""
        for name in other_names(room.names, self.model):
            if name in every.tensors:
                self._check(room, name, every.tensors[name])
                return every.tensors[name]
            if name in every.shapes:
                raise self._wrong_shape(name, every.shapes[name], room)
        nearest = find_closest(room.names[0], tuple(self.leaves))
        why = [line for name, line in every.errors.items() if name in room.names]
        raise self._unreadable(
            f"there is no `{room.names[0]}`",
            *(f"its library cannot convert the stored weights: {line}" for line in why),
            *((f"the nearest name there is `{nearest}`",) if nearest else ()),
            helps=(
                "give files with the names of the model, as `program.export` writes them",
                "or load them into the model as its library does, and build it with its values",
            ),
        )

    def _check(self, room: TargetPart, name: str, one: LazyTensor) -> None:
        if tuple(one.shape) != room.shape:
            raise self._wrong_shape(name, tuple(one.shape), room)
        for leaf in one.leaves:
            if (leaf.kind in FLOATS) != room.part.is_floating_point():
                kind = str(room.part.dtype).removeprefix("torch.")
                raise self._unreadable(
                    f"`{leaf.name}` is {leaf.kind}, in the model {kind}", *QUANTISED, helps=BEFORE
                )

    def _check_model(self) -> None:
        """Refuse files of a model of another type, and quantised ones, by their configuration."""
        if "quantization_config" in self.config:
            quantization = self.config["quantization_config"]
            method = quantization.get("quant_method") if isinstance(quantization, dict) else None
            method = f" by {method}" if method else ""
            raise self._unreadable(f"the values are quantised{method}", *QUANTISED, helps=BEFORE)
        ours = getattr(getattr(self.model, "config", None), "model_type", None)
        theirs = self.config.get("model_type")
        parts = [part for part in self.config.values() if isinstance(part, dict)]
        if ours and theirs and ours not in (theirs, *(part.get("model_type") for part in parts)):
            raise self._unreadable(
                f"they are of a model of type `{theirs}`, and this one is of type `{ours}`",
                helps=("give the weights of this model, or make the model of that type",),
            )

    def _wrong_shape(self, name: str, shape: tuple[int, ...], room: TargetPart) -> Refusal:
        return self._unreadable(f"`{name}` has the shape {shape}, in the model {room.shape}")

    def _unreadable(self, *notes: str, helps: Sequence[str] = ()) -> Refusal:
        return unreadable_weights(self.path, *notes, helps=helps)


QUANTISED = ("quantised values need their scales, which are separate tensors",)
BEFORE = ("give the weights from before quantisation",)


@dataclass(frozen=True)
class FileHeads:
    """The heads of files, and the configuration of their folder.

    also   other names of tensors -> their names in the files
    """

    leaves: Mapping[str, FileTensor]
    also: Mapping[str, str]
    config: Mapping[str, Any]


def files_of(path: str | os.PathLike[str], model: nn.Module) -> WeightFiles:
    """Return the files of a path for a model. Raises Refusal S643."""
    found = heads_of(Path(path))
    return WeightFiles(Path(path), found.leaves, model, found.config)


def is_weights(path: Path) -> bool:
    """Return whether a path is a safetensors file, or a folder of such."""
    where = _snapshot(path)
    return where.is_file() or any((where / mark).is_file() for mark in (ONE, INDEX))


def heads_of(path: Path) -> FileHeads:
    """Read the heads of the files of a path: one file, or a folder with one or with an index.

    In a folder of a hub's cache, the revision `main` is read. Raises Refusal S643 if there are no
    files, if a file of the index is missing, or if one cannot be read.
    """
    where = _snapshot(path)
    if where.is_dir():
        where = where / (INDEX if (where / INDEX).exists() else ONE)
    if not where.exists():
        raise unreadable_weights(
            path,
            f"there is no `{where.name}`" if path.is_dir() else "it does not exist",
            helps=(
                f"give a file of safetensors, or a folder with `{ONE}` or `{INDEX}`",
                "or a folder that `program.save` has written",
            ),
        )
    names: dict[str, set[str]] = {where.name: set()}
    if where.suffix == ".json":  # an index, also of a variant with another name
        names = {}
        for name, file in _read(path, where)["weight_map"].items():
            names.setdefault(Path(file).name, set()).add(name)
    for name in sorted(names):
        if not (where.parent / name).exists():
            raise unreadable_weights(
                path,
                f"the index names `{name}`, which is not there",
                helps=("fetch all files of the model",),
            )
    leaves: dict[str, FileTensor] = {}
    also: dict[str, str] = {}
    open_: dict[Path, Any] = {}
    for name, wanted in sorted(names.items()):
        found, others = _leaves(path, where.parent / name, open_)
        leaves |= {n: leaf for n, leaf in found.items() if not wanted or n in wanted}
        also |= others
    config = where.parent / CONFIG
    return FileHeads(leaves, also, _read(path, config) if config.is_file() else {})


def _snapshot(path: Path) -> Path:
    """Return the folder of the files in a hub's cache, which has one for each revision."""
    revision = path / "refs" / "main"
    return path / "snapshots" / revision.read_text().strip() if revision.is_file() else path


def _read(path: Path, file: Path) -> dict[str, Any]:
    """Read a JSON file that maps names."""
    try:
        found = json.loads(file.read_text())
        if not isinstance(found, dict) or file.name != CONFIG and "weight_map" not in found:
            raise ValueError("it does not map names to files")
    except (OSError, ValueError) as error:
        raise unreadable_weights(path, f"`{file.name}` cannot be read: {error}") from error
    return found


def _leaves(
    path: Path, file: Path, open_: dict[Path, Any]
) -> tuple[dict[str, FileTensor], dict[str, str]]:
    """Return the tensors of a file, of which only the head is read, and their other names."""
    from safetensors import safe_open

    try:
        with safe_open(file, "pt") as head:
            slices = {name: head.get_slice(name) for name in head.keys()}  # noqa: SIM118
            leaves = {
                name: FileTensor(file, name, one.get_dtype(), tuple(one.get_shape()), open_)
                for name, one in slices.items()
            }
            metadata = (head.metadata() or {}).items()
            return leaves, {other: name for other, name in metadata if name in leaves}
    except Exception as error:  # a file may have any contents
        raise unreadable_weights(path, f"`{file.name}` cannot be read: {error}") from error


def unreadable_weights(path: Path, *notes: str, helps: Sequence[str] = ()) -> Refusal:
    """Return the refusal of a path of weights."""
    title = f"cannot take the weights from `{path}`"
    return Refusal.of("S643", title, notes=notes, helps=tuple(helps))
