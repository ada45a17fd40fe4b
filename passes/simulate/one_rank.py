"""Program of one rank as it would be built, without values or other ranks, for `plan --rank`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.tables import format_bytes, format_table
from schedlang.ir.plan import Plan
from schedlang.passes.analyze.prepare import prepare
from schedlang.passes.elaborate.rows import fold_names, shape_of
from schedlang.passes.simulate.one_rank_step import SimulatedStep, build_one_rank

if TYPE_CHECKING:
    from schedlang.passes.propagate.sharded_run import Loss
    from schedlang.runtime.initial.weight_files import FileSlice
    from schedlang.runtime.program import Program


@dataclass(frozen=True)
class LocalTensor:
    """A parameter or buffer on a rank: its full shape, and the shape of the local part."""

    name: str
    whole: tuple[int, ...]
    part: tuple[int, ...]
    dtype: str
    bytes: int


@dataclass(frozen=True)
class OneRank:
    """Everything that a rank would create.

    at       its coordinate along each axis
    modules  modules with parameters or buffers of their own here, by path
    groups   process groups that contain it, the world among them, by axes along which ranks differ
    slices   slices of files that it would read; None where no files were named
    """

    rank: int
    world: int
    at: Mapping[str, int]
    parameters: tuple[LocalTensor, ...]
    buffers: tuple[LocalTensor, ...]
    modules: tuple[str, ...]
    groups: tuple[tuple[tuple[str, ...], tuple[int, ...]], ...]
    slices: tuple[FileSlice, ...] | None = field(default=None)

    @property
    def bytes(self) -> int:
        """Bytes of all parts."""
        return sum(one.bytes for one in (*self.parameters, *self.buffers))

    def text(self) -> str:
        """Format as tables, with equal layers on one line."""
        place = ", ".join(f"{axis}={at}" for axis, at in self.at.items())
        count = f"{len(self.parameters)} parameters of {len(self.modules)} modules"
        lines = [
            f"rank {self.rank} of {self.world}   {place}   {count}, {format_bytes(self.bytes)}",
            "",
        ]
        rows = [("parameters", "", "whole", "part", "dtype", "bytes")]
        rows += [_row(those) for those in _group_equal_layers((*self.parameters, *self.buffers))]
        lines += format_table(rows)
        lines += ["", "groups"]
        for axes, ranks in self.groups:
            lines.append(f"  {', '.join(axes) or '-'}   {len(ranks)} ranks: {_ranks(ranks)}")
        if self.slices is not None:
            lines += ["", *self._read()]
        return "\n".join(line.rstrip() for line in lines)

    def _read(self) -> list[str]:
        assert self.slices is not None
        by_file: dict[str, list[FileSlice]] = {}
        for one in self.slices:
            by_file.setdefault(one.file, []).append(one)
        total = sum(one.bytes for one in self.slices)
        lines = [
            f"reads   {len(self.slices)} slices of {len(by_file)} files, {format_bytes(total)}"
        ]
        for file, those in sorted(by_file.items()):
            names = len({one.name for one in those})
            held = format_bytes(sum(one.bytes for one in those))
            lines.append(f"  {file}   {len(those)} slices of {names} tensors, {held}")
        return lines

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "rank": self.rank,
            "world": self.world,
            "at": dict(self.at),
            "bytes": self.bytes,
            "parameters": [_plain(one) for one in self.parameters],
            "buffers": [_plain(one) for one in self.buffers],
            "modules": list(self.modules),
            "groups": [{"axes": list(a), "ranks": list(ranks)} for a, ranks in self.groups],
            "reads": None if self.slices is None else [_plain(one) for one in self.slices],
        }


def describe_rank(
    plan: Plan,
    batch: Mapping[str, Any],
    rank: int,
    loss: Loss | None = None,
    weights: Path | None = None,
) -> OneRank:
    """Build the program of a rank on the meta device, as if all other ranks existed.

    `batch` is that of a full step; `weights` files of safetensors for the values.  Raises Refusal
    S109 for a rank outside the mesh, S643 where the files do not match.
    """
    from schedlang.runtime.batch import largest_part

    if not 0 <= rank < plan.mesh.world:
        title = f"the mesh has ranks 0 to {plan.mesh.world - 1}, not {rank}"
        raise Refusal.of("S109", title, helps=("give one of them: `--rank 0`",))
    sample = largest_part(batch, plan.share_weights, plan.micro)
    step = SimulatedStep(plan, prepare(plan, sample, loss), sample, loss)
    with build_one_rank(step, rank) as (program, tap):
        groups = {tuple(range(plan.mesh.world)), *(lane.ranks for lane in tap.lanes)}
        return OneRank(
            rank,
            plan.mesh.world,
            plan.mesh.coordinates(rank),
            *_held(plan, program),
            groups=tuple((_axes(plan, ranks), ranks) for ranks in sorted(groups, key=len)),
            slices=None if weights is None else _slices(plan, program, weights),
        )


def _held(
    plan: Plan, program: Program
) -> tuple[tuple[LocalTensor, ...], tuple[LocalTensor, ...], tuple[str, ...]]:
    """Return the parameters, the buffers, and the modules that own them."""
    a, rank, mesh = program.assembly, program.assembly.ranks.rank, plan.mesh
    parameters, buffers = [], []
    for name, parameter in a.parameters.items():
        part = a.holdings[name].local_shape(mesh, rank)
        fact = plan.model.parameters[name]
        parameters.append(_one(name, tuple(fact.shape), part, parameter))
    for name, buffer in a.buffers.items():
        buffers.append(_one(name, tuple(buffer.shape), tuple(buffer.shape), buffer))
    owners = dict.fromkeys(one.name.rpartition(".")[0] for one in (*parameters, *buffers))
    return tuple(parameters), tuple(buffers), tuple(owners)


def _one(name: str, whole: tuple[int, ...], part: tuple[int, ...], value: Any) -> LocalTensor:
    from schedlang.runtime.storage.quantized_parameters import quantized_of

    held = quantized_of(value)
    if held is not None:
        size = held.codes.nbytes + held.scales.nbytes
        return LocalTensor(name, whole, part, held.coding.book.kind, size)
    dtype = str(value.dtype).removeprefix("torch.")
    return LocalTensor(name, whole, part, dtype, math.prod(part) * value.element_size())


def _axes(plan: Plan, ranks: Sequence[int]) -> tuple[str, ...]:
    """Return the axes along which ranks differ."""
    at = [plan.mesh.coordinates(rank) for rank in ranks]
    return tuple(name for name in plan.mesh.sizes if len({place[name] for place in at}) > 1)


def _slices(plan: Plan, program: Program, weights: Path) -> tuple[FileSlice, ...]:
    """Return the slices of files for this rank's parts before ZeRO shards them, as `build` reads
    them."""
    from dataclasses import replace

    import torch

    from schedlang.runtime.initial.weight_files import TargetPart, files_of

    model, mesh, rank = plan.model.base.model, plan.mesh, program.assembly.ranks.rank
    rooms = []
    for name, parameter in program.assembly.parameters.items():
        if plan.model.initializer_of(name) is not None:
            continue
        holding = replace(program.assembly.holdings[name], sliced=())
        shape = holding.local_shape(mesh, rank)
        part = torch.empty(shape, dtype=parameter.dtype, device="meta")
        original = plan.model.unique_parameters[name]
        whole = torch.empty(tuple(original.shape), dtype=parameter.dtype, device="meta")
        rooms.append(TargetPart(original.names, whole, part, holding.part(mesh, rank)))
    return files_of(weights, model).plan_reads(rooms)


# -- text ------------------------------------------------------------------------------------------


def _group_equal_layers(held: Sequence[LocalTensor]) -> list[list[LocalTensor]]:
    """Group parameters and buffers of equal layers."""
    found: dict[object, list[LocalTensor]] = {}
    for one in held:
        found.setdefault((shape_of(one.name), one.whole, one.part, one.dtype), []).append(one)
    return list(found.values())


def _row(those: Sequence[LocalTensor]) -> tuple[str, str, str, str, str, str]:
    first = those[0]
    layers = [int(found[0]) for one in those if (found := re.findall(r"\d+", one.name))]
    where = f"{layers[0]} to {layers[-1]}" if len(those) > 1 and layers else ""
    name = fold_names([one.name for one in those])
    total = format_bytes(sum(one.bytes for one in those))
    return f"  {name}", where, str([*first.whole]), str([*first.part]), first.dtype, total


def _ranks(ranks: Sequence[int]) -> str:
    """Format ranks as a range with a step where they are one."""
    steps = {b - a for a, b in zip(ranks, ranks[1:])}
    if len(ranks) > 4 and len(steps) == 1:
        (step,) = steps
        return f"{ranks[0]} to {ranks[-1]}" + (f" by {step}" if step > 1 else "")
    return ", ".join(map(str, ranks[:8])) + (" .." if len(ranks) > 8 else "")


def _plain(one: Any) -> dict[str, Any]:
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in vars(one).items()
    }
