"""Optimizer state that other programs have written with torch.distributed.checkpoint.

All forms of torch's `get_state_dict` are read: `state` by parameter name, and `param_groups` by
number, each with the names of its parameters, or flattened, by parameter name.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal, quote_names
from schedlang.runtime.checkpointing import archive, checkpoint_folders
from schedlang.runtime.checkpointing.boxes import (
    BoxedTensor,
    read_parts,
    read_together,
    read_value,
    replicated_tensor,
    without_function_modes,
    zeros,
)
from schedlang.runtime.checkpointing.index import DTYPES, Index, Unreadable
from schedlang.runtime.checkpointing.optimizer_state import (
    NOT_SAVED,
    SavedOptimizer,
    describe_optimizer,
    load_optimizer,
    trained_parameters,
)
from schedlang.runtime.checkpointing.plain_values import equal_values, to_plain
from schedlang.runtime.program import Program
from schedlang.runtime.redistribution.sharding import TensorSlice
from schedlang.runtime.storage.folder import run_on_all_ranks
from schedlang.runtime.storage.offloaded_gradients import local_tensor

STATE, GROUPS, STEP = "state.", "param_groups", "step"
Diagnose = Callable[[BaseException], Diagnostic]


@dataclass(frozen=True)
class DcpOptimizer:
    """The optimizer's state in a folder, for a program; all its ranks have described it alike.

    saved  the state without large tensors; `keys`: (parameter, slot) -> name of a large one
    """

    folder: Path
    index: Index
    saved: SavedOptimizer
    keys: Mapping[tuple[str, str], str]

    @staticmethod
    def of(program: Program, folder: Path, diagnose: Diagnose) -> DcpOptimizer:
        """Describe the state in a folder; all ranks of the program must call this.

        Raises Refusal S633 or S636 on all ranks, before anything is changed.
        """
        current, a = describe_optimizer(program), program.assembly
        shapes = {name: tuple(a.holdings[name].layout.shape) for name in current.of}
        aliases = {alias: names[0] for names in a.ties for alias in names}

        def read() -> DcpOptimizer:
            index = checkpoint_folders.checked_index(folder, None)
            reader = _Reader(folder, index, shapes, aliases)
            return DcpOptimizer(folder, index, *reader.read(current))

        state = run_on_all_ranks(read, diagnose, (Exception,))
        archive.check_optimizer(program, state.saved)
        return state

    def load(self, program: Program, diagnose: Diagnose) -> None:
        """Load the state; all ranks of the program must call this."""
        mesh, holdings = program.assembly.ranks.mesh, program.assembly.holdings
        shardings = {key: holdings[name].sharding(mesh) for (name, _), key in self.keys.items()}
        parts = allocate_parts(program, self.saved)
        boxed = [
            BoxedTensor((self.keys[key],), local, tuple(holdings[key[0]].layout.shape), part)
            for key, (local, part) in parts.items()
        ]
        with without_function_modes(), torch.no_grad():
            read_together(self.folder, self.index, boxed, shardings, diagnose)
        load_optimizer(program, self.saved, {key: local for key, (local, _) in parts.items()})
        archive.settle_loaded(program)
        if steps := [_number(v[STEP]) for v in self.saved.values.values() if STEP in v]:
            program.step = int(max(steps))


def allocate_parts(
    program: Program, saved: SavedOptimizer
) -> dict[tuple[str, str], tuple[Tensor, TensorSlice]]:
    """Return zeros for this rank's shards of the state, and which part of the parameter each is,
    by parameter and slot."""
    mesh, rank = program.assembly.ranks.mesh, program.assembly.ranks.rank
    return {
        (name, slot): (
            zeros(local_tensor(parameter).shape, DTYPES[dtype]),
            program.assembly.holdings[name].part(mesh, rank),
        )
        for name, parameter in trained_parameters(program).items()
        for slot, dtype in saved.parts.get(name, {}).items()
    }


def add_group(saved: SavedOptimizer, name: str, hyper: dict[str, Any]) -> None:
    """Give a parameter these hyperparameters; equal ones are one group."""
    number = next((k for k, g in enumerate(saved.groups) if equal_values(g, hyper)), None)
    if number is None:
        number = len(saved.groups)
        saved.groups.append(hyper)
    saved.of[name] = number


class _Reader:
    """Reads the state of the parameters of these full shapes, by all their names."""

    def __init__(
        self,
        folder: Path,
        index: Index,
        shapes: Mapping[str, tuple[int, ...]],
        aliases: Mapping[str, str],
    ) -> None:
        self.folder, self.index, self.shapes, self.aliases = folder, index, shapes, aliases
        entries = [*self._split_keys((*index.tensors, *index.values))]
        heads = Counter(head for head, *_ in entries).most_common(1)
        if not heads:
            raise state_refusal("the folder has no optimizer state of the model's parameters")
        self.head = heads[0][0]
        self.entries = [(n, slot, key) for head, n, slot, key in entries if head == self.head]

    def read(self, current: SavedOptimizer) -> tuple[SavedOptimizer, dict[tuple[str, str], str]]:
        """Return the state, and the names of its large tensors. Raises Refusal S636."""
        saved, keys = SavedOptimizer(kind=current.kind), dict[tuple[str, str], str]()
        for name, slot, key in self.entries:
            entry = self.index.tensors.get(key)
            if entry is not None and entry.shape == self.shapes[name]:
                saved.parts.setdefault(name, {})[slot] = entry.dtype
                keys[name, slot] = key
            elif entry is None or math.prod(entry.shape) == 1:
                saved.values.setdefault(name, {})[slot] = to_plain(slot, self._value(key))
            else:
                shapes = f"{[*entry.shape]}, and the parameter {[*self.shapes[name]]}"
                raise state_refusal(f"`{slot}` of `{name}` has the shape {shapes}")
        hypers = self._hypers() or {name: current.groups[k] for name, k in current.of.items()}
        known = set().union(*current.groups)
        for name, hyper in hypers.items():
            check_hypers(hyper.keys(), known)
            add_group(saved, name, hyper)
        return saved, keys

    def _split_keys(self, keys: Sequence[str]) -> Iterator[tuple[str, str, str, str]]:
        """Yield (head, parameter, slot, key) of the keys that are state of a parameter."""
        for key in keys:
            head, mark, rest = key.partition(STATE)
            name, _, slot = rest.rpartition(".")
            name = self.aliases.get(name, name)
            if mark and (not head or head.endswith(".")) and name in self.shapes:
                yield head, name, slot, key

    def _hypers(self) -> dict[str, dict[str, Any]]:
        """Return the hyperparameters by parameter; empty if the folder has none."""
        whole, tables = f"{self.head}{GROUPS}", dict[str, dict[str, Any]]()
        if whole in self.index.values:
            groups = read_value(self.folder, self.index, (whole,))
            tables = {str(number): group for number, group in enumerate(groups)}
        for key in (*self.index.values, *self.index.tensors):
            if key.startswith(f"{whole}."):
                owner, _, hyper = key.removeprefix(f"{whole}.").rpartition(".")
                tables.setdefault(owner, {})[hyper] = self._value(key)
        hypers: dict[str, dict[str, Any]] = {}
        for owner, table in tables.items():  # of a group with its parameters, or of a parameter
            group = {key: to_plain(key, v) for key, v in table.items() if key not in NOT_SAVED}
            names = table.get("params", [owner])
            hypers |= {self.aliases.get(name, name): group for name in names}
        return hypers

    def _value(self, key: str) -> Any:
        """Return a value of one element, or plain data."""
        if key in self.index.values:
            return read_value(self.folder, self.index, (key,))
        entry = self.index.tensors[key]
        if math.prod(entry.shape) != 1:
            raise Unreadable(f"`{key}` has the shape {[*entry.shape]}")
        value = replicated_tensor((key,), zeros(entry.shape, DTYPES[entry.dtype]))
        with without_function_modes():
            read_parts(self.folder, self.index, [value])
        return value.local


def _number(value: Any) -> float:
    return float(value["tensor"] if isinstance(value, Mapping) else value)


def check_hypers(saved: Set[str], known: Set[str]) -> None:
    """Refuse (S636) hyperparameters of another kind of optimizer."""
    if saved - known and known - saved:
        raise state_refusal(
            f"its groups have {quote_names(sorted(saved - known))}, "
            f"and the program's {quote_names(sorted(known - saved))}"
        )


def state_refusal(note: str) -> Refusal:
    """Return the refusal of a folder's optimizer state that does not fit the program (S636)."""
    return Refusal.of(
        "S636",
        "the optimizer state in the folder does not fit the program's optimizer",
        notes=(note,),
        helps=(
            "build the program with the optimizer that wrote the folder",
            "or take the weights alone: leave out `optimizer=True`",
        ),
    )
