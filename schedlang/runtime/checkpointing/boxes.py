"""Full tensors in a folder as boxes, each written by one rank and read back in any other boxes.

`write_file` and `write_index` write a folder; `read_parts` and `read_together` read parts of it.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import numpy as np
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

from schedlang.diagnostics.diagnostic import Diagnostic
from schedlang.runtime.checkpointing.index import (
    CHECKSUMS,
    DCP_INDEX_FILE,
    DTYPE_NAMES,
    DTYPES,
    INDEX_FILE,
    Checksum,
    FilePlace,
    Index,
    StoredBox,
    TensorEntry,
    Unreadable,
    encode_index,
    row_of,
)
from schedlang.runtime.comm import world
from schedlang.runtime.device import HOST
from schedlang.runtime.redistribution.execution import redistribute_tensors
from schedlang.runtime.redistribution.route import TensorLayout
from schedlang.runtime.redistribution.sharding import (
    NOWHERE,
    Array,
    Sharding,
    SliceArray,
    TensorSlice,
    copy_overlap,
    count_elements,
    full_slice,
    overlap_sizes,
    overlaps,
)
from schedlang.runtime.storage.folder import run_on_all_ranks, sync

# The files have the format of torch.distributed.checkpoint (DCP), so that its tools can read them:
# in each file one box after the other as `torch.save` writes it, and an index of all. They are
# written and read by our own code: every box has a checksum, every file the id of its save, and
# nothing that is read is executed.


Path_ = tuple[str, ...]
HEAD = 64  # bytes before the first box of a file: the id of the save
SMALL, HELD = 1 << 19, 1 << 20  # bytes: pieces up to SMALL are buffered, up to HELD together
_DCP_VERSION = "1.0.0"


@dataclass(frozen=True)
class BoxedTensor:
    """A full tensor by its part on this rank.

    path     its place in the nested dict that DCP's own tools make of a folder
    local    the part, a plain tensor; reads write into it
    shape    of the full tensor; `part`: where the elements of `local` are in it
    primary  whether this rank writes the part
    """

    path: Path_
    local: Tensor
    shape: tuple[int, ...]
    part: TensorSlice
    primary: bool = True

    @property
    def key(self) -> str:
        """The name in the folder: the path, joined by dots."""
        return ".".join(self.path)


def replicated_tensor(path: Path_, tensor: Tensor, *, primary: bool = True) -> BoxedTensor:
    """Return a tensor that every rank holds in full."""
    shape = tuple(tensor.shape)
    return BoxedTensor(path, tensor, shape, full_slice(shape), primary)


@contextmanager
def without_function_modes() -> Iterator[None]:
    """Disable function modes: one that upcasts float32 would misread stored bytes."""
    with torch._C.DisableTorchFunction():
        yield


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return zeros on the CPU, whatever function mode is active; so padding is always zero."""
    with without_function_modes():
        return torch.zeros(tuple(shape), dtype=dtype)


# -- writing ---------------------------------------------------------------------------------------


@dataclass
class _WrittenFile:
    """The file of a rank: the entries of its boxes and values, and their paths."""

    tensors: dict[str, TensorEntry]
    values: dict[str, FilePlace]
    paths: dict[str, Path_]
    length: int = 0


def write_file(
    folder: Path, id_: str, rank: int, tensors: Sequence[BoxedTensor], values: Mapping[Path_, Any]
) -> _WrittenFile:
    """Write the boxes and values of this rank into its file; `write_index` completes the folder.

    values  anything that `torch.load(weights_only=True)` reads; each is written by one rank

    Raises OSError.
    """
    name, done = f"__{rank}_0.distcp", _WrittenFile({}, {}, {})
    fewer = config.patch({"save.compute_crc32": False})  # type: ignore[attr-defined]
    with (
        without_function_modes(),
        fewer,
        (folder / name).open("xb", buffering=0) as file,
    ):
        writer = _Writer(file)
        writer.write(_head(id_, name))
        for key, path, value in ((".".join(path), path, value) for path, value in values.items()):
            done.values[key] = writer.item(name, value)
            done.paths[key] = path
        for tensor in (tensor for tensor in tensors if tensor.primary):
            rows = []
            for box in overlaps(tensor.part, full_slice(tensor.shape)):
                part = _on_host(box.view(tensor.local, box.here))
                rows.append(row_of(StoredBox(box.there, box.size, writer.item(name, part)), 0))
            if rows:
                key, kind = tensor.key, DTYPE_NAMES[tensor.local.dtype]
                done.tensors[key] = TensorEntry(key, tensor.shape, kind, np.array(rows), (name,))
                done.paths[key] = tensor.path
        writer.flush()
        done.length = writer.at
        os.fsync(file.fileno())
    return done


def write_index(folder: Path, id_: str, everyone: Sequence[_WrittenFile]) -> None:
    """Write the two indexes of the folder: our own, and that of DCP. Raises OSError."""
    kinds: dict[str, TensorEntry] = {}
    rows: dict[str, list[Array]] = {}
    values: dict[str, FilePlace] = {}
    paths: dict[str, Path_] = {}
    for rank, found in enumerate(everyone):
        for key, entry in found.tensors.items():
            kinds.setdefault(key, entry)
            own = entry.rows.copy()
            own[:, 2 * len(entry.shape)] = rank
            rows.setdefault(key, []).append(own)
        values.update(found.values)
        paths.update(found.paths)
    lengths = {f"__{rank}_0.distcp": found.length for rank, found in enumerate(everyone)}
    tensors = {
        key: replace(entry, found=np.concatenate(rows[key]), files=tuple(lengths))
        for key, entry in kinds.items()
    }
    index = Index(id_, tensors, values, lengths)
    for name, data in (
        (DCP_INDEX_FILE, _dcp_index(index, paths)),
        (INDEX_FILE, encode_index(index)),
    ):
        with (folder / name).open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    sync(folder)


def _head(id_: str, name: str) -> bytes:
    return f"schedlang {id_} {name}\n".encode().ljust(HEAD, b"\0")


def _on_host(part: Tensor) -> Tensor:
    """Return the part on the CPU, in a storage of its own: `torch.save` writes full storages."""
    part = part.detach().contiguous().cpu()
    alone = part.untyped_storage().nbytes() == part.numel() * part.element_size()
    return part if alone else part.clone()


class _Writer:
    """A file that is written in pieces, with a checksum of each item.

    Small pieces are buffered: `torch.save` writes 38 pieces around each tensor.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.at = file, 0  # the number of bytes so far
        self.held = memoryview(bytearray(HELD))
        self.used = self.summed = 0  # of the buffer: bytes used, bytes in the checksum
        self.sum = Checksum()
        self.failure: OSError | None = None

    def item(self, name: str, value: Any) -> FilePlace:
        """Write one box or value by `torch.save`; our checksum replaces that of torch."""
        at, self.sum, self.summed = self.at, Checksum(), self.used
        try:
            torch.save(value, self)  # type: ignore[arg-type]
        except Exception:
            if self.failure is None:
                raise
        if self.failure is not None:  # torch reports it differently, or not at all
            raise self.failure
        self._add()
        return FilePlace(name, at, self.at - at, self.sum.value)

    def write(self, data: Any) -> int:
        """Write all of the data; large data in pieces that the checksum has just read into
        cache."""
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
            self._write_out(part)
            low += len(part)
        return len(view)

    def flush(self) -> None:
        """Write the buffer."""
        self._add()
        self._write_out(self.held[: self.used])
        self.used = self.summed = 0

    def _add(self) -> None:
        self.sum.add(self.held[self.summed : self.used])
        self.summed = self.used

    def _write_out(self, view: memoryview) -> None:
        try:
            while len(view):
                view = view[self.file.write(view) :]
        except OSError as error:
            self.failure = self.failure or error
            raise


def _dcp_index(index: Index, paths: Mapping[str, Path_]) -> bytes:
    """Return the index by which torch's own tools read the folder."""
    held: dict[str, Any] = {key: BytesStorageMetadata() for key in index.values}
    where = {MetadataIndex(key): _storage_info(place) for key, place in index.values.items()}
    for key, entry in index.tensors.items():
        chunks = [
            ChunkStorageMetadata(torch.Size(box.whole), torch.Size(box.size)) for box in entry.boxes
        ]
        properties = TensorProperties(DTYPES[entry.dtype])
        held[key] = TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
        for box in entry.boxes:
            where[MetadataIndex(key, torch.Size(box.whole))] = _storage_info(box.place)
    meta = StorageMeta(save_id=index.id)
    return pickle.dumps(Metadata(held, dict(paths), where, meta, _DCP_VERSION))


def _storage_info(place: FilePlace) -> _StorageInfo:
    return _StorageInfo(place.file, place.at, place.length)


# -- reading ---------------------------------------------------------------------------------------


SharedBoxes = Mapping[str, list[int]]  # by key: boxes that one rank reads for all
LIVE_BYTES = 16 << 20  # bytes that a rank reads before it sends them, or one box


def read_parts(
    folder: Path,
    index: Index,
    tensors: Sequence[BoxedTensor],
    but: SharedBoxes = MappingProxyType({}),
) -> None:
    """Read the parts of this rank, without other ranks. Raises Unreadable or OSError.

    Every box that is read is checked in full: its checksum, its dtype, its size.
    """
    wanted: dict[str, list[tuple[BoxedTensor, TensorEntry, StoredBox]]] = defaultdict(list)
    known: dict[tuple[SliceArray, TensorSlice], Array] = {}  # layers have equal parts
    for tensor in tensors:
        if not (size := count_elements(tensor.part)):
            continue
        entry = index.tensors.get(tensor.key)
        if entry is None or entry.shape != tensor.shape:
            raise Unreadable(f"`{tensor.key}` of {list(tensor.shape)} is not in it")
        kind = DTYPE_NAMES[tensor.local.dtype]
        if entry.dtype != kind:
            raise Unreadable(f"`{tensor.key}` is {entry.dtype} in it, but should be {kind}")
        kinds = entry.parts, tensor.part
        if kinds not in known:
            known[kinds] = overlap_sizes(
                entry.parts, SliceArray.from_slices([tensor.part], len(entry.shape))
            )[:, 0]
        common = known[kinds].copy()
        if common.sum() != size:
            raise Unreadable(f"parts of `{tensor.key}` are not in it")
        common[but.get(tensor.key, [])] = 0
        for box in map(entry.box, np.flatnonzero(common).tolist()):
            wanted[box.place.file].append((tensor, entry, box))
    for name in sorted(wanted):
        with _open_checked(folder, index, name) as file:
            for tensor, entry, box in sorted(wanted[name], key=lambda one: one[2].place.at):
                value = _read_box(file, index, entry, box)
                with without_function_modes():
                    copy_overlap(value, box.part, tensor.local, tensor.part)


def read_together(
    folder: Path,
    index: Index,
    tensors: Sequence[BoxedTensor],
    shardings: Mapping[str, Sharding],
    diagnose: Callable[[BaseException], Diagnostic],
) -> None:
    """Read the parts of all ranks, with shared work: each rank reads as few bytes as it holds.

    lies   by key, the sharding of a tensor; other tensors each rank reads by itself

    A box of which each rank needs all or nothing is read by the ranks that need it; a box that is
    split over ranks is read by one of them, which sends the pieces. Raises Refusal on all ranks.
    """
    keys = [
        (set(found), ranks) for found, ranks in world.ranks_by_object([one.key for one in tensors])
    ]
    holders = {
        key: one.restrict_to([r for found, ranks in keys if key in found for r in ranks])
        for key, one in shardings.items()
    }

    def first() -> list[_Round]:
        turns, but = _plan_rounds(index, holders, world.size()), defaultdict[str, list[int]](list)
        for turn in turns:
            for (key, _), (_, some) in turn.items():
                but[key] += some
        read_parts(folder, index, tensors, but)
        return turns

    turns = run_on_all_ranks(first, diagnose, (Exception,))
    local = {tensor.key: tensor.local for tensor in tensors}
    for turn in turns:
        mine = run_on_all_ranks(
            partial(_read_for_others, folder, index, turn), diagnose, (Exception,)
        )
        item = {name: DTYPES[index.tensors[name[0]].dtype].itemsize for name in turn}
        redistribute_tensors(
            {name: TensorLayout(sharding, item[name]) for name, (sharding, _) in turn.items()},
            {name: TensorLayout(holders[name[0]], item[name]) for name in turn},
            mine.__getitem__,
            lambda name: local[name[0]],
            LIVE_BYTES // 4,
            HOST,
            gaps=True,
        )


# by tensor and number of the box of each reader: which rank reads which box
_Round = dict[tuple[str, int], tuple[Sharding, list[int]]]


def _plan_rounds(index: Index, shardings: Mapping[str, Sharding], size: int) -> list[_Round]:
    """Return which rank reads which boxes that are split over ranks: balanced, equal on all
    ranks."""
    known: dict[Any, Array] = {}
    turns: list[_Round] = []
    loads, alive = np.zeros(size, np.int64), np.full(size, LIVE_BYTES)
    for key, sharding in shardings.items():
        entry = index.tensors.get(key)
        if entry is None or entry.shape != sharding.shape:
            continue  # who holds a part refuses it
        kind = entry.parts, sharding.parts
        if (found := known.get(kind)) is None:
            found = known[kind] = overlap_sizes(*kind)
        common = found * (sharding.copies > 0)
        readers: dict[int, list[int]] = defaultdict(list)
        for k in np.flatnonzero(((common > 0) & (common < entry.parts.sizes[:, None])).any(1)):
            ranks = np.concatenate([sharding.holders[part] for part in np.flatnonzero(common[k])])
            reader = int(ranks[loads[ranks].argmin()])
            readers[reader].append(int(k))
            loads[reader] += int(entry.sizes[k])
        for turn in range(max(map(len, readers.values()), default=0)):
            some = {rank: boxes[turn] for rank, boxes in readers.items() if turn < len(boxes)}
            of = np.full(size, NOWHERE, np.int32)
            of[list(some)] = range(len(some))
            boxes = list(some.values())
            bytes_ = entry.sizes[boxes]
            if (alive[list(some)] + bytes_ > LIVE_BYTES).any():
                turns.append({})
                alive[:] = 0
            alive[list(some)] += bytes_
            source = Sharding(entry.shape, entry.parts.select(boxes), of)
            turns[-1][key, turn] = source, boxes
    return turns


def _read_for_others(folder: Path, index: Index, turn: _Round) -> dict[tuple[str, int], Tensor]:
    """Read the boxes that this rank sends to others."""
    found, rank = {}, world.rank()
    for name, (sharding, boxes) in turn.items():
        if sharding.part_of_rank[rank] != NOWHERE:
            entry = index.tensors[name[0]]
            box = entry.box(boxes[sharding.part_of_rank[rank]])
            with _open_checked(folder, index, box.place.file) as file:
                found[name] = _read_box(file, index, entry, box)
    return found


def _read_box(file: IO[bytes], index: Index, entry: TensorEntry, box: StoredBox) -> Tensor:
    value: Tensor = _load_value(
        file, index, box.place, f"box {_describe_box(box)} of `{entry.key}`"
    )
    _check_value(value, entry, box)
    return value


def read_value(folder: Path, index: Index, path: Path_) -> Any:
    """Read one value, plain data. Raises Unreadable or OSError."""
    key = ".".join(path)
    if (place := index.values.get(key)) is None:
        raise Unreadable(f"`{key}` is not in it")
    with _open_checked(folder, index, place.file) as file:
        return _load_value(file, index, place, f"`{key}`")


def check_files(folder: Path, index: Index) -> None:
    """Check that every file exists, belongs to this save, and is long enough.

    Raises Unreadable or OSError.
    """
    ends: dict[str, int] = dict(index.lengths)
    for entry in index.tensors.values():
        files, at, length = entry.rows[:, -4:-1].T
        last = np.zeros(len(entry.files), np.int64)
        np.maximum.at(last, files, at + length)
        ends |= {name: max(ends.get(name, 0), int(end)) for name, end in zip(entry.files, last)}
    for place in index.values.values():
        ends[place.file] = max(ends.get(place.file, 0), place.at + place.length)
    for name, end in ends.items():
        with _open_checked(folder, index, name) as file:
            if os.fstat(file.fileno()).st_size < end:
                raise Unreadable(f"`{name}` ends before its last box does")


@contextmanager
def _open_checked(folder: Path, index: Index, name: str) -> Iterator[IO[bytes]]:
    """Open a file of the folder, and check that it is of the same save as the index."""
    path = folder / name
    if not path.is_file():  # opening a pipe would block
        raise Unreadable(f"the file `{name}` is missing")
    with path.open("rb") as file:
        if index.id is not None and (head := file.read(HEAD)) != _head(index.id, name):
            other = head[10:26].decode(errors="replace")
            raise Unreadable(f"`{name}` is of save `{other}`, but the index is of `{index.id}`")
        yield file


def _load_value(file: IO[bytes], index: Index, place: FilePlace, what: str) -> Any:
    """Load a value that `torch.save` wrote, of plain data only."""
    file.seek(place.at)
    if os.fstat(file.fileno()).st_size < place.at + place.length:
        raise Unreadable(f"`{place.file}` ends before {what} does")
    try:
        data = file.read(place.length)
        if place.check is not None and CHECKSUMS[index.sums](data) != place.check:
            raise Unreadable(f"`{place.file}` is damaged: the checksum of {what} differs")
        with without_function_modes():
            return torch.load(io.BytesIO(data), "cpu", weights_only=True, mmap=False)
    except (OSError, Unreadable):
        raise
    except Exception as error:  # damaged bytes may raise anything
        if is_out_of_memory(error):
            raise MemoryError(
                f"{what} takes {place.length:,} bytes, and as many while it is read"
            ) from error
        line = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise Unreadable(f"`{place.file}` is damaged at {what}: {line}") from error


def _check_value(value: Any, entry: TensorEntry, box: StoredBox) -> None:
    """Refuse a value that is not the box of the index."""
    plain = type(value) is Tensor and value.layout == torch.strided and value.is_cpu
    if not plain or value.dtype != DTYPES[entry.dtype] or tuple(value.shape) != box.size:
        raise Unreadable(
            f"`{box.place.file}` does not hold box {_describe_box(box)} of `{entry.key}`"
        )


def _describe_box(box: StoredBox) -> str:
    return "[" + ", ".join(f"{at}:{at + n}" for at, n in zip(box.whole, box.size)) + "]"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is a lack of memory: of Python, of torch, or of the system."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    starving = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return starving or isinstance(error, MemoryError | torch.OutOfMemoryError)


def out_of_memory(path: Path, error: BaseException) -> Diagnostic:
    """Return the message for a lack of memory in a read (S633)."""
    return Diagnostic(
        "S633",
        f"there is no memory to read `{path}`",
        notes=(
            f"rank {world.rank()}: {describe_failure(error)}",
            "nothing in it was found to be damaged",
        ),
        helps=(
            "load on more ranks, or in a layout where each rank holds less",
            "read it while the program is built, `build(weights=path)`: no shard is held twice",
        ),
    )


def describe_failure(error: BaseException) -> str:
    """Return a failure in one line."""
    text = str(error).strip().partition("\n")[0]
    named = isinstance(error, OSError | Unreadable | MemoryError)
    return text if named and text else f"{type(error).__name__}: {text}".rstrip(": ")
