"""Folders as the source of a transfer: each rank reads its parts; ranks share reads of one box."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path

import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal
from schedlang.runtime.checkpointing import checkpoint_folders
from schedlang.runtime.checkpointing.archive import check_contents
from schedlang.runtime.checkpointing.boxes import (
    BoxedTensor,
    read_together,
    read_value,
    without_function_modes,
    zeros,
)
from schedlang.runtime.checkpointing.index import CONTENTS, DTYPES, Unreadable
from schedlang.runtime.comm import world as comm
from schedlang.runtime.initial.lazy_tensors import KINDS, lazy_tensor, read_part
from schedlang.runtime.initial.library_loading import load_names, other_names
from schedlang.runtime.initial.weight_files import heads_of, is_weights
from schedlang.runtime.redistribution.route import TensorLayout
from schedlang.runtime.redistribution.sharding import (
    NOWHERE,
    Sharding,
    TensorSlice,
    copy_overlap,
    full_slice,
    replicate_on,
)
from schedlang.runtime.storage.folder import run_on_all_ranks
from schedlang.runtime.transfer.deepspeed_shards import ZeroShards
from schedlang.runtime.transfer.ends import EndTensors, size_of

# entries that torchtitan saves next to the model, whose own names have no prefix
OTHER_ENTRIES = ("optim", "optimizer", "lr_scheduler", "dataloader", "train_state")
MODEL_PREFIX = "model."
TensorForms = Mapping[str, tuple[tuple[int, ...], str]]  # name -> (full shape, dtype)
ReadRequest = tuple[str, Tensor, TensorSlice]  # name in the folder, this rank's tensor, its part
Diagnose = Callable[[BaseException], Diagnostic]


class Checkpoint:
    """A checkpoint of `program.save`, the last of several in a folder, or a folder of DCP.

    Checkpoints that others wrote with torch.distributed.checkpoint have the model's names, or these
    names below others, such as `model.`.
    """

    def __init__(self, folder: Path, requested: Iterable[str], fresh: bool = False) -> None:
        self.fresh = fresh  # the target's values may be lost if reading fails
        self.folder, id_ = checkpoint_folders.find_checkpoint(folder)
        self.index = checkpoint_folders.checked_index(self.folder, id_)
        self.also: dict[str, str] = {}
        self.head = find_head(set(requested), self.index.tensors)
        if ".".join(CONTENTS) in self.index.values:
            contents = check_contents(read_value(self.folder, self.index, CONTENTS))
            self.also = {o: names[0] for names in contents["ties"] for o in names[1:]}
            self.head = MODEL_PREFIX
        self.kinds: TensorForms = {
            key.removeprefix(self.head): (entry.shape, entry.dtype)
            for key, entry in self.index.tensors.items()
            if key.startswith(self.head) and key.partition(".")[0] not in OTHER_ENTRIES
        }

    def read(
        self, requests: Sequence[ReadRequest], shardings: Mapping[str, Sharding], diagnose: Diagnose
    ) -> None:
        """Read this rank's parts of the tensors `requests`; all ranks must call this.

        `shardings` has the shardings of the wanted tensors.  Raises Refusal with `diagnose(error)`.
        """
        if len(comm.distinct_objects(self.index.fingerprint)) > 1:
            raise Refusal(diagnose(Unreadable("the ranks have read different checkpoints")))

        def buffer_for(local: Tensor) -> Tensor:
            return local if self.fresh else zeros(local.shape, local.dtype)

        boxed = [
            BoxedTensor((self.head + name,), buffer_for(local), self.kinds[name][0], part)
            for name, local, part in requests
        ]
        keyed = {self.head + name: sharding for name, sharding in shardings.items()}
        read_together(self.folder, self.index, boxed, keyed, diagnose)
        for box, (_, local, part) in zip(boxed, requests):
            if box.local is not local:
                copy_overlap(box.local, part, local, part)


def find_head(names: Set[str], keys: Iterable[str]) -> str:
    """Return the prefix under which keys have most of these names: "" or `model.`.

    If no name is under these, another one, unless it leaves out more than optimizer state and its
    like: it could be a part of the model.
    """
    counts, all_keys = Counter[str](), list(keys)
    for key in all_keys:
        ends = [i + 1 for i, letter in enumerate(key) if letter == "."]
        counts.update(key[:end] for end in (0, *ends) if key[end:] in names)
    if not counts or counts[""] or counts[MODEL_PREFIX]:
        return MODEL_PREFIX if counts[MODEL_PREFIX] > counts[""] else ""
    head = counts.most_common(1)[0][0]
    others = [key.split(".") for key in all_keys if not key.startswith(head)]
    return head if all(set(OTHER_ENTRIES) & {*parts} for parts in others) else ""


class Safetensors:
    """Safetensors files of `save_pretrained` or `program.export`, one or several."""

    def __init__(self, path: Path, model: nn.Module | None, parts: bool, max_bytes: int) -> None:
        self.most = max_bytes  # the most bytes per read
        heads = heads_of(path)
        odd = next((leaf for leaf in heads.leaves.values() if leaf.kind not in KINDS), None)
        if odd is not None:
            raise Unreadable(f"`{odd.name}` of `{odd.file.name}` is of dtype `{odd.kind}`")
        loaded = load_names(heads.leaves, model, parts).tensors
        used = {leaf.name for lazy in loaded.values() for leaf in lazy.leaves}
        self._tensors = {n: lazy_tensor(leaf) for n, leaf in heads.leaves.items() if n not in used}
        self._tensors |= loaded
        self.kinds: TensorForms = {
            name: (tuple(lazy.shape), KINDS[lazy.leaves[0].kind])
            for name, lazy in self._tensors.items()
        }
        self.also: dict[str, str] = {}
        for alias, name in heads.also.items():
            if name in self.kinds and alias not in self.kinds:
                self.also[alias] = name
        for name in list(self.kinds):
            for alias in other_names((name,), model):
                if alias not in self.kinds:
                    self.also.setdefault(alias, name)

    def read(
        self, requests: Sequence[ReadRequest], shardings: Mapping[str, Sharding], diagnose: Diagnose
    ) -> None:
        """Read this rank's parts in chunks of rows; all ranks must call this."""
        run_on_all_ranks(lambda: self._read(requests), diagnose, (Exception,))

    def _read(self, requests: Sequence[ReadRequest]) -> None:
        for name, local, part in requests:
            read_part(self._tensors[name], local, part, self.most)


class DeepSpeedFolder:
    """A checkpoint of DeepSpeed; names may be below a prefix, as in a folder of DCP.

    A parameter that the optimizer trains has the dtype of the optimizer's copy, or, if the target
    has it so, of the model's. Other tensors may be of a wider dtype in the target.
    """

    def __init__(self, path: Path, target: EndTensors) -> None:
        self.shards = ZeroShards(path)
        self.head = find_head(names_of(target), self.shards.names)
        self.also = {
            alias.removeprefix(self.head): name.removeprefix(self.head)
            for alias, name in self.shards.also.items()
        }
        self.kinds: TensorForms = {}
        for full_name in self.shards.names:
            name = full_name.removeprefix(self.head)
            owner = target.name_of(name) or target.name_of(self._alias_of(name))
            wanted = target.dtypes[owner] if owner is not None else ""
            self.kinds[name] = (self.shards.shape(full_name), self._dtype(full_name, wanted))

    def _alias_of(self, name: str) -> str:
        return next((alias for alias, owner in self.also.items() if owner == name), name)

    def _dtype(self, name: str, wanted: str) -> str:
        """Return the dtype to read a tensor as: the target's, if that is exact or the model's."""
        kinds = self.shards.dtypes(name)
        if wanted in kinds or wanted not in DTYPES or name in self.shards.shapes:
            return wanted if wanted in kinds else kinds[0]
        wider = torch.promote_types(DTYPES[kinds[0]], DTYPES[wanted]) == DTYPES[wanted]
        both_float = DTYPES[kinds[0]].is_floating_point and DTYPES[wanted].is_floating_point
        return wanted if wider and both_float else kinds[0]

    def read(
        self, requests: Sequence[ReadRequest], shardings: Mapping[str, Sharding], diagnose: Diagnose
    ) -> None:
        """Read this rank's parts, a full tensor at a time; all ranks must call this."""
        if len(comm.distinct_objects(self.shards.fingerprint)) > 1:
            raise Refusal(diagnose(Unreadable("the ranks have read different checkpoints")))
        run_on_all_ranks(lambda: self._read(requests), diagnose, (Exception,))

    def _read(self, requests: Sequence[ReadRequest]) -> None:
        for name, local, part in requests:
            value = self.shards.value(self.head + name)
            copy_overlap(value, full_slice(value.shape), local, part)


Folder = Checkpoint | Safetensors | DeepSpeedFolder


def names_of(target: EndTensors) -> set[str]:
    """Return all names of the tensors of an end."""
    return {*target.layouts, *target.aliases}


def open_folder(
    path: Path,
    target: EndTensors,
    model: nn.Module | None,
    parts: bool,
    max_bytes: int,
    fresh: bool = False,
) -> Folder:
    """Open a folder of weights or a checkpoint.

    target     the tensors that will be read
    model      the model that will get the values, if there is one
    parts      whether the model has shards of its parameters
    max_bytes  the most bytes per read
    fresh      whether the target's old values may be lost
    Raises Refusal, Unreadable or OSError.
    """
    if is_weights(path):
        return Safetensors(path, model, parts, max_bytes)
    if (folder := checkpoint_folders.find_deepspeed(path)) is not None:
        return DeepSpeedFolder(folder, target)
    return Checkpoint(path, names_of(target), fresh)


def folder_tensors(folder: Folder, world: int) -> EndTensors:
    """Return the tensors of a folder in a job of `world` ranks; no rank holds them."""
    return EndTensors(
        {
            name: TensorLayout(replicate_on(shape, (), world), size_of(dtype))
            for name, (shape, dtype) in folder.kinds.items()
        },
        {name: dtype for name, (_, dtype) in folder.kinds.items()},
        folder.also,
    )


def read_folder(
    folder: Folder,
    names: Mapping[str, str],
    target: EndTensors,
    local: Mapping[str, Tensor],
    rank: int,
    diagnose: Diagnose,
) -> int:
    """Read this rank's parts of all tensors, and return their bytes; all ranks must call this.

    names    name in `target` -> name in the folder
    local    this rank's tensors, by names in `target`
    """
    size, remaining = 0, dict(names)
    while remaining:  # a folder's tensor with several names here is read once for each name
        batch = {source: name for name, source in reversed(remaining.items())}
        remaining = {name: source for name, source in remaining.items() if batch[source] != name}
        shardings = {source: target.layouts[name].sharding for source, name in batch.items()}
        requests = []
        for source, name in batch.items():
            number = int(shardings[source].part_of_rank[rank])
            if number != NOWHERE and name in local:
                requests.append((source, local[name], shardings[source].parts[number]))
                size += int(shardings[source].sizes[number]) * target.layouts[name].itemsize
        with without_function_modes(), torch.no_grad():
            folder.read(requests, shardings, diagnose)
    return size
