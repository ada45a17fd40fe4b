"""Folders as the first end of a transfer: ranks read what they are to hold, and share cut boxes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal
from schedlang.runtime.checkpointing import steps
from schedlang.runtime.checkpointing.archive import CONTENTS, checked
from schedlang.runtime.checkpointing.boxes import (
    Boxed,
    plain_torch,
    read_together,
    read_value,
    zeros,
)
from schedlang.runtime.checkpointing.export import MARKS
from schedlang.runtime.checkpointing.index import Unreadable
from schedlang.runtime.comm import world as comm
from schedlang.runtime.redistribution.route import Lying
from schedlang.runtime.redistribution.spread import (
    NOWHERE,
    Part,
    Spread,
    box_part,
    copied,
    everywhere,
    overlaps,
)
from schedlang.runtime.storage.folder import together
from schedlang.runtime.transfer.ends import Tensors, size_of

# the dtypes of safetensors by the names that checkpoints use
_NAMES = {
    **{"BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "I32": "int32"},
    **{"I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "C64": "complex64"},
    **{"U16": "uint16", "U32": "uint32", "U64": "uint64"},
}
Kinds = Mapping[str, tuple[tuple[int, ...], str]]  # of each tensor its whole shape and dtype
Wanted = tuple[str, Tensor, Part]  # a tensor of the folder, this rank's part, where that lies in it
Told = Callable[[BaseException], Diagnostic]


class Checkpoint:
    """A checkpoint that `program.save` wrote, the last of a folder of them, or a folder of DCP's.

    What others save by torch.distributed.checkpoint has the names that they gave it; beside an
    optimizer's state those below `model` are meant.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, id_ = steps.to_load(folder)
        self.index = steps.checked_index(self.folder, id_)
        self.also: dict[str, str] = {}
        words = {key.partition(".")[0] for key in self.index.tensors}
        self.head = "model." if "model" in words and words & {"optim", "optimizer"} else ""
        if ".".join(CONTENTS) in self.index.values:
            contents = checked(read_value(self.folder, self.index, CONTENTS))
            self.also = {o: names[0] for names in contents["ties"] for o in names[1:]}
            self.head = "model."
        self.kinds: Kinds = {
            key.removeprefix(self.head): (one.shape, one.dtype)
            for key, one in self.index.tensors.items()
            if key.startswith(self.head)
        }

    def read(self, wanted: Sequence[Wanted], lies: Mapping[str, Spread], told: Told) -> None:
        """Read this rank's parts, when those of all ranks have been looked at."""
        if len(comm.distinct(self.index.mark)) > 1:
            raise Refusal(told(Unreadable("the ranks have read different checkpoints")))
        boxed = [
            Boxed((self.head + name,), zeros(local.shape, local.dtype), self.kinds[name][0], part)
            for name, local, part in wanted
        ]
        keyed = {self.head + name: spread for name, spread in lies.items()}
        read_together(self.folder, self.index, boxed, keyed, told)
        for one, (_, local, part) in zip(boxed, wanted):
            copied(one.local, part, local, part)


class Safetensors:
    """Weights as `save_pretrained` and `program.export` write them, in one file or several."""

    def __init__(self, folder: Path, prefix: str, most: int) -> None:
        from safetensors import safe_open

        self.most = most  # bytes that are read at once
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

    def read(self, wanted: Sequence[Wanted], lies: Mapping[str, Spread], told: Told) -> None:
        """Read this rank's parts, some rows at a time."""
        together(lambda: self._read(wanted), told, (Exception,))

    def _read(self, wanted: Sequence[Wanted]) -> None:
        for name, local, part in wanted:
            stored = self._files[name].get_slice(name)
            whole = stored.get_shape()
            rows = max(self.most // max(math.prod(whole[1:]) * local.element_size(), 1), 1)
            for at in range(0, whole[0], rows) if whole else (0,):
                corner = [at, *(0 for _ in whole[1:])] if whole else []
                size = [min(rows, whole[0] - at), *whole[1:]] if whole else []
                for box in overlaps(box_part(corner, size), part):
                    low = [o + c for o, c in zip(box.here, corner)]
                    span = tuple(slice(o, o + n) for o, n in zip(low, box.size))
                    found = stored[span] if span else self._files[name].get_tensor(name)
                    box.view(local, box.there).copy_(found)


Folder = Checkpoint | Safetensors


def opened(path: Path, prefix: str, most: int) -> Folder:
    """Open what lies in a folder.  Raises Unreadable or OSError."""
    weights = any((path / mark).is_file() for mark in MARKS)
    return Safetensors(path, prefix, most) if weights else Checkpoint(path)


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
    told: Told,
) -> int:
    """Read all that a rank is to hold; the bytes of it.  All ranks together."""
    size, rest = 0, dict(names)
    while (
        rest
    ):  # a tensor of the folder that has several names here is read for one after the other
        some = {at: name for name, at in reversed(rest.items())}
        rest = {name: at for name, at in rest.items() if some[at] != name}
        lies = {at: target.lying[name].spread for at, name in some.items()}
        wanted = []
        for at, name in some.items():
            number = int(lies[at].of[rank])
            if number != NOWHERE and name in local:
                wanted.append((at, local[name], lies[at].parts[number]))
                size += int(lies[at].sizes[number]) * target.lying[name].itemsize
        with plain_torch(), torch.no_grad():
            folder.read(wanted, lies, told)
    return size
