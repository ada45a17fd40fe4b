"""The index of a checkpoint's folder: each box of each tensor, its place in a file, its checksum.

Our own index is JSON, `schedlang.json`: a line with the id of the save, the name of the boxes'
checksums, and the checksum of what follows; then that.  It alone is read; `.metadata` beside it is
for torch's own tools.  Older folders have only that one: a pickle, from which plain data is taken
and by which nothing is run.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from schedlang.runtime.redistribution.spread import Part, box_part

# ---- The checksum of a stored box.
# The CRC-32 of sums of its words, as quick as memory is read.
#
# Bytes are taken as 64-bit words, in rows of 2047; the rows of 64 at a time are added up, and the
# CRC is of these sums, of the bytes behind the last word, and of the length.  So a CRC is
# computed of a 64th of the bytes only, and the rest is additions, which a processor makes of what
# lies in its cache more quickly than it can be fetched: computed of bytes that are copied next,
# it costs next to nothing, without a thread of its own.
#
# What it finds: two words that are added lie 16,376 bytes apart, or a multiple of that.  So
# damage of less than that, one bit or many, words that have changed places among them, changes
# sums for certain, whatever the other bytes are.  And sectors of 512 bytes that have changed
# places were never added up in the same places, since 64 rows are the first that are whole
# sectors long: their sums change, too, as those of zeroed and of shifted bytes do.  The CRC tells
# changed sums for certain where they are 32 bits or fewer in one place, of others all but one of
# 2**32.


ROWS, WORDS = 64, 2047  # of a block: so many rows are added up, of so many words
_BLOCK = ROWS * WORDS
_WORD = np.dtype("<i8")
_NONE = np.zeros(0, _WORD)


class Checksum:
    """The checksum of bytes that come in pieces, however they are cut."""

    def __init__(self) -> None:
        self.crc, self.length, self.rest = 0, 0, b""  # the rest is less than a word
        self.sums, self.at = _NONE, 0  # of so many words of a block

    def add(self, data: Any) -> None:
        """More bytes."""
        view = memoryview(data).cast("B")
        self.length += len(view)
        if self.rest:
            missing = _WORD.itemsize - len(self.rest)
            self.rest, view = self.rest + bytes(view[:missing]), view[missing:]
            if len(self.rest) < _WORD.itemsize:
                return
            self._words(np.frombuffer(self.rest, _WORD))
        whole = len(view) // _WORD.itemsize * _WORD.itemsize
        self.rest = bytes(view[whole:])
        self._words(np.frombuffer(view[:whole], _WORD))

    @property
    def value(self) -> int:
        """The checksum of all bytes so far."""
        crc = zlib.crc32(self.sums[: self.at].data, self.crc)
        return zlib.crc32(self.rest + self.length.to_bytes(8, "little"), crc)

    @property
    def piece(self) -> int:
        """The number of bytes up to the end of a block: the piece that is quickest to add next."""
        return (_BLOCK - self.at) * _WORD.itemsize - len(self.rest)

    def _words(self, words: Any) -> None:
        while len(words):
            column = self.at % WORDS
            if column or len(words) < WORDS:
                took = min(WORDS - column, len(words))
                if not self.at:
                    self.sums = np.zeros(WORDS, _WORD)
                self.sums[column : column + took] += words[:took]
            else:
                took = min(_BLOCK - self.at, len(words) // WORDS * WORDS)
                sums = np.add.reduce(words[:took].reshape(-1, WORDS), 0)
                self.sums = self.sums + sums if self.at else sums
            self.at, words = self.at + took, words[took:]
            if self.at == _BLOCK:
                self.crc, self.at = zlib.crc32(self.sums.data, self.crc), 0


def checksum(data: bytes) -> int:
    """The checksum of these bytes."""
    made = Checksum()
    made.add(data)
    return made.value


def _sums_of_each_512(data: bytes) -> int:
    """The checksum of folders of before: words of the same 512 bytes may change places unseen."""
    whole = len(data) // 512 * 512
    words = np.frombuffer(data, np.int64, whole // 8).reshape(-1, 64)
    return zlib.crc32(data[whole:], zlib.crc32(np.einsum("ij->i", words).data))


NAME = "crc32 of sums of words 16376 bytes apart"
BEFORE = "crc32 of sums of each 512 bytes"  # of folders that name none
BY_NAME: dict[str, Callable[[bytes], int]] = {NAME: checksum, BEFORE: _sums_of_each_512}


# ---- The index.


MINE, DCPS = "schedlang.json", ".metadata"
VERSION, VERSIONS = 3, (2, 3)  # of our own index: as it is written, and as it is read
_FILE = re.compile(r"__\d+_\d+\.distcp")
_ID = re.compile(r"[0-9a-f]{16}")
DTYPES = {
    name: kind for name, kind in vars(torch).items() if isinstance(kind, torch.dtype)
}  # by the names that checkpoints use
DTYPE_NAMES = {kind: name for name, kind in DTYPES.items() if str(kind) == f"torch.{name}"}
# what an index of DCP is made of; stands for whatever has such a name, and does nothing
_METADATA = "torch.distributed.checkpoint.metadata"
_PLAIN = {
    (_METADATA, "Metadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
}


class Unreadable(Exception):
    """Raised where something is not a checkpoint, or not all of it, or not as it was written."""


@dataclass(frozen=True)
class Place:
    """Bytes in a file of the folder; `check`: their checksum, None in folders of before."""

    file: str
    at: int
    length: int
    check: int | None


@dataclass(frozen=True)
class Stored:
    """A box of a tensor: where it lies in the whole, its size, its bytes."""

    whole: tuple[int, ...]
    size: tuple[int, ...]
    place: Place

    @property
    def part(self) -> Part:
        """The part of the tensor that it is."""
        return box_part(self.whole, self.size)


@dataclass(frozen=True)
class Entry:
    """A whole tensor, in boxes."""

    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[Stored, ...]


@dataclass(frozen=True)
class Index:
    """Contents of a folder, by key; `id` is that of the save, None in folders of before."""

    id: str | None
    tensors: Mapping[str, Entry]
    values: Mapping[str, Place]
    lengths: Mapping[str, int] = field(default_factory=dict)  # of the files
    checksum: int = 0  # of the index itself, as it was read
    sums: str = NAME  # what the checksums of boxes are: one of `BY_NAME`

    @property
    def mark(self) -> str:
        """The mark by which ranks see that they have read the same index."""
        return self.id or f"{self.checksum:08x}"

    @property
    def files(self) -> set[str]:
        """The names of all files."""
        boxes = (box.place for entry in self.tensors.values() for box in entry.boxes)
        return {place.file for place in (*boxes, *self.values.values())}


def encoded(index: Index) -> bytes:
    """Our own index as the bytes of its file."""
    body = json.dumps(
        {
            "tensors": {
                key: {
                    "shape": entry.shape,
                    "dtype": entry.dtype,
                    "boxes": [[box.whole, box.size, _row(box.place)] for box in entry.boxes],
                }
                for key, entry in index.tensors.items()
            },
            "values": {key: _row(place) for key, place in index.values.items()},
            "lengths": index.lengths,
        },
        separators=(",", ":"),
    ).encode()
    head = {
        "schedlang": VERSION,
        "id": index.id,
        "checksums": index.sums,
        "bytes": len(body),
        "crc32": zlib.crc32(body, zlib.crc32(index.sums.encode())),
    }
    return json.dumps(head).encode() + b"\n" + body


def read_index(folder: Path) -> Index:
    """Read the index of a folder.  Raises Unreadable or OSError; nothing that is read is run."""
    if not folder.is_dir():
        raise Unreadable("the folder does not exist")
    mine, dcps = folder / MINE, folder / DCPS
    if not mine.is_file() and not dcps.is_file():
        raise Unreadable(f"it has neither `{MINE}` nor `{DCPS}`")
    path = mine if mine.is_file() else dcps
    data = path.read_bytes()
    try:
        return _decoded(data) if path is mine else _of_dcp(data)
    except Unreadable as error:
        raise Unreadable(f"`{path.name}` is damaged: {error}") from error
    except Exception as error:  # whatever damaged bytes lead to
        what = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise Unreadable(f"`{path.name}` is damaged: {what}") from error


def state_of(folder: Path) -> tuple[int, ...]:
    """Return a value that changes when the index of a folder is replaced."""
    path = next((p for p in (folder / MINE, folder / DCPS) if p.is_file()), folder)
    seen = path.stat()
    return seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns


# -- our own ---------------------------------------------------------------------------------------


def _row(place: Place) -> list[Any]:
    return [place.file, place.at, place.length, place.check]


def _decoded(data: bytes) -> Index:
    line, _, body = data.partition(b"\n")
    head = json.loads(line)
    told = (head["schedlang"], head["bytes"], head["crc32"])
    if told[0] not in VERSIONS:
        raise Unreadable(f"its version is {told[0]}; this schedlang reads {VERSION}")
    named = told[0] > 2  # before, there was one kind of checksums
    sums = head["checksums"] if named else BEFORE
    if sums not in BY_NAME:
        raise Unreadable(f"its checksums are `{sums}`, which this schedlang does not know")
    start = zlib.crc32(sums.encode()) if named else 0
    if told[1:] != (len(body), zlib.crc32(body, start)) or not _ID.fullmatch(head["id"]):
        raise Unreadable("its checksum does not match its contents")
    found = json.loads(body)
    index = Index(
        head["id"],
        {
            key: Entry(
                _sizes(entry["shape"]),
                entry["dtype"],
                tuple(Stored(_sizes(w), _sizes(s), _place(p)) for w, s, p in entry["boxes"]),
            )
            for key, entry in found["tensors"].items()
        },
        {key: _place(row) for key, row in found["values"].items()},
        dict(zip(found["lengths"], _sizes(list(found["lengths"].values())))),
        sums=sums,
    )
    _check(index)
    return index


def _place(row: Any) -> Place:
    file, at, length, check = row
    if not isinstance(file, str) or not isinstance(check, int):
        raise Unreadable("one of its places is not valid")
    at, length = _sizes([at, length])
    return Place(file, at, length, check)


def _sizes(found: Any) -> tuple[int, ...]:
    """Whole numbers from 0 on."""
    if [n for n in found if not (type(n) is int and 0 <= n < 1 << 62)]:  # as long as the world
        raise Unreadable("one of its sizes is not valid")
    return tuple(found)


def _check(index: Index) -> None:
    """Refuse what no save writes: another dtype, a box beside its tensor, a file of elsewhere."""
    for key, entry in index.tensors.items():
        dims = len(entry.shape)
        if entry.dtype not in DTYPES:
            raise Unreadable(f"`{key}` has no dtype")
        for box in entry.boxes:
            ends = [at + n for at, n in zip(box.whole, box.size)]
            inside = all(end <= size for end, size in zip(ends, entry.shape))
            if not len(box.whole) == len(box.size) == dims or not inside:
                raise Unreadable(f"a box of `{key}` is outside the tensor")
    for name in index.files:
        if not _FILE.fullmatch(name):
            raise Unreadable(f"`{name}` is not a file of a checkpoint")


# -- that of torch.distributed.checkpoint ----------------------------------------------------------


class _Told:
    """Stands for an object of a pickle: what it would have been made of."""

    args: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Plain(pickle.Unpickler):
    """Reads a pickle without making anything of it but plain data.

    Every class that it names becomes a class of our own that only notes what it is given, made
    for this one reading; names that no index of DCP has are refused.
    """

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.known: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        """The class that stands for a name."""
        if module == "torch" and name in DTYPES:
            return name
        if (module, name) not in _PLAIN:
            raise Unreadable(f"it names `{module}.{name}`: an index may hold only plain data")
        return self.known.setdefault((module, name), type(name, (_Told,), {}))


def _of_dcp(data: bytes) -> Index:
    found = _fields(_Plain(data).load(), "Metadata")
    places = {}
    for at, info in found["storage_data"].items():
        where, told = _fields(at, "MetadataIndex"), _fields(info, "_StorageInfo")
        if told.get("transform_descriptors"):
            raise Unreadable("its files are encoded")
        offset = where.get("offset")  # a field that was never set is not in its state
        whole = None if offset is None else _size(offset)
        start, length = _sizes([told["offset"], told["length"]])
        places[where["fqn"], whole] = Place(str(told["relative_path"]), start, length, None)
    tensors, values = {}, {}
    for key, kept in found["state_dict_metadata"].items():
        if type(kept).__name__ == "BytesStorageMetadata":
            values[key] = places[key, None]
            continue
        told = _fields(kept, "TensorStorageMetadata")
        boxes = [_fields(box, "ChunkStorageMetadata") for box in told["chunks"]]
        spans = [(_size(box["offsets"]), _size(box["sizes"])) for box in boxes]
        tensors[key] = Entry(
            _size(told["size"]),
            told["properties"].state[0],
            tuple(Stored(w, s, places[key, w]) for w, s in spans if math.prod(s)),
        )
    index = Index(None, tensors, values, checksum=zlib.crc32(data))
    _check(index)
    return index


def _fields(one: Any, name: str) -> dict[str, Any]:
    """The fields of an object that was of this class."""
    if not isinstance(one, _Told) or type(one).__name__ != name:
        raise Unreadable(f"a {name} is expected, and something else found")
    fields: dict[str, Any] = one.state or {}
    return fields


def _size(one: Any) -> tuple[int, ...]:
    return _sizes(one.args[0] if one.args else ())
