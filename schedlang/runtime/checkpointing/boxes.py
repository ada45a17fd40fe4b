"""Whole tensors in a folder as boxes, each written by one rank and read back in any other boxes."""

from __future__ import annotations

import io
import math
import os
import pickle
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.utils.serialization import config

from schedlang.runtime.checkpointing.holding import Block
from schedlang.runtime.checkpointing.index import (
    BY_NAME,
    DCPS,
    DTYPE_NAMES,
    DTYPES,
    MINE,
    Checksum,
    Entry,
    Index,
    Place,
    Stored,
    Unreadable,
    encoded,
)
from schedlang.runtime.storage.folder import sync

# The files are those of torch.distributed.checkpoint (DCP), so that its tools read them: in each,
# one box after the other as `torch.save` writes it, and an index of all.  Written and read by
# ourselves: every box has a checksum, every file the id of its save, and nothing that is read is
# run.


Path_ = tuple[str, ...]
HEAD = 64  # bytes before the first box of a file: the id of the save
SMALL, HELD = 1 << 19, 1 << 20  # bytes below which pieces are gathered, and so many together
_DCP_VERSION = "1.0.0"


@dataclass(frozen=True)
class Boxed:
    """A whole tensor by its part on this rank.

    path    its place in the nested dict that DCP's own tools make of a folder
    local   the part, plain; read into in place
    boxes   where its elements lie in the whole, of size `shape`
    speaks  does this rank write it?
    """

    path: Path_
    local: Tensor
    shape: tuple[int, ...]
    boxes: tuple[Block, ...]
    speaks: bool = True

    @property
    def key(self) -> str:
        """The name in the folder: the parts of the path, joined by dots."""
        return ".".join(self.path)


def whole(path: Path_, tensor: Tensor, *, speaks: bool = True) -> Boxed:
    """A tensor that every rank holds as it is."""
    zero, shape = (0,) * tensor.ndim, tuple(tensor.shape)
    boxes = (Block(zero, zero, shape),) if tensor.numel() else ()
    return Boxed(path, tensor, shape, boxes, speaks)


@contextmanager
def plain_torch() -> Iterator[None]:
    """No function modes: one that widens float32 would misread stored bytes."""
    with torch._C.DisableTorchFunction():
        yield


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros, so that padding is what it always is; on the CPU, whatever function mode is on."""
    with plain_torch():
        return torch.zeros(tuple(shape), dtype=dtype)


# -- writing ---------------------------------------------------------------------------------------


@dataclass
class _Written:
    """A rank's file: the entries of its boxes and values, and their paths."""

    tensors: dict[str, Entry]
    values: dict[str, Place]
    paths: dict[str, Path_]
    length: int = 0


def write(
    folder: Path, id_: str, rank: int, tensors: Sequence[Boxed], values: Mapping[Path_, Any]
) -> _Written:
    """Write what this rank speaks for into its file; `indexed` completes the folder.

    values  anything that `torch.load(weights_only=True)` reads; one rank gives each
    Raises OSError.
    """
    name, done = f"__{rank}_0.distcp", _Written({}, {}, {})
    fewer = config.patch({"save.compute_crc32": False})  # type: ignore[attr-defined]
    with (
        plain_torch(),
        fewer,
        (folder / name).open("xb", buffering=0) as file,
    ):
        writer = _Writer(file)
        writer.write(_head(id_, name))
        for key, path, value in ((".".join(path), path, value) for path, value in values.items()):
            done.values[key] = writer.item(name, value)
            done.paths[key] = path
        for tensor in (tensor for tensor in tensors if tensor.speaks):
            boxes = []
            for box in tensor.boxes:
                part = _packed(box.of_local(tensor.local))
                boxes.append(Stored(box.whole, box.size, writer.item(name, part)))
            if boxes:
                kind = DTYPE_NAMES[tensor.local.dtype]
                done.tensors[tensor.key] = Entry(tensor.shape, kind, tuple(boxes))
                done.paths[tensor.key] = tensor.path
        writer.flush()
        done.length = writer.at
        os.fsync(file.fileno())
    return done


def indexed(folder: Path, id_: str, everyone: Sequence[_Written]) -> None:
    """Write what says where everything is: our own index, and that of DCP.  Raises OSError."""
    kinds: dict[str, Entry] = {}
    stored: dict[str, list[Stored]] = {}
    values: dict[str, Place] = {}
    paths: dict[str, Path_] = {}
    for found in everyone:
        for key, entry in found.tensors.items():
            kinds.setdefault(key, entry)
            stored.setdefault(key, []).extend(entry.boxes)
        values.update(found.values)
        paths.update(found.paths)
    lengths = {f"__{rank}_0.distcp": found.length for rank, found in enumerate(everyone)}
    tensors = {key: replace(entry, boxes=tuple(stored[key])) for key, entry in kinds.items()}
    index = Index(id_, tensors, values, lengths)
    for name, data in ((DCPS, _for_dcp(index, paths)), (MINE, encoded(index))):
        with (folder / name).open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    sync(folder)


def _head(id_: str, name: str) -> bytes:
    return f"schedlang {id_} {name}\n".encode().ljust(HEAD, b"\0")


def _packed(part: Tensor) -> Tensor:
    """The part alone on the CPU: `torch.save` writes all of a tensor's memory."""
    part = part.detach().contiguous().cpu()
    alone = part.untyped_storage().nbytes() == part.numel() * part.element_size()
    return part if alone else part.clone()


class _Writer:
    """A file, written in pieces, and the checksum of each item in it.

    What is small waits for more: `torch.save` writes 38 pieces around each tensor.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.at = file, 0  # the end of all that was given
        self.held = memoryview(bytearray(HELD))
        self.used = self.summed = 0  # of what is held
        self.sum = Checksum()
        self.failure: OSError | None = None

    def item(self, name: str, value: Any) -> Place:
        """One box or value, as `torch.save` writes it; the checksum stands in for torch's own."""
        at, self.sum, self.summed = self.at, Checksum(), self.used
        try:
            torch.save(value, self)  # type: ignore[arg-type]
        except Exception:
            if self.failure is None:
                raise
        if self.failure is not None:  # torch tells of it in other words, or not at all
            raise self.failure
        self._add()
        return Place(name, at, self.at - at, self.sum.value)

    def write(self, data: Any) -> int:
        """All of it; of what is large a part at a time that its checksum has brought into cache."""
        view = memoryview(data).cast("B")
        self.at += len(view)
        if len(view) > SMALL or self.used + len(view) > HELD:
            self.flush()
        if len(view) <= SMALL:
            self.held[self.used : self.used + len(view)] = view
            self.used += len(view)
            return len(view)
        low = 0
        while low < len(view):
            part = view[low : low + self.sum.piece]
            self.sum.add(part)
            self._out(part)
            low += len(part)
        return len(view)

    def flush(self) -> None:
        """Write what is held."""
        self._add()
        self._out(self.held[: self.used])
        self.used = self.summed = 0

    def _add(self) -> None:
        self.sum.add(self.held[self.summed : self.used])
        self.summed = self.used

    def _out(self, view: memoryview) -> None:
        try:
            while len(view):
                view = view[self.file.write(view) :]
        except OSError as error:
            self.failure = self.failure or error
            raise


def _for_dcp(index: Index, paths: Mapping[str, Path_]) -> bytes:
    """The index by which torch's own tools read the folder."""
    held: dict[str, Any] = {key: BytesStorageMetadata() for key in index.values}
    where = {MetadataIndex(key): _info(place) for key, place in index.values.items()}
    for key, entry in index.tensors.items():
        chunks = [
            ChunkStorageMetadata(torch.Size(box.whole), torch.Size(box.size)) for box in entry.boxes
        ]
        properties = TensorProperties(DTYPES[entry.dtype])
        held[key] = TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
        for box in entry.boxes:
            where[MetadataIndex(key, torch.Size(box.whole))] = _info(box.place)
    meta = StorageMeta(save_id=index.id)
    return pickle.dumps(Metadata(held, dict(paths), where, meta, _DCP_VERSION))


def _info(place: Place) -> _StorageInfo:
    return _StorageInfo(place.file, place.at, place.length)


# -- reading ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Piece:
    """A part of a stored box, and the tensor that it goes into."""

    taken: tuple[slice, ...]
    into: Tensor


def read(folder: Path, index: Index, tensors: Sequence[Boxed]) -> None:
    """Read the parts of this rank, by itself.  Raises Unreadable or OSError.

    Every box that is read is whole and as it was written: its checksum, its dtype, its size.
    """
    wanted: dict[str, list[tuple[str, Entry, Stored, list[_Piece]]]] = defaultdict(list)
    for tensor in tensors:
        if not tensor.boxes:
            continue
        entry = index.tensors.get(tensor.key)
        if entry is None or entry.shape != tensor.shape:
            raise Unreadable(f"`{tensor.key}` of {list(tensor.shape)} is not in it")
        kind = DTYPE_NAMES[tensor.local.dtype]
        if entry.dtype != kind:
            raise Unreadable(f"`{tensor.key}` is {entry.dtype} in it, but should be {kind}")
        for box, pieces in _pieces(tensor, entry):
            wanted[box.place.file].append((tensor.key, entry, box, pieces))
    for name in sorted(wanted):
        with _opened(folder, index, name) as file:
            for key, entry, box, pieces in sorted(wanted[name], key=lambda one: one[2].place.at):
                value = _value(file, index, box.place, f"box {_shown(box)} of `{key}`")
                _check(value, entry, box, key)
                with plain_torch():
                    for piece in pieces:
                        piece.into.copy_(value[piece.taken])


def read_value(folder: Path, index: Index, path: Path_) -> Any:
    """Read one value, plain data, by itself.  Raises Unreadable or OSError."""
    key = ".".join(path)
    if (place := index.values.get(key)) is None:
        raise Unreadable(f"`{key}` is not in it")
    with _opened(folder, index, place.file) as file:
        return _value(file, index, place, f"`{key}`")


def check_files(folder: Path, index: Index) -> None:
    """Check that every file is there, of this save, and long enough; raise Unreadable or
    OSError."""
    ends: dict[str, int] = dict(index.lengths)
    places = [box.place for entry in index.tensors.values() for box in entry.boxes]
    for place in (*places, *index.values.values()):
        ends[place.file] = max(ends.get(place.file, 0), place.at + place.length)
    for name, end in ends.items():
        with _opened(folder, index, name) as file:
            if os.fstat(file.fileno()).st_size < end:
                raise Unreadable(f"`{name}` ends before its last box does")


def _pieces(tensor: Boxed, entry: Entry) -> list[tuple[Stored, list[_Piece]]]:
    """The stored boxes that overlap the wanted ones: together they are all of these."""
    found, got = [], 0
    for box in entry.boxes:
        pieces = []
        for want in tensor.boxes:
            low = [max(a, b) for a, b in zip(box.whole, want.whole)]
            high = [
                min(a + n, b + m) for a, n, b, m in zip(box.whole, box.size, want.whole, want.size)
            ]
            if all(a < b for a, b in zip(low, high)):
                taken = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, box.whole))
                mine = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, want.whole))
                pieces.append(_Piece(taken, want.of_local(tensor.local)[mine]))
                got += math.prod(b - a for a, b in zip(low, high))
        if pieces:
            found.append((box, pieces))
    if got != sum(math.prod(box.size) for box in tensor.boxes):
        raise Unreadable(f"parts of `{tensor.key}` are not in it")
    return found


@contextmanager
def _opened(folder: Path, index: Index, name: str) -> Iterator[IO[bytes]]:
    """A file of the folder, of the same save as the index."""
    path = folder / name
    if not path.is_file():  # a pipe would be waited for
        raise Unreadable(f"the file `{name}` is missing")
    with path.open("rb") as file:
        if index.id is not None and (head := file.read(HEAD)) != _head(index.id, name):
            other = head[10:26].decode(errors="replace")
            raise Unreadable(f"`{name}` is of save `{other}`, but the index is of `{index.id}`")
        yield file


def _value(file: IO[bytes], index: Index, place: Place, what: str) -> Any:
    """Read what `torch.save` wrote there, of plain data only."""
    file.seek(place.at)
    if os.fstat(file.fileno()).st_size < place.at + place.length:
        raise Unreadable(f"`{place.file}` ends before {what} does")
    data = file.read(place.length)
    if place.check is not None and BY_NAME[index.sums](data) != place.check:
        raise Unreadable(f"`{place.file}` is damaged: the checksum of {what} differs")
    try:
        with plain_torch():
            return torch.load(io.BytesIO(data), "cpu", weights_only=True, mmap=False)
    except Exception as error:  # whatever damaged bytes lead to
        line = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise Unreadable(f"`{place.file}` is damaged at {what}: {line}") from error


def _check(value: Any, entry: Entry, box: Stored, key: str) -> None:
    """Refuse what is not the box that the index tells of."""
    plain = type(value) is Tensor and value.layout == torch.strided and value.is_cpu
    if not plain or value.dtype != DTYPES[entry.dtype] or tuple(value.shape) != box.size:
        raise Unreadable(f"`{box.place.file}` does not hold box {_shown(box)} of `{key}`")


def _shown(box: Stored) -> str:
    return "[" + ", ".join(f"{at}:{at + n}" for at, n in zip(box.whole, box.size)) + "]"


def reason(error: BaseException) -> str:
    """A failure in one line."""
    text = str(error).strip().partition("\n")[0]
    named = isinstance(error, OSError | Unreadable)
    return text if named and text else f"{type(error).__name__}: {text}".rstrip(": ")
