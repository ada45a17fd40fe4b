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
        shape = [stop - start for start, stop in box]
        value = torch.empty(shape, dtype=DTYPES[KINDS.get(self.kind, "uint8")], device="meta")
        size = math.prod(shape) * value.element_size()
        self.boxes.append(FileSlice(self.file.name, self.name, box, size))
        return value


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
        leaves = self.leaves.values()
        described = sorted((leaf.file.name, leaf.name, leaf.kind, leaf.shape) for leaf in leaves)
        return hashlib.blake2b(repr(described).encode(), digest_size=8).hexdigest()

    def fill(self, targets: Sequence[TargetPart]) -> None:
        """Read all parts, slice by slice. Raises Refusal S643 before any is written."""
        self._check_model()
        named = load_names(self.leaves, self.model)
        sources = [self._find(target, named) for target in targets]
        try:
            with torch.no_grad():
                for target, source in zip(targets, sources, strict=True):
                    read_part(source, target.part, target.cells)
        finally:
            for leaf in self.leaves.values():
                leaf.open_.clear()

    def plan_reads(self, targets: Sequence[TargetPart]) -> tuple[FileSlice, ...]:
        """Return the slices that `fill` would read, for parts on the meta device; raises alike."""
        boxes: list[FileSlice] = []
        recorded = {
            name: _RecordingLeaf(leaf.file, leaf.name, leaf.kind, leaf.shape, leaf.open_, boxes)
            for name, leaf in self.leaves.items()
        }
        replace(self, leaves=recorded).fill(targets)
        return tuple(boxes)

    def _find(self, target: TargetPart, named: NamedTensors) -> LazyTensor:
        """Return the tensor of the files for a part, after checks of shape and dtype."""
        for name in other_names(target.names, self.model):
            if name in named.tensors:
                self._check(target, name, named.tensors[name])
                return named.tensors[name]
            if name in named.shapes:
                raise self._wrong_shape(name, named.shapes[name], target)
        nearest = find_closest(target.names[0], tuple(self.leaves))
        errors = [line for name, line in named.errors.items() if name in target.names]
        raise self._unreadable(
            f"there is no `{target.names[0]}`",
            *(f"its library cannot convert the stored weights: {line}" for line in errors),
            *((f"the nearest name there is `{nearest}`",) if nearest else ()),
            helps=(
                "give files with the names of the model, as `program.export` writes them",
                "or load them into the model as its library does, and build it with its values",
            ),
        )

    def _check(self, target: TargetPart, name: str, tensor: LazyTensor) -> None:
        if tuple(tensor.shape) != target.shape:
            raise self._wrong_shape(name, tuple(tensor.shape), target)
        for leaf in tensor.leaves:
            if (leaf.kind in FLOATS) != target.part.is_floating_point():
                kind = str(target.part.dtype).removeprefix("torch.")
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
        kind = getattr(getattr(self.model, "config", None), "model_type", None)
        saved = self.config.get("model_type")
        parts = [part for part in self.config.values() if isinstance(part, dict)]
        if kind and saved and kind not in (saved, *(part.get("model_type") for part in parts)):
            raise self._unreadable(
                f"they are of a model of type `{saved}`, and this one is of type `{kind}`",
                helps=("give the weights of this model, or make the model of that type",),
            )

    def _wrong_shape(self, name: str, shape: tuple[int, ...], target: TargetPart) -> Refusal:
        return self._unreadable(f"`{name}` has the shape {shape}, in the model {target.shape}")

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
    heads = heads_of(Path(path))
    return WeightFiles(Path(path), heads.leaves, model, heads.config)


def is_weights(path: Path) -> bool:
    """Return whether a path is a safetensors file, or a folder of such."""
    folder = _snapshot(path)
    return folder.is_file() or any((folder / mark).is_file() for mark in (ONE, INDEX))


def heads_of(path: Path) -> FileHeads:
    """Read the heads of the files of a path: one file, or a folder with one or with an index.

    In a folder of a hub's cache, the revision `main` is read. Raises Refusal S643 if there are no
    files, if a file of the index is missing, or if one cannot be read.
    """
    location = _snapshot(path)
    if location.is_dir():
        location = location / (INDEX if (location / INDEX).exists() else ONE)
    if not location.exists():
        raise unreadable_weights(
            path,
            f"there is no `{location.name}`" if path.is_dir() else "it does not exist",
            helps=(
                f"give a file of safetensors, or a folder with `{ONE}` or `{INDEX}`",
                "or a folder that `program.save` has written",
            ),
        )
    names: dict[str, set[str]] = {location.name: set()}
    if location.suffix == ".json":  # an index, also of a variant with another name
        names = {}
        for name, file in _read(path, location)["weight_map"].items():
            names.setdefault(Path(file).name, set()).add(name)
    for name in sorted(names):
        if not (location.parent / name).exists():
            raise unreadable_weights(
                path,
                f"the index names `{name}`, which is not there",
                helps=("fetch all files of the model",),
            )
    leaves: dict[str, FileTensor] = {}
    aliases: dict[str, str] = {}
    open_: dict[Path, Any] = {}
    for name, wanted_names in sorted(names.items()):
        file_leaves, other_keys = _leaves(path, location.parent / name, open_)
        leaves |= {
            n: leaf for n, leaf in file_leaves.items() if not wanted_names or n in wanted_names
        }
        aliases |= other_keys
    config = location.parent / CONFIG
    return FileHeads(leaves, aliases, _read(path, config) if config.is_file() else {})


def _snapshot(path: Path) -> Path:
    """Return the folder of the files in a hub's cache, which has one for each revision."""
    revision = path / "refs" / "main"
    return path / "snapshots" / revision.read_text().strip() if revision.is_file() else path


def _read(path: Path, file: Path) -> dict[str, Any]:
    """Read a JSON file that maps names."""
    try:
        contents = json.loads(file.read_text())
        if not isinstance(contents, dict) or file.name != CONFIG and "weight_map" not in contents:
            raise ValueError("it does not map names to files")
    except (OSError, ValueError) as error:
        raise unreadable_weights(path, f"`{file.name}` cannot be read: {error}") from error
    return contents


def _leaves(
    path: Path, file: Path, open_: dict[Path, Any]
) -> tuple[dict[str, FileTensor], dict[str, str]]:
    """Return the tensors of a file, of which only the head is read, and their other names."""
    from safetensors import safe_open

    try:
        with safe_open(file, "pt") as head:
            slices = {name: head.get_slice(name) for name in head.keys()}  # noqa: SIM118
            leaves = {
                name: FileTensor(file, name, part.get_dtype(), tuple(part.get_shape()), open_)
                for name, part in slices.items()
            }
            metadata = (head.metadata() or {}).items()
            return leaves, {alias: name for alias, name in metadata if name in leaves}
    except Exception as error:  # a file may have any contents
        raise unreadable_weights(path, f"`{file.name}` cannot be read: {error}") from error


def unreadable_weights(path: Path, *notes: str, helps: Sequence[str] = ()) -> Refusal:
    """Return the refusal of a path of weights."""
    message = f"cannot take the weights from `{path}`"
    return Refusal.of("S643", message, notes=notes, helps=tuple(helps))
