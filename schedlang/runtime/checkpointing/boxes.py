"""Full tensors in a folder as boxes, each written by one rank and read back in any other boxes.

`write_file` and `write_index` write a folder; `read_parts` and `read_together` read parts of it.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    folder: Path, id_: str, rank: int, tensors: Iterable[BoxedTensor], values: Mapping[Path_, Any]
) -> _WrittenFile:
    """Write the boxes and values of this rank into its file; `write_index` completes the folder.

    values  anything that `torch.load(weights_only=True)` reads; each is written by one rank

    Raises OSError.
    """
    name, written = f"__{rank}_0.distcp", _WrittenFile({}, {}, {})
    no_checksums = config.patch({"save.compute_crc32": False})  # type: ignore[attr-defined]
    with (
        without_function_modes(),
        no_checksums,
        (folder / name).open("xb", buffering=0) as file,
    ):
        writer = _Writer(file)
        writer.write(_head(id_, name))
        for key, path, value in ((".".join(path), path, value) for path, value in values.items()):
            written.values[key] = writer.item(name, value)
            written.paths[key] = path
        for tensor in (tensor for tensor in tensors if tensor.primary):
            rows = []
            for box in overlaps(tensor.part, full_slice(tensor.shape)):
                part = _on_host(box.view(tensor.local, box.here))
                rows.append(row_of(StoredBox(box.there, box.size, writer.item(name, part)), 0))
            if rows:
                key, kind = tensor.key, DTYPE_NAMES[tensor.local.dtype]
                written.tensors[key] = TensorEntry(key, tensor.shape, kind, np.array(rows), (name,))
                written.paths[key] = tensor.path
        writer.flush()
        written.length = writer.at
        os.fsync(file.fileno())
    return written


def write_index(folder: Path, id_: str, all_files: Sequence[_WrittenFile]) -> None:
    """Write the two indexes of the folder: our own, and that of DCP. Raises OSError."""
    kinds: dict[str, TensorEntry] = {}
    rows: dict[str, list[Array]] = {}
    values: dict[str, FilePlace] = {}
    paths: dict[str, Path_] = {}
    for rank, written in enumerate(all_files):
        for key, entry in written.tensors.items():
            kinds.setdefault(key, entry)
            entry_rows = entry.rows.copy()
            entry_rows[:, 2 * len(entry.shape)] = rank
            rows.setdefault(key, []).append(entry_rows)
        values.update(written.values)
        paths.update(written.paths)
    lengths = {f"__{rank}_0.distcp": written.length for rank, written in enumerate(all_files)}
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
    owns_storage = part.untyped_storage().nbytes() == part.numel() * part.element_size()
    return part if owns_storage else part.clone()


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
        start, self.sum, self.summed = self.at, Checksum(), self.used
        try:
            torch.save(value, self)  # type: ignore[arg-type]
        except Exception:
            if self.failure is None:
                raise
        if self.failure is not None:  # torch reports it differently, or not at all
            raise self.failure
        self._add()
        return FilePlace(name, start, self.at - start, self.sum.value)

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
        offset = 0
        while offset < len(view):
            part = view[offset : offset + self.sum.piece]
            self.sum.add(part)
            self._write_out(part)
            offset += len(part)
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
    metadata: dict[str, Any] = {key: BytesStorageMetadata() for key in index.values}
    storage = {MetadataIndex(key): _storage_info(slot) for key, slot in index.values.items()}
    for key, entry in index.tensors.items():
        chunks = [
            ChunkStorageMetadata(torch.Size(box.whole), torch.Size(box.size)) for box in entry.boxes
        ]
        properties = TensorProperties(DTYPES[entry.dtype])
        metadata[key] = TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
        for box in entry.boxes:
            storage[MetadataIndex(key, torch.Size(box.whole))] = _storage_info(box.place)
    meta = StorageMeta(save_id=index.id)
    return pickle.dumps(Metadata(metadata, dict(paths), storage, meta, _DCP_VERSION))


def _storage_info(file_place: FilePlace) -> _StorageInfo:
    return _StorageInfo(file_place.file, file_place.at, file_place.length)


# -- reading ---------------------------------------------------------------------------------------


SharedBoxes = Mapping[str, list[int]]  # by key: boxes that one rank reads for all
LIVE_BYTES = 16 << 20  # bytes that a rank reads before it sends them, or one box


def read_parts(
    folder: Path,
    index: Index,
    tensors: Sequence[BoxedTensor],
    skip: SharedBoxes = MappingProxyType({}),
) -> None:
    """Read the parts of this rank, without other ranks. Raises Unreadable or OSError.

    Every box that is read is checked in full: its checksum, its dtype, its size.
    """
    by_file: dict[str, list[tuple[BoxedTensor, TensorEntry, StoredBox]]] = defaultdict(list)
    overlap_cache: dict[tuple[SliceArray, TensorSlice], Array] = {}  # layers have equal parts
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
        if kinds not in overlap_cache:
            overlap_cache[kinds] = overlap_sizes(
                entry.parts, SliceArray.from_slices([tensor.part], len(entry.shape))
            )[:, 0]
        overlap = overlap_cache[kinds].copy()
        if overlap.sum() != size:
            raise Unreadable(f"parts of `{tensor.key}` are not in it")
        overlap[skip.get(tensor.key, [])] = 0
        for box in map(entry.box, np.flatnonzero(overlap).tolist()):
            by_file[box.place.file].append((tensor, entry, box))
    for name in sorted(by_file):
        with _open_checked(folder, index, name) as file:
            for tensor, entry, box in sorted(by_file[name], key=lambda item: item[2].place.at):
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
    keys = [(set(names), ranks) for names, ranks in world.ranks_by_object([t.key for t in tensors])]
    holders = {
        key: t.restrict_to([r for names, ranks in keys if key in names for r in ranks])
        for key, t in shardings.items()
    }

    def first() -> list[_Round]:
        rounds, skip = _plan_rounds(index, holders, world.size()), defaultdict[str, list[int]](list)
        for round_ in rounds:
            for (key, _), (_, boxes) in round_.items():
                skip[key] += boxes
        read_parts(folder, index, tensors, skip)
        return rounds

    rounds = run_on_all_ranks(first, diagnose, (Exception,))
    local = {tensor.key: tensor.local for tensor in tensors}
    for round_ in rounds:
        boxes_read = run_on_all_ranks(
            partial(_read_for_others, folder, index, round_), diagnose, (Exception,)
        )
        item = {name: DTYPES[index.tensors[name[0]].dtype].itemsize for name in round_}
        redistribute_tensors(
            {name: TensorLayout(sharding, item[name]) for name, (sharding, _) in round_.items()},
            {name: TensorLayout(holders[name[0]], item[name]) for name in round_},
            boxes_read.__getitem__,
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
    size_cache: dict[Any, Array] = {}
    rounds: list[_Round] = []
    loads, live_bytes = np.zeros(size, np.int64), np.full(size, LIVE_BYTES)
    for key, sharding in shardings.items():
        entry = index.tensors.get(key)
        if entry is None or entry.shape != sharding.shape:
            continue  # who holds a part refuses it
        kind = entry.parts, sharding.parts
        if (sizes := size_cache.get(kind)) is None:
            sizes = size_cache[kind] = overlap_sizes(*kind)
        overlap = sizes * (sharding.copies > 0)
        readers: dict[int, list[int]] = defaultdict(list)
        for k in np.flatnonzero(((overlap > 0) & (overlap < entry.parts.sizes[:, None])).any(1)):
            ranks = np.concatenate([sharding.holders[part] for part in np.flatnonzero(overlap[k])])
            reader = int(ranks[loads[ranks].argmin()])
            readers[reader].append(int(k))
            loads[reader] += int(entry.sizes[k])
        for number in range(max(map(len, readers.values()), default=0)):
            chosen = {rank: boxes[number] for rank, boxes in readers.items() if number < len(boxes)}
            part_of_rank = np.full(size, NOWHERE, np.int32)
            part_of_rank[list(chosen)] = range(len(chosen))
            boxes = list(chosen.values())
            bytes_ = entry.sizes[boxes]
            if (live_bytes[list(chosen)] + bytes_ > LIVE_BYTES).any():
                rounds.append({})
                live_bytes[:] = 0
            live_bytes[list(chosen)] += bytes_
            source = Sharding(entry.shape, entry.parts.select(boxes), part_of_rank)
            rounds[-1][key, number] = source, boxes
    return rounds


def _read_for_others(folder: Path, index: Index, round_: _Round) -> dict[tuple[str, int], Tensor]:
    """Read the boxes that this rank sends to others."""
    boxes_read, rank = {}, world.rank()
    for name, (sharding, boxes) in round_.items():
        if sharding.part_of_rank[rank] != NOWHERE:
            entry = index.tensors[name[0]]
            box = entry.box(boxes[sharding.part_of_rank[rank]])
            with _open_checked(folder, index, box.place.file) as file:
                boxes_read[name] = _read_box(file, index, entry, box)
    return boxes_read


def _read_box(file: IO[bytes], index: Index, entry: TensorEntry, box: StoredBox) -> Tensor:
    value: Tensor = _load_value(
        file, index, box.place, f"box {_describe_box(box)} of `{entry.key}`"
    )
    _check_value(value, entry, box)
    return value


def read_value(folder: Path, index: Index, path: Path_) -> Any:
    """Read one value, plain data. Raises Unreadable or OSError."""
    key = ".".join(path)
    if (file_place := index.values.get(key)) is None:
        raise Unreadable(f"`{key}` is not in it")
    with _open_checked(folder, index, file_place.file) as file:
        return _load_value(file, index, file_place, f"`{key}`")


def check_files(folder: Path, index: Index) -> None:
    """Check that every file exists, belongs to this save, and is long enough.

    Raises Unreadable or OSError.
    """
    ends: dict[str, int] = dict(index.lengths)
    for entry in index.tensors.values():
        files, starts, length = entry.rows[:, -4:-1].T
        last = np.zeros(len(entry.files), np.int64)
        np.maximum.at(last, files, starts + length)
        ends |= {name: max(ends.get(name, 0), int(end)) for name, end in zip(entry.files, last)}
    for file_place in index.values.values():
        ends[file_place.file] = max(ends.get(file_place.file, 0), file_place.at + file_place.length)
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
            found_id = head[10:26].decode(errors="replace")
            raise Unreadable(f"`{name}` is of save `{found_id}`, but the index is of `{index.id}`")
        yield file


def _load_value(file: IO[bytes], index: Index, file_place: FilePlace, label: str) -> Any:
    """Load a value that `torch.save` wrote, of plain data only."""
    file.seek(file_place.at)
    if os.fstat(file.fileno()).st_size < file_place.at + file_place.length:
        raise Unreadable(f"`{file_place.file}` ends before {label} does")
    try:
        data = file.read(file_place.length)
        if file_place.check is not None and CHECKSUMS[index.sums](data) != file_place.check:
            raise Unreadable(f"`{file_place.file}` is damaged: the checksum of {label} differs")
        with without_function_modes():
            return torch.load(io.BytesIO(data), "cpu", weights_only=True, mmap=False)
    except (OSError, Unreadable):
        raise
    except Exception as error:  # damaged bytes may raise anything
        if is_out_of_memory(error):
            raise MemoryError(
                f"{label} takes {file_place.length:,} bytes, and as many while it is read"
            ) from error
        line = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise Unreadable(f"`{file_place.file}` is damaged at {label}: {line}") from error


def _check_value(value: Any, entry: TensorEntry, box: StoredBox) -> None:
    """Refuse a value that is not the box of the index."""
    is_plain = type(value) is Tensor and value.layout == torch.strided and value.is_cpu
    if not is_plain or value.dtype != DTYPES[entry.dtype] or tuple(value.shape) != box.size:
        raise Unreadable(
            f"`{box.place.file}` does not hold box {_describe_box(box)} of `{entry.key}`"
        )


def _describe_box(box: StoredBox) -> str:
    return "[" + ", ".join(f"{low}:{low + n}" for low, n in zip(box.whole, box.size)) + "]"


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
    has_text = isinstance(error, OSError | Unreadable | MemoryError)
    return text if has_text and text else f"{type(error).__name__}: {text}".rstrip(": ")
