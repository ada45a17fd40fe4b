"""Whole tensors in a folder as boxes, each written by one rank and read back in any other boxes.

The one place that touches torch.distributed.checkpoint (DCP).  Its protocol for tensors in parts
asks for tensor subclasses of one box list each, so we give it planners instead, which are public:
what is written are plain boxes, and DCP finds those that overlap the ones asked for.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from schedlang.runtime.saving.holding import Block

Path_ = tuple[str, ...]
INDEX = ".metadata"  # the file by which DCP knows a folder
FAILURES = (OSError, CheckpointException)  # what `write` may raise


class Unreadable(Exception):
    """What was found is not what DCP wrote, or not all of it."""


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
        """Its name in the folder."""
        return ".".join(self.path)


def whole(path: Path_, tensor: Tensor, *, speaks: bool = True) -> Boxed:
    """A tensor that every rank holds as it is."""
    zero, shape = (0,) * tensor.ndim, tuple(tensor.shape)
    boxes = (Block(zero, zero, shape),) if tensor.numel() else ()
    return Boxed(path, tensor, shape, boxes, speaks)


def write(folder: Path, tensors: Sequence[Boxed], values: Mapping[Path_, Any]) -> None:
    """Write what this rank speaks for; all ranks of the job together.

    values  anything that `torch.load(weights_only=True)` reads; one rank gives each
    Raises CheckpointException, on all ranks alike.
    """
    writer = FileSystemWriter(folder, overwrite=False)
    with plain_torch(), _no_warning():
        save({}, storage_writer=writer, planner=_Writer(tensors, values), no_dist=_alone())


def index(folder: Path) -> Metadata:
    """What a folder holds.  Raises Unreadable or OSError."""
    try:
        found = FileSystemReader(folder).read_metadata()
    except OSError:
        raise
    except Exception as error:
        raise Unreadable(f"{INDEX}: {error}") from error
    if not isinstance(found, Metadata):
        raise Unreadable(f"{INDEX} is not an index of DCP")
    return found


def read(folder: Path, tensors: Sequence[Boxed]) -> None:
    """Read the parts of this rank, by itself.  Raises Unreadable or OSError."""
    _read(folder, _Reader(tensors, ()))


def read_value(folder: Path, path: Path_) -> Any:
    """Read one value, by itself.  Raises Unreadable or OSError."""
    reader = _Reader((), (".".join(path),))
    _read(folder, reader)
    return reader.values[".".join(path)]


def reason(error: BaseException) -> str:
    """The first cause of a failure in one line."""
    if isinstance(error, CheckpointException):
        rank, (cause, _) = min(error.failures.items())
        several = len(error.failures) > 1 or not _alone()
        return f"rank {rank}: {_line(cause)}" if several else _line(cause)
    return _line(error)


def _line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    named = isinstance(error, OSError | Unreadable)
    return text if named and text else f"{type(error).__name__}: {text}".rstrip(": ")


def _alone() -> bool:
    return not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1


@contextmanager
def plain_torch() -> Iterator[None]:
    """No function modes: one that widens float32 would misread stored bytes."""
    with torch._C.DisableTorchFunction():
        yield


@contextmanager
def _no_warning() -> Iterator[None]:
    """DCP warns where a job of one process is just what is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _read(folder: Path, reader: _Reader) -> None:
    try:
        with plain_torch(), _no_warning():
            load({}, storage_reader=FileSystemReader(folder), planner=reader, no_dist=True)
    except CheckpointException as error:
        cause = error.failures[min(error.failures)][0]
        if isinstance(cause, OSError | Unreadable):
            raise cause from error
        raise Unreadable(_line(cause)) from error


def _chunk(box: Block) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.whole), torch.Size(box.size))


class _Writer(DefaultSavePlanner):
    """Plans one item for every box that this rank writes, and for every value."""

    def __init__(self, tensors: Sequence[Boxed], values: Mapping[Path_, Any]) -> None:
        super().__init__()
        self.tensors = [t for t in tensors if t.speaks]
        self.extra = {".".join(path): (path, value) for path, value in values.items()}
        self.found: dict[MetadataIndex, Any] = {}

    def create_local_plan(self) -> SavePlan:
        """All items of this rank; the paths let DCP's tools rebuild a nested dict."""
        items = []
        for tensor in self.tensors:
            for box in tensor.boxes:
                items.append(self._item(tensor, box))
        for key, (_, value) in self.extra.items():
            at = MetadataIndex(key)
            self.found[at] = value
            items.append(WriteItem(at, WriteItemType.BYTE_IO))
        paths = {t.key: t.path for t in self.tensors}
        paths |= {key: path for key, (path, _) in self.extra.items()}
        self.plan = SavePlan(items, planner_data=paths)
        return self.plan

    def _item(self, tensor: Boxed, box: Block) -> WriteItem:
        view, at = box.of_local(tensor.local), MetadataIndex(tensor.key, torch.Size(box.whole))
        self.found[at] = view
        data = TensorWriteData(
            _chunk(box), TensorProperties.create_from_tensor(view), torch.Size(tensor.shape)
        )
        return WriteItem(at, WriteItemType.SHARD, tensor_data=data)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The box or the value of an item."""
        found = self.found[index]
        return found.detach().contiguous() if isinstance(found, Tensor) else found


class _Reader(DefaultLoadPlanner):
    """Plans one read for every stored box that overlaps one of this rank's."""

    def __init__(self, tensors: Sequence[Boxed], values: Sequence[str]) -> None:
        super().__init__()
        self.tensors = {tensor.key: tensor for tensor in tensors}
        self.wanted = values
        self.values: dict[str, Any] = {}
        self.found: dict[MetadataIndex, Tensor] = {}

    def create_local_plan(self) -> LoadPlan:
        """Reads that together give every element of every part."""
        assert self.metadata is not None
        stored, items = self.metadata.state_dict_metadata, []
        for key, tensor in self.tensors.items():
            items += self._items(tensor, stored.get(key))
        for key in self.wanted:
            if not isinstance(stored.get(key), BytesStorageMetadata):
                raise Unreadable(f"there is no `{key}` in it")
            at, none = MetadataIndex(key), torch.Size((0,))
            items.append(ReadItem(LoadItemType.BYTE_IO, at, none, at, none, none))
        return LoadPlan(items)

    def _items(self, tensor: Boxed, stored: Any) -> list[ReadItem]:
        if not tensor.boxes:
            return []
        if not isinstance(stored, TensorStorageMetadata) or tuple(stored.size) != tensor.shape:
            raise Unreadable(f"`{tensor.key}` of {list(tensor.shape)} is not in it")
        for box in tensor.boxes:
            self.found[MetadataIndex(tensor.key, box.whole)] = box.of_local(tensor.local)
        items = create_read_items_for_chunk_list(tensor.key, stored, [*map(_chunk, tensor.boxes)])
        got = sum(math.prod(item.lengths) for item in items)
        if got != sum(math.prod(box.size) for box in tensor.boxes):
            raise Unreadable(f"parts of `{tensor.key}` are not in it")
        return items

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The box that is read into."""
        return self.found[index]

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take over a value; only plain data is believed."""
        self.values[read_item.dest_index.fqn] = torch.load(value, weights_only=True)
