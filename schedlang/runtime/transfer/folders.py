"""Folders as the first end of a transfer: each rank reads the boxes that it is to hold."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from schedlang.runtime.checkpointing import steps
from schedlang.runtime.checkpointing.archive import CONTENTS, checked
from schedlang.runtime.checkpointing.boxes import Boxed, plain_torch, read, read_value, zeros
from schedlang.runtime.checkpointing.export import MARKS
from schedlang.runtime.checkpointing.holding import Block, box_blocks
from schedlang.runtime.checkpointing.index import DTYPE_NAMES, Unreadable
from schedlang.runtime.redistribution.route import Lying
from schedlang.runtime.redistribution.spread import NOWHERE, everywhere
from schedlang.runtime.transfer.ends import Tensors, size_of

# the dtypes of safetensors by the names that checkpoints use
_NAMES = {
    **{"BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "I32": "int32"},
    **{"I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "C64": "complex64"},
    **{"U16": "uint16", "U32": "uint32", "U64": "uint64"},
}
Kinds = Mapping[str, tuple[tuple[int, ...], str]]  # of each tensor its whole shape and dtype


class Checkpoint:
    """A checkpoint that `program.save` wrote, or the last of a folder of them."""

    def __init__(self, folder: Path) -> None:
        self.folder, id_ = steps.to_load(folder)
        self.index = steps.checked_index(self.folder, id_)
        contents = checked(read_value(self.folder, self.index, CONTENTS))
        self.also = {o: names[0] for names in contents["ties"] for o in names[1:]}
        head = "model."
        self.kinds: Kinds = {
            key.removeprefix(head): (one.shape, one.dtype)
            for key, one in self.index.tensors.items()
            if key.startswith(head)
        }

    def read(self, wanted: Sequence[tuple[str, Tensor, tuple[Block, ...]]], most: int) -> None:
        """Read boxes of tensors into this rank's parts, when all of them have been looked at."""
        blank = [zeros(local.shape, local.dtype) for _, local, _ in wanted]
        boxed = [
            Boxed(("model", name), part, self.kinds[name][0], boxes)
            for part, (name, _, boxes) in zip(blank, wanted)
        ]
        read(self.folder, self.index, boxed)
        for part, (_, local, boxes) in zip(blank, wanted):
            for box in boxes:
                box.of_local(local).copy_(box.of_local(part))


class Safetensors:
    """Weights as `save_pretrained` and `program.export` write them, in one file or several."""

    def __init__(self, folder: Path, prefix: str) -> None:
        from safetensors import safe_open

        whole, listed = (folder / mark for mark in MARKS)
        names = {whole.name}
        if not whole.is_file():
            names = set(json.loads(listed.read_text())["weight_map"].values())
        self.also: dict[str, str] = {}
        self.kinds: dict[str, tuple[tuple[int, ...], str]] = {}
        self._files: dict[str, Any] = {}
        for name in sorted(names):
            file: Any = safe_open(folder / Path(name).name, "pt")
            for key in file.keys():  # noqa: SIM118  (no mapping)
                part = file.get_slice(key)
                if part.get_dtype() not in _NAMES:
                    raise Unreadable(f"`{key}` of `{name}` is of dtype `{part.get_dtype()}`")
                self.kinds[key] = tuple(part.get_shape()), _NAMES[part.get_dtype()]
                self._files[key] = file
            told = {k: v for k, v in (file.metadata() or {}).items() if v in self.kinds}
            self.also.update({k: v for k, v in told.items() if k not in self.kinds})
        if prefix:  # of a model that is a part of the one with a head, or has it as a part
            head = f"{prefix}."
            for key in list(self.kinds):
                other = key.removeprefix(head) if key.startswith(head) else head + key
                if other not in self.kinds:
                    self.also.setdefault(other, key)

    def read(self, wanted: Sequence[tuple[str, Tensor, tuple[Block, ...]]], most: int) -> None:
        """Read boxes of tensors into this rank's parts, some rows at a time."""
        for name, local, boxes in wanted:
            part = self._files[name].get_slice(name)
            for box in boxes:
                for rows in _rows(box, most // max(local.element_size(), 1)):
                    at = tuple(slice(o, o + n) for o, n in zip(rows.whole, rows.size))
                    found = part[at] if at else self._files[name].get_tensor(name)
                    rows.of_local(local).copy_(found)


def _rows(box: Block, most: int) -> Iterator[Block]:
    """Boxes of at most so many elements, or of one row."""
    if not box.size:
        yield box
        return
    each = 1
    for size in box.size[1:]:
        each *= size
    step = max(most // max(each, 1), 1)
    for at in range(0, box.size[0], step):
        rest = box.size[1:]
        yield Block(
            (box.local[0] + at, *box.local[1:]),
            (box.whole[0] + at, *box.whole[1:]),
            (min(step, box.size[0] - at), *rest),
        )


Folder = Checkpoint | Safetensors


def opened(path: Path, prefix: str) -> Folder:
    """Open what lies in a folder.  Raises Unreadable or OSError."""
    weights = any((path / mark).is_file() for mark in MARKS)
    return Safetensors(path, prefix) if weights else Checkpoint(path)


def tensors_of(folder: Folder, world: int) -> Tensors:
    """Return the tensors of a folder, which no rank holds yet."""
    return Tensors(
        {
            name: Lying(everywhere(shape, (), world), size_of(dtype))
            for name, (shape, dtype) in folder.kinds.items()
        },
        {name: dtype for name, (_, dtype) in folder.kinds.items()},
        folder.also,
    )


def fill(
    folder: Folder,
    names: Mapping[str, str],
    target: Tensors,
    local: Mapping[str, Tensor],
    rank: int,
    most: int,
) -> int:
    """Read all that a rank is to hold; the bytes of it."""
    wanted, count = [], 0
    for name, at in names.items():
        spread = target.lying[name].spread
        number = int(spread.of[rank])
        if number != NOWHERE and name in local:
            wanted.append((at, local[name], tuple(box_blocks(spread.parts[number]))))
            count += int(spread.sizes[number]) * target.lying[name].itemsize
            assert DTYPE_NAMES[local[name].dtype] == target.dtypes[name]
    with plain_torch(), torch.no_grad():
        folder.read(wanted, most)
    return count
