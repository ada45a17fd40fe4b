"""Files of a DeepSpeed checkpoint: weights, and the shards of ZeRO's optimizer, by parameter name.

Stages 1 and 2 cut the flat weights of a parameter group into one part for each rank: put together,
these parts are the group's parameters one after the other. Stage 3 pads each parameter and cuts it
into equal parts; a rank's parts of a group lie one after the other. The optimizer's state has the
same places as the weights.

The files are pickles. They are read without running any code: objects of DeepSpeed's own classes
become plain attributes, and any other class is refused.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from schedlang.diagnostics.diagnostic import quote_names
from schedlang.runtime.checkpointing.index import DTYPE_NAMES, Unreadable

_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_00_model_states\.pt")
_OTHER = re.compile(r"layer_.*|.*expp_rank_.*|.*mp_rank_(?!00_)\d+.*")
_LOADING = threading.Lock()  # `safe_globals` belongs to the process
Shape = tuple[int, ...]


class _Attributes:
    """An object of one of DeepSpeed's classes: its attributes, without its methods."""


class _Number(int):
    """A number of one of DeepSpeed's enumerations."""


_STAND_INS: Any = [
    (_Attributes, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Attributes, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (_Attributes, "deepspeed.utils.tensor_fragment.fragment_address"),
    (_Number, "deepspeed.runtime.zero.config.ZeroStageEnum"),
]


@dataclass(frozen=True)
class _Fragment:
    """Elements of a parameter: `size` from `start` in the flat group `group` of a rank."""

    rank: int
    group: int
    start: int
    size: int


class ZeroShards:
    """A checkpoint of DeepSpeed, of ZeRO 0 to 3, of a job without tensor and pipeline parallelism.

    names   of the tensors: parameters and buffers, each once
    also    other names of tied parameters -> their name in `names`
    shapes  full shapes of the parameters that the optimizer trains
    step    the number of training steps
    """

    def __init__(self, folder: Path) -> None:
        """Read the files of a folder. Raises Unreadable or OSError."""
        models, optims = _rank_files(folder)
        try:
            self._models = [_load(file) for file in models]
            self._optims = [_load(file)["optimizer_state_dict"] for file in optims]
            self._describe()
        except (KeyError, AttributeError, TypeError, IndexError, ValueError) as error:
            what = f"{type(error).__name__}: {error}"
            raise Unreadable(
                f"its files are none of a ZeRO checkpoint that is known: {what}"
            ) from (error)

    def _describe(self) -> None:
        first, world = self._models[0], len(self._optims)
        ranks, width = int(first["dp_world_size"]), int(first["mp_world_size"])
        if width != 1 or (world and ranks != world):
            raise Unreadable(
                f"it is of {ranks} x {width} ranks, with {world} files of ZeRO's parts"
            )
        self._stage = int(self._optims[0].get("zero_stage", 1)) if world else 0
        if self._stage == 3 and len(self._models) != world:
            raise Unreadable(f"{len(self._models)} of the {world} ranks have a file of the model")
        self.step = int(first["global_steps"])
        groups = first["param_shapes"] or () if world else ()
        self.shapes: dict[str, Shape] = {n: tuple(s) for group in groups for n, s in group.items()}
        self._fragments: dict[str, list[_Fragment]] = {name: [] for name in self.shapes}
        locate = self._locate_equal_parts if self._stage == 3 else self._locate_consecutive_parts
        if world:
            locate(groups)
        for name, shape in self.shapes.items():
            if (size := sum(f.size for f in self._fragments[name])) != math.prod(shape):
                raise Unreadable(f"`{name}` has {math.prod(shape)} elements, and its shards {size}")
        self._frozen = dict(first.get("frozen_param_shapes") or {}) if self._stage == 3 else {}
        self.also: dict[str, str] = dict(first.get("shared_params") or {})
        self._module: Mapping[str, Tensor] = first["module"]
        self.names = [name for name in {**self._module, **self.shapes} if name not in self.also]
        if self._stage == 3:
            whole = {*self.shapes, *self._frozen, *first["buffer_names"]}
            if missing := [name for name in self.names if name not in whole]:
                raise Unreadable(f"no file has shards of {quote_names(missing)}")

    def _locate_equal_parts(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Find the elements of each parameter in the flat groups of stage 3."""
        world = len(self._optims)
        for group, shapes in enumerate(groups):
            start = 0
            for name, shape in shapes.items():
                count = math.prod(shape)
                length = -(-count // world)
                for rank in range(world):
                    size = min(length, max(count - rank * length, 0))
                    self._fragments[name].append(_Fragment(rank, group, start, size))
                start += length
            for rank in range(world):
                if (size := self._flat(rank, group).numel()) != start:
                    raise Unreadable(
                        f"group {group} of rank {rank} has {size} elements, not {start}"
                    )

    def _locate_consecutive_parts(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Find the elements of each parameter in the flat groups of stages 1 and 2: ranks' parts
        one after the other are the group's parameters one after the other."""
        world, paddings = len(self._optims), self._optims[0].get("param_alignment_paddings")
        for group, shapes in enumerate(groups):
            sizes = [self._flat(rank, group).numel() for rank in range(world)]
            ends = list(accumulate(sizes))
            start = 0
            for number, (name, shape) in enumerate(shapes.items()):
                stop = start + math.prod(shape)
                for rank, (size, end) in enumerate(zip(sizes, ends)):
                    first, last = max(start, end - size), min(stop, end)
                    if first < last:
                        fragment = _Fragment(rank, group, first - end + size, last - first)
                        self._fragments[name].append(fragment)
                start = stop + (paddings[group][number] if paddings else 0)
            if -(-start // (2 * world)) != -(-ends[-1] // (2 * world)):  # DeepSpeed aligns to this
                raise Unreadable(f"group {group} has {ends[-1]} elements, not {start}")

    @property
    def fingerprint(self) -> str:
        """Text that differs between checkpoints."""
        return repr((self.step, self._stage, len(self._optims), sorted(self.shapes.items())))

    def shape(self, name: str) -> Shape:
        """Return the full shape of a tensor."""
        if name in self.shapes:
            return self.shapes[name]
        return tuple(self._frozen[name] if name in self._frozen else self._module[name].shape)

    def dtypes(self, name: str) -> tuple[str, ...]:
        """Return the dtypes that a tensor has: of the optimizer's copy, and of the model's."""
        kinds = [self._module[name].dtype] if name in self._module else []
        if fragments := self._fragments.get(name):
            kinds.insert(0, self._flat(fragments[0].rank, fragments[0].group).dtype)
        return tuple(dict.fromkeys(DTYPE_NAMES[kind] for kind in kinds))

    def value(self, name: str) -> Tensor:
        """Return a full tensor; of a parameter that the optimizer trains, its own copy."""
        if name in self._fragments:
            return self._join(name, self._flat)
        if name in self._frozen:
            parts = [model["frozen_param_fragments"][name].reshape(-1) for model in self._models]
            shape = self.shape(name)
            return torch.cat(parts)[: math.prod(shape)].reshape(shape)
        return self._module[name]

    def _join(self, name: str, flat: Callable[[int, int], Tensor]) -> Tensor:
        shape, fragments = self.shapes[name], self._fragments[name]
        parts = [flat(f.rank, f.group)[f.start : f.start + f.size] for f in fragments]
        if sum(map(len, parts)) != math.prod(shape):
            raise Unreadable(f"a shard of `{name}` is cut off")
        return torch.cat(parts).reshape(shape)

    def _flat(self, rank: int, group: int) -> Tensor:
        key = "fp32_flat_groups" if self._stage == 3 else "single_partition_of_fp32_groups"
        flat: Tensor = self._optims[rank][key][group]
        return flat

    # -- the optimizer -----------------------------------------------------------------------------

    def _base(self, rank: int) -> Mapping[str, Any]:
        key = "optimizer_state_dict" if self._stage == 3 else "base_optimizer_state"
        base: Mapping[str, Any] = self._optims[rank][key]
        return base

    def _state(self, rank: int, group: int) -> Mapping[str, Any]:
        """Return the optimizer's state of a flat group, whose number is its place among all."""
        state: Mapping[str, Any] = self._base(rank)["state"].get(group, {})
        return state

    def entries(self, name: str) -> tuple[dict[str, str], dict[str, Any]]:
        """Return the optimizer's state of a parameter: the dtypes of its sharded tensors, and its
        other values."""
        place = self._fragments[name][0]
        flat, parts, values = self._flat(place.rank, place.group), dict[str, str](), {}
        for slot, value in self._state(place.rank, place.group).items():
            if isinstance(value, Tensor) and value.dim() == 1 and len(value) >= len(flat):
                parts[slot] = DTYPE_NAMES[value.dtype]
            elif not isinstance(value, Tensor) or value.numel() == 1:
                values[slot] = value
            else:
                raise Unreadable(f"`{slot}` of `{name}` has the shape {[*value.shape]}")
        return parts, values

    def moment(self, name: str, slot: str) -> Tensor:
        """Return the full tensor of the optimizer's state of a parameter."""
        return self._join(name, partial(self._slot, slot))

    def _slot(self, slot: str, rank: int, group: int) -> Tensor:
        value = self._state(rank, group).get(slot)
        if not isinstance(value, Tensor) or value.dim() != 1:
            raise Unreadable(f"rank {rank} has no `{slot}` of group {group}")
        return value

    def hypers(self, name: str) -> dict[str, Any]:
        """Return the hyperparameters of a parameter's group."""
        group = self._fragments[name][0].group
        owners = [g for g in self._base(0)["param_groups"] if group in g["params"]]
        return {key: value for key, value in owners[0].items() if key != "params"}

    @property
    def settings(self) -> Mapping[str, Any]:
        """The optimizer's part of DeepSpeed's own configuration."""
        config = self._models[0].get("ds_config")
        settings = config.get("optimizer") if isinstance(config, Mapping) else None
        return settings if isinstance(settings, Mapping) else {}


def _rank_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the files of the model and of the optimizer, by rank.

    Raises Unreadable if files are missing, or of other kinds of parallelism.
    """
    models, optims = dict[int, Path](), dict[int, Path]()
    for path in folder.iterdir():
        if _OTHER.fullmatch(path.name):
            raise Unreadable(f"`{path.name}` is of tensor, pipeline or expert parallelism")
        if match := _OPTIMIZER.fullmatch(path.name):
            optims[int(match[1])] = path
        elif match := _MODEL.fullmatch(path.name):
            models[int(match[1] or 0)] = path
    for kind, files in (("the model", models), ("ZeRO's parts", optims)):
        if missing := sorted({*range(max(files, default=-1) + 1)} - files.keys()):
            raise Unreadable(f"the file of {kind} of rank {missing[0]} is missing")
    if not models:
        raise Unreadable("no file of the model is there (`mp_rank_00_model_states.pt`)")
    return [models[k] for k in sorted(models)], [optims[k] for k in sorted(optims)]


def _load(path: Path) -> Any:
    """Read a file without running code; its tensors are mapped, and read when they are used."""
    try:
        with _LOADING, torch.serialization.safe_globals(_STAND_INS):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except OSError:
        raise
    except Exception as error:  # of torch or of the pickle
        reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]
        unknown = re.search(r"GLOBAL (\S+)", str(error))
        what = f"it holds an object of `{unknown[1]}`" if unknown else reason[0]
        raise Unreadable(f"`{path.name}` cannot be read without running code: {what}") from error
