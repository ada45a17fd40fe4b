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
        return sum(tensor.bytes for tensor in (*self.parameters, *self.buffers))

    def text(self) -> str:
        """Format as tables, with equal layers on one line."""
        position = ", ".join(f"{axis}={index}" for axis, index in self.at.items())
        count = f"{len(self.parameters)} parameters of {len(self.modules)} modules"
        lines = [
            f"rank {self.rank} of {self.world}   {position}   {count}, {format_bytes(self.bytes)}",
            "",
        ]
        rows = [("parameters", "", "whole", "part", "dtype", "bytes")]
        rows += [_row(group) for group in _group_equal_layers((*self.parameters, *self.buffers))]
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
        for file_slice in self.slices:
            by_file.setdefault(file_slice.file, []).append(file_slice)
        total = sum(file_slice.bytes for file_slice in self.slices)
        lines = [
            f"reads   {len(self.slices)} slices of {len(by_file)} files, {format_bytes(total)}"
        ]
        for file, file_slices in sorted(by_file.items()):
            names = len({file_slice.name for file_slice in file_slices})
            bytes_text = format_bytes(sum(file_slice.bytes for file_slice in file_slices))
            lines.append(f"  {file}   {len(file_slices)} slices of {names} tensors, {bytes_text}")
        return lines

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "rank": self.rank,
            "world": self.world,
            "at": dict(self.at),
            "bytes": self.bytes,
            "parameters": [_plain(item) for item in self.parameters],
            "buffers": [_plain(item) for item in self.buffers],
            "modules": list(self.modules),
            "groups": [{"axes": list(a), "ranks": list(ranks)} for a, ranks in self.groups],
            "reads": None if self.slices is None else [_plain(item) for item in self.slices],
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
        parameter_facts = plan.model.parameters[name]
        parameters.append(_one(name, tuple(parameter_facts.shape), part, parameter))
    for name, buffer in a.buffers.items():
        buffers.append(_one(name, tuple(buffer.shape), tuple(buffer.shape), buffer))
    owners = dict.fromkeys(tensor.name.rpartition(".")[0] for tensor in (*parameters, *buffers))
    return tuple(parameters), tuple(buffers), tuple(owners)


def _one(name: str, full_shape: tuple[int, ...], part: tuple[int, ...], value: Any) -> LocalTensor:
    from schedlang.runtime.storage.quantized_parameters import quantized_of

    quantized = quantized_of(value)
    if quantized is not None:
        size = quantized.codes.nbytes + quantized.scales.nbytes
        return LocalTensor(name, full_shape, part, quantized.coding.book.kind, size)
    dtype = str(value.dtype).removeprefix("torch.")
    return LocalTensor(name, full_shape, part, dtype, math.prod(part) * value.element_size())


def _axes(plan: Plan, ranks: Sequence[int]) -> tuple[str, ...]:
    """Return the axes along which ranks differ."""
    points = [plan.mesh.coordinates(rank) for rank in ranks]
    return tuple(name for name in plan.mesh.sizes if len({point[name] for point in points}) > 1)


def _slices(plan: Plan, program: Program, weights: Path) -> tuple[FileSlice, ...]:
    """Return the slices of files for this rank's parts before ZeRO shards them, as `build` reads
    them."""
    from dataclasses import replace

    import torch

    from schedlang.runtime.initial.weight_files import TargetPart, files_of

    model, mesh, rank = plan.model.base.model, plan.mesh, program.assembly.ranks.rank
    targets = []
    for name, parameter in program.assembly.parameters.items():
        if plan.model.initializer_of(name) is not None:
            continue
        holding = replace(program.assembly.holdings[name], sliced=())
        shape = holding.local_shape(mesh, rank)
        part = torch.empty(shape, dtype=parameter.dtype, device="meta")
        original = plan.model.unique_parameters[name]
        full_tensor = torch.empty(tuple(original.shape), dtype=parameter.dtype, device="meta")
        targets.append(TargetPart(original.names, full_tensor, part, holding.part(mesh, rank)))
    return files_of(weights, model).plan_reads(targets)


# -- text ------------------------------------------------------------------------------------------


def _group_equal_layers(tensors: Sequence[LocalTensor]) -> list[list[LocalTensor]]:
    """Group parameters and buffers of equal layers."""
    groups: dict[object, list[LocalTensor]] = {}
    for tensor in tensors:
        groups.setdefault(
            (shape_of(tensor.name), tensor.whole, tensor.part, tensor.dtype), []
        ).append(tensor)
    return list(groups.values())


def _row(group: Sequence[LocalTensor]) -> tuple[str, str, str, str, str, str]:
    first_tensor = group[0]
    layers = [int(numbers[0]) for tensor in group if (numbers := re.findall(r"\d+", tensor.name))]
    layers_text = f"{layers[0]} to {layers[-1]}" if len(group) > 1 and layers else ""
    name = fold_names([tensor.name for tensor in group])
    total = format_bytes(sum(tensor.bytes for tensor in group))
    return (
        f"  {name}",
        layers_text,
        str([*first_tensor.whole]),
        str([*first_tensor.part]),
        first_tensor.dtype,
        total,
    )


def _ranks(ranks: Sequence[int]) -> str:
    """Format ranks as a range with a step where they are one."""
    steps = {b - a for a, b in zip(ranks, ranks[1:])}
    if len(ranks) > 4 and len(steps) == 1:
        (step,) = steps
        return f"{ranks[0]} to {ranks[-1]}" + (f" by {step}" if step > 1 else "")
    return ", ".join(map(str, ranks[:8])) + (" .." if len(ranks) > 8 else "")


def _plain(item: Any) -> dict[str, Any]:
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in vars(item).items()
    }
