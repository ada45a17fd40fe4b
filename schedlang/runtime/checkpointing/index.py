"""The index of a checkpoint folder: each box of each tensor, its place in a file, its checksum.

Our own index, `schedlang.json`, is lines of JSON: a head with the id of the save, the kind of the
checksums, and the checksum of the rest; a table of all tensors; for each tensor a line with its
boxes, which is decoded when needed. Only this index is read; `.metadata` is for torch's own tools.
Older folders have only `.metadata`: a pickle, from which plain data is read and by which nothing is
executed.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import pickle
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from schedlang.runtime.redistribution.sharding import Array, SliceArray, TensorSlice, box_slice

# ---- The checksum of a stored box.
# The CRC-32 of sums of its words, as fast as memory is read.
#
# Bytes are read as 64-bit words, in rows of 2047; 64 rows at a time are added up, and the CRC is of
# these sums, of the bytes behind the last word, and of the length. So the CRC reads only a 64th of
# the bytes, and the rest is additions, which are faster than memory: for bytes that are copied
# next, the checksum costs almost nothing, without a thread of its own.
#
# What it detects: two words that are added are 16,376 bytes apart, or a multiple of that. So damage
# within fewer bytes, of one bit or many, also swapped words, always changes the sums. Swapped
# sectors of 512 bytes are never added at the same positions, because 64 rows are the shortest run
# of full sectors: their sums change, too, as those of zeroed and of shifted bytes do. The CRC
# detects changed sums always if they are within 32 bits, otherwise all but one of 2**32.


ROWS, WORDS = 64, 2047  # of a block: so many rows are added up, of so many words
_BLOCK = ROWS * WORDS
_WORD = np.dtype("<i8")
_NONE = np.zeros(0, _WORD)


class Checksum:
    """The checksum of bytes that come in pieces of any size."""

    def __init__(self) -> None:
        self.crc, self.length, self.rest = 0, 0, b""  # the rest: less than a word
        self.sums, self.at = _NONE, 0  # sums of the first `at` words of a block

    def add(self, data: Any) -> None:
        """Add bytes."""
        view = memoryview(data).cast("B")
        self.length += len(view)
        if self.rest:
            missing = _WORD.itemsize - len(self.rest)
            self.rest, view = self.rest + bytes(view[:missing]), view[missing:]
            if len(self.rest) < _WORD.itemsize:
                return
            self._words(np.frombuffer(self.rest, _WORD))
        whole_bytes = len(view) // _WORD.itemsize * _WORD.itemsize
        self.rest = bytes(view[whole_bytes:])
        self._words(np.frombuffer(view[:whole_bytes], _WORD))

    @property
    def value(self) -> int:
        """The checksum of all bytes so far."""
        crc = zlib.crc32(self.sums[: self.at].data, self.crc)
        return zlib.crc32(self.rest + self.length.to_bytes(8, "little"), crc)

    @property
    def piece(self) -> int:
        """The number of bytes up to the end of a block: the piece that is fastest to add next."""
        return (_BLOCK - self.at) * _WORD.itemsize - len(self.rest)

    def _words(self, words: Any) -> None:
        while len(words):
            column = self.at % WORDS
            if column or len(words) < WORDS:
                taken = min(WORDS - column, len(words))
                if not self.at:
                    self.sums = np.zeros(WORDS, _WORD)
                self.sums[column : column + taken] += words[:taken]
            else:
                taken = min(_BLOCK - self.at, len(words) // WORDS * WORDS)
                sums = np.add.reduce(words[:taken].reshape(-1, WORDS), 0)
                self.sums = self.sums + sums if self.at else sums
            self.at, words = self.at + taken, words[taken:]
            if self.at == _BLOCK:
                self.crc, self.at = zlib.crc32(self.sums.data, self.crc), 0


def checksum(data: bytes) -> int:
    """Return the checksum of bytes."""
    digest = Checksum()
    digest.add(data)
    return digest.value


def _sums_of_each_512(data: bytes) -> int:
    """Return the checksum of older folders, which misses swaps of words in 512 bytes."""
    whole_bytes = len(data) // 512 * 512
    words = np.frombuffer(data, np.int64, whole_bytes // 8).reshape(-1, 64)
    return zlib.crc32(data[whole_bytes:], zlib.crc32(np.einsum("ij->i", words).data))


CHECKSUM_NAME = "crc32 of sums of words 16376 bytes apart"
OLD_CHECKSUM_NAME = "crc32 of sums of each 512 bytes"  # of older folders, which do not name it
CHECKSUMS: dict[str, Callable[[bytes], int]] = {
    CHECKSUM_NAME: checksum,
    OLD_CHECKSUM_NAME: _sums_of_each_512,
}


# ---- The index.


INDEX_FILE, DCP_INDEX_FILE = "schedlang.json", ".metadata"
CONTENTS = ("schedlang",)  # path of the contents that are no tensors
VERSION, VERSIONS = 4, (2, 3, 4)  # of our own index: written, and readable
NO_SUM = -1  # the checksum of a box in folders without checksums
_FILE = re.compile(r"__\d+_\d+\.distcp")
_FILES = re.compile(rf"({_FILE.pattern}/)*")
_MOST = 1 << 62
_ID = re.compile(r"[0-9a-f]{16}")
DTYPES = {
    name: kind for name, kind in vars(torch).items() if isinstance(kind, torch.dtype)
}  # by the names that checkpoints use
DTYPE_NAMES = {kind: name for name, kind in DTYPES.items() if str(kind) == f"torch.{name}"}
# the names that an index of DCP may use; each is replaced by a placeholder
_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    ("builtins", "getattr"),  # of a member of an enum, in Python up to 3.11.3
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
    """Raised for data that are not a checkpoint, or not complete, or damaged."""


@dataclass(frozen=True)
class FilePlace:
    """Bytes in a file of the folder; `check`: their checksum, None in older folders."""

    file: str
    at: int
    length: int
    check: int | None


@dataclass(frozen=True)
class StoredBox:
    """A box of a tensor: its start in the full tensor, its size, its place in a file."""

    whole: tuple[int, ...]
    size: tuple[int, ...]
    place: FilePlace

    @property
    def part(self) -> TensorSlice:
        """The box as a part of the tensor."""
        return box_slice(self.whole, self.size)


@dataclass(frozen=True, eq=False)
class TensorEntry:
    """A full tensor, in boxes.

    found   for each box a row: its start in the full tensor, its size, the number of its file,
            offset,
            length and checksum there; or the undecoded line of the index
    files   the names of files, by number
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    found: Any
    files: Sequence[str]

    @cached_property
    def rows(self) -> Array:
        """The checked rows of all boxes. Raises Unreadable."""
        if not isinstance(self.found, bytes):
            return _check_rows(self, self.found)
        with _decoding(INDEX_FILE):
            return _check_rows(self, json.loads(self.found)["boxes"])

    @cached_property
    def parts(self) -> SliceArray:
        """The boxes as parts of the tensor."""
        dims = len(self.shape)
        return SliceArray.from_boxes(self.rows[:, :dims], self.rows[:, dims : 2 * dims])

    @cached_property
    def sizes(self) -> Array:
        """The bytes of each box."""
        return self.parts.sizes * DTYPES[self.dtype].itemsize

    def box(self, k: int) -> StoredBox:
        """Return one of the boxes."""
        row, dims = self.rows[k].tolist(), len(self.shape)
        file, offset, length, check = row[2 * dims :]
        file_place = FilePlace(self.files[file], offset, length, check if check != NO_SUM else None)
        return StoredBox(tuple(row[:dims]), tuple(row[dims : 2 * dims]), file_place)

    @property
    def boxes(self) -> list[StoredBox]:
        """All boxes."""
        return [self.box(k) for k in range(len(self.rows))]


def row_of(box: StoredBox, file: int) -> list[int]:
    """Return a box as a row of an entry."""
    file_place = box.place
    check = NO_SUM if file_place.check is None else file_place.check
    return [*box.whole, *box.size, file, file_place.at, file_place.length, check]


@dataclass(frozen=True)
class Index:
    """Contents of a folder, by key; `id` is that of the save, None in older folders."""

    id: str | None
    tensors: Mapping[str, TensorEntry]
    values: Mapping[str, FilePlace]
    lengths: Mapping[str, int] = field(default_factory=dict)  # of the files
    checksum: int = 0  # of the index itself, as it was read
    sums: str = CHECKSUM_NAME  # the kind of checksums of boxes: one of `CHECKSUMS`

    @property
    def fingerprint(self) -> str:
        """A text by which ranks check that they have read the same index."""
        return self.id or f"{self.checksum:08x}"


def encode_index(index: Index) -> bytes:
    """Return our own index as the bytes of its file."""
    row_lines = {
        key: json.dumps({"boxes": entry.rows.tolist()}, separators=(",", ":")).encode() + b"\n"
        for key, entry in index.tensors.items()
    }
    table = {
        "tensors": {
            key: {"shape": entry.shape, "dtype": entry.dtype, "bytes": len(row_lines[key])}
            for key, entry in index.tensors.items()
        },
        "values": {key: _place_row(file_place) for key, file_place in index.values.items()},
        "lengths": index.lengths,  # of all files, in the order of their numbers
    }
    table_line = json.dumps(table, separators=(",", ":")).encode() + b"\n"
    body = b"".join((table_line, *row_lines.values()))
    head = {
        "schedlang": VERSION,
        "id": index.id,
        "checksums": index.sums,
        "bytes": len(body),
        "crc32": zlib.crc32(body, zlib.crc32(index.sums.encode())),
    }
    return json.dumps(head).encode() + b"\n" + body


def read_index(folder: Path) -> Index:
    """Read the index of a folder. Raises Unreadable or OSError; nothing that is read is
    executed."""
    if not folder.is_dir():
        raise Unreadable("the folder does not exist")
    own_index, dcp_index = folder / INDEX_FILE, folder / DCP_INDEX_FILE
    if not own_index.is_file() and not dcp_index.is_file():
        raise Unreadable(f"it has neither `{INDEX_FILE}` nor `{DCP_INDEX_FILE}`")
    path = own_index if own_index.is_file() else dcp_index
    data = path.read_bytes()
    with _decoding(path.name):
        return _decode(data) if path is own_index else _read_dcp(data)


@contextmanager
def _decoding(name: str) -> Iterator[None]:
    """Raise any error within a block as damage of the file of this name."""
    try:
        yield
    except MemoryError:
        raise
    except Unreadable as error:
        raise Unreadable(f"`{name}` is damaged: {error}") from error
    except Exception as error:
        message = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise Unreadable(f"`{name}` is damaged: {message}") from error


def index_state(folder: Path) -> tuple[int, ...]:
    """Return a value that changes when the index of a folder is replaced."""
    path = next((p for p in (folder / INDEX_FILE, folder / DCP_INDEX_FILE) if p.is_file()), folder)
    stat = path.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


# -- our own ---------------------------------------------------------------------------------------


def _place_row(file_place: FilePlace) -> list[Any]:
    return [file_place.file, file_place.at, file_place.length, file_place.check]


def _decode(data: bytes) -> Index:
    line, _, body = data.partition(b"\n")
    head = json.loads(line)
    header = (head["schedlang"], head["bytes"], head["crc32"])
    if header[0] not in VERSIONS:
        raise Unreadable(f"its version is {header[0]}; this schedlang reads {VERSION}")
    names_sums = header[0] > 2  # older ones have one kind of checksums
    sums = head["checksums"] if names_sums else OLD_CHECKSUM_NAME
    if sums not in CHECKSUMS:
        raise Unreadable(f"its checksums are `{sums}`, which this schedlang does not know")
    start = zlib.crc32(sums.encode()) if names_sums else 0
    if header[1:] != (len(body), zlib.crc32(body, start)) or not _ID.fullmatch(head["id"]):
        raise Unreadable("its checksum does not match its contents")
    table_line, _, lines = body.partition(b"\n") if header[0] > 3 else (body, b"", b"")
    table = json.loads(table_line)
    lengths = dict(zip(table["lengths"], _sizes(list(table["lengths"].values()))))
    tensors, files = table["tensors"], {name: k for k, name in enumerate(lengths)}
    rows = _split_lines(tensors, lines) if header[0] > 3 else _old_boxes(tensors, files)
    values = {key: _place(row) for key, row in table["values"].items()}
    return Index(
        head["id"],
        _entries({key: (t["shape"], t["dtype"], rows[key]) for key, t in tensors.items()}, files),
        values,
        lengths,
        sums=sums,
    )


def _split_lines(tensors: Mapping[str, Any], lines: bytes) -> dict[str, bytes]:
    """Return the lines, one for each tensor."""
    ends = [0, *itertools.accumulate(_sizes([entry["bytes"] for entry in tensors.values()]))]
    if ends[-1] != len(lines):
        raise Unreadable("its lines are not those of its table")
    return {key: lines[start:end] for key, (start, end) in zip(tensors, itertools.pairwise(ends))}


def _old_boxes(tensors: Mapping[str, Any], files: dict[str, int]) -> dict[str, list[Any]]:
    """Return the boxes of older indexes, which were parts of the table."""
    return {
        key: [
            [*w, *s, files.setdefault(file, len(files)), offset, n, check]
            for w, s, (file, offset, n, check) in entry["boxes"]
            if len(w) == len(s) == len(entry["shape"]) or _raise_outside(key)
        ]
        for key, entry in tensors.items()
    }


def _place(row: Any) -> FilePlace:
    file, offset, length, check = row
    if not _is_file(file) or not isinstance(check, int):
        raise Unreadable("one of its places is not valid")
    offset, length = _sizes([offset, length])
    return FilePlace(file, offset, length, check)


def _sizes(values: Any) -> tuple[int, ...]:
    """Check that all values are integers from 0 on."""
    if [n for n in values if not (type(n) is int and 0 <= n < _MOST)]:  # one entry per rank
        raise Unreadable("one of its sizes is not valid")
    return tuple(values)


# -- checks: dtypes, boxes within their tensors, names of files ----------------------------------


def _entries(
    tables: Mapping[str, tuple[Any, str, Any]], files: Mapping[str, int]
) -> dict[str, TensorEntry]:
    """Return entries from shapes, dtypes, and boxes, which are rows or undecoded lines."""
    if not _FILES.fullmatch("".join([f"{name}/" for name in files])):
        odd = next((name for name in files if not _is_file(name)), "nothing")
        raise Unreadable(f"`{odd}` is not a file of a checkpoint")
    names, entries = tuple(files), {}
    for key, (shape, dtype, boxes) in tables.items():
        if dtype not in DTYPES:
            raise Unreadable(f"`{key}` has no dtype")
        entries[key] = TensorEntry(key, _sizes(shape), dtype, boxes, names)
        if not isinstance(boxes, bytes):
            entries[key].rows  # noqa: B018
    return entries


def _is_file(name: Any) -> bool:
    return isinstance(name, str) and _FILE.fullmatch(name) is not None


def _check_rows(entry: TensorEntry, boxes: Any) -> Array:
    """Return boxes as an array of rows, checked."""
    dims, rows = len(entry.shape), np.asarray(boxes if len(boxes) else np.zeros((0, 0), np.int64))
    rows = rows.reshape(len(rows), -1) if rows.size else rows.reshape(0, 2 * dims + 4)
    if rows.dtype != np.int64 or rows.shape[1] != 2 * dims + 4:
        raise Unreadable(f"a box of `{entry.key}` is not valid")
    limits = np.full(2 * dims + 4, _MOST)
    limits[2 * dims] = len(entry.files)
    if (rows[:, :-1] < 0).any() or (rows[:, -1] < NO_SUM).any() or (rows >= limits).any():
        raise Unreadable(f"a box of `{entry.key}` is not valid")
    if (rows[:, :dims] + rows[:, dims : 2 * dims] > entry.shape).any():
        _raise_outside(entry.key)
    return rows


def _raise_outside(key: str) -> NoReturn:
    raise Unreadable(f"a box of `{key}` is outside the tensor")


# -- the index of
# torch.distributed.checkpoint-------------------------------------------------------


class _PickledObject:
    """A placeholder for an object of a pickle, with the arguments of its constructor."""

    args: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _PlainUnpickler(pickle.Unpickler):
    """Reads a pickle into plain data only.

    Every class that the pickle names is replaced by a new class that only stores its arguments;
    names that no index of DCP has are refused.
    """

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.known: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return the placeholder class for a name."""
        if module == "torch" and name in DTYPES:
            return name
        if (module, name) not in _ALLOWED:
            raise Unreadable(f"it names `{module}.{name}`: an index may hold only plain data")
        return self.known.setdefault((module, name), type(name, (_PickledObject,), {}))


def _read_dcp(data: bytes) -> Index:
    metadata_fields = _fields(_PlainUnpickler(data).load(), "Metadata")
    places, files = {}, dict[str, int]()
    for key_object, info in metadata_fields["storage_data"].items():
        location, metadata = _fields(key_object, "MetadataIndex"), _fields(info, "_StorageInfo")
        if metadata.get("transform_descriptors"):
            raise Unreadable("its files are encoded")
        offset = location.get("offset")  # an unset field is not in the state
        corner = None if offset is None else _size(offset)
        start, length = _sizes([metadata["offset"], metadata["length"]])
        places[location["fqn"], corner] = FilePlace(
            str(metadata["relative_path"]), start, length, None
        )
        files.setdefault(str(metadata["relative_path"]), len(files))
    tensors, values = {}, {}
    for key, stored_kind in metadata_fields["state_dict_metadata"].items():
        if type(stored_kind).__name__ == "BytesStorageMetadata":
            values[key] = places[key, None]
            continue
        metadata = _fields(stored_kind, "TensorStorageMetadata")
        boxes = [_fields(box, "ChunkStorageMetadata") for box in metadata["chunks"]]
        spans = [(_size(box["offsets"]), _size(box["sizes"])) for box in boxes]
        stored = [StoredBox(w, s, places[key, w]) for w, s in spans if math.prod(s)]
        shape = _size(metadata["size"])
        if any(len(box.whole) != len(shape) or len(box.size) != len(shape) for box in stored):
            _raise_outside(key)
        rows = [row_of(box, files[box.place.file]) for box in stored]
        tensors[key] = shape, metadata["properties"].state[0], rows
    return Index(None, _entries(tensors, files), values, checksum=zlib.crc32(data))


def _fields(pickled: Any, name: str) -> dict[str, Any]:
    """Return the fields of an object that was of this class."""
    if not isinstance(pickled, _PickledObject) or type(pickled).__name__ != name:
        raise Unreadable(f"a {name} is expected, and something else found")
    fields: dict[str, Any] = pickled.state or {}
    return fields


def _size(pickled: Any) -> tuple[int, ...]:
    return _sizes(pickled.args[0] if pickled.args else ())
