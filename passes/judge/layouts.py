"""Match each rank's parameters with the original's: by values, which are all distinct, or by names.

A layout is a number for each element of a rank's tensor: its index in the concatenation of all
original parameters, -1 for padding. One form thus describes every layout: shards of any dim in any
order, interleaved and fused weights, flat parameters, transposed ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from schedlang.diagnostics.diagnostic import Refusal, kind_of, quote_names
from schedlang.passes.judge.program import TrainingProgram
from schedlang.passes.judge.regions import Region
from schedlang.runtime.comm import world as comm

# parts of names that wrappers insert
WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module")
_MOST_LISTED = 8


class ElementIndex:
    """Index of all elements of the original's parameters, to look them up by value."""

    def __init__(self, module: nn.Module) -> None:
        self.parameters = dict(module.named_parameters())  # tied ones under their first name
        self.shapes = {name: p.shape for name, p in self.parameters.items()}
        self.aliases: dict[str, str] = {}
        first_names = {id(p): name for name, p in self.parameters.items()}
        for name, p in module.named_parameters(remove_duplicate=False):
            self.aliases[name] = first_names[id(p)]
        self.starts: dict[str, int] = {}
        count = 0
        for name, p in self.parameters.items():
            self.starts[name] = count
            count += p.numel()
        self.names = list(self.starts)
        self._bounds = torch.tensor([*list(self.starts.values())[1:]], dtype=torch.long)
        self.dtypes = {p.dtype for p in self.parameters.values() if p.is_floating_point()}

    @cached_property
    def _sorted_values(self) -> tuple[Tensor, Tensor, Tensor]:
        """All values sorted, the index of each, and whether each value occurs once."""
        flat = [p.detach().reshape(-1).double() for p in self.parameters.values()]
        values = torch.cat(flat) if flat else torch.empty(0, dtype=torch.float64)
        ordered, order = values.sort()
        repeated = ordered[1:] == ordered[:-1]
        unique = torch.ones_like(ordered, dtype=torch.bool)
        unique[1:] &= ~repeated
        unique[:-1] &= ~repeated
        return ordered, order, unique

    def find(self, values: Tensor) -> Tensor:
        """Return the index of each element; -1 where its value is unknown, or occurs twice."""
        ordered, order, unique = self._sorted_values
        flat = values.detach().reshape(-1).double()
        if not len(ordered) or not len(flat):
            return torch.full((len(flat),), -1)
        positions = torch.searchsorted(ordered, flat).clamp(max=len(ordered) - 1)
        matches = (ordered[positions] == flat) & unique[positions]
        return torch.where(matches, order[positions], -1)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle names and shapes, without values."""
        return {k: v for k, v in vars(self).items() if k not in ("parameters", "_sorted_values")}

    def clear_cache(self) -> None:
        """Free the sorted values; the next lookup builds them again."""
        self.__dict__.pop("_sorted_values", None)

    def represents(self, dtype: torch.dtype) -> bool:
        """Return whether a dtype represents some original dtype exactly; it may be wider."""
        return any(torch.promote_types(dtype, original) == dtype for original in self.dtypes)

    def equals_elements(self, name: str, numbers: Tensor, values: Tensor) -> bool:
        """Return whether values equal a parameter's elements at these indices."""
        p = self.parameters[name].detach().to(values.dtype)
        if numbers.numel() != values.numel():
            return False
        region = Region.from_numbers(numbers.reshape(-1) - self.starts[name], numbers.shape)
        elements = region.read(p.reshape(-1)).reshape(values.shape)
        return torch.equal(elements, values.detach())

    def find_window(self, name: str, values: Tensor) -> Tensor | None:
        """Return the indices of the one window of a parameter, along one dim, with these values.

        Single values may occur many times, as in a low dtype. None if no window or several have
        them, or if the window starts and ends anywhere else than at a multiple of its size.
        """
        p = self.parameters[name].detach().to(values.dtype)
        dims = [d for d, (n, k) in enumerate(zip(p.shape, values.shape)) if n != k]
        if p.dim() != values.dim() or len(dims) != 1 or not values.numel():
            return None
        dim, size = dims[0], values.shape[dims[0]]
        starts = [
            start
            for start in range(0, p.shape[dim] - size + 1, size)
            if torch.equal(p.narrow(dim, start, size), values)
        ]
        return self.numbers(name).narrow(dim, starts[0], size) if len(starts) == 1 else None

    def still_matches(self, tensor: RankTensor, values: Tensor) -> bool:
        """Return whether a rank's tensor still has the values of the elements that it holds."""
        flat = values.reshape(-1)
        return not tensor.padding and all(
            torch.equal(local.read(flat).reshape(-1), region.read(p).reshape(-1).to(values.dtype))
            for name, (local, region) in tensor.pieces.items()
            for p in (self.parameters[name].detach().reshape(-1),)
        )

    def numbers(self, name: str) -> Tensor:
        """Return the index of each element of a parameter, in the parameter's shape."""
        start, shape = self.starts[name], self.shapes[name]
        return torch.arange(start, start + shape.numel()).reshape(shape)

    def split_by_parameter(
        self, index: Tensor, shape: Sequence[int]
    ) -> dict[str, tuple[Region, Region]]:
        """Return by parameter the region in a rank's tensor, and the region in the parameter."""
        matched = (index >= 0).nonzero().reshape(-1)
        owners = torch.bucketize(index[matched], self._bounds, right=True)
        regions = {}
        for owner in sorted(set(owners.tolist())):
            name, local = self.names[owner], matched[owners == owner]
            original = index[local] - self.starts[name]
            regions[name] = Region.from_numbers(local), Region.from_numbers(original, shape)
        return regions


@dataclass(frozen=True)
class RankTensor:
    """A rank's parameter, and which elements of the original it holds.

    name        its name on the rank
    matched_by  "values" or "name"
    padding     number of elements that are not the original's
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    matched_by: str  # "values" or "name"
    mesh: tuple[tuple[str, int], ...] = ()
    pieces: Mapping[str, tuple[Region, Region]] = field(default_factory=dict)
    padding: int = 0  # elements that are not the original's

    def describes(self, name: str, p: nn.Parameter) -> bool:
        """Return whether this describes a parameter, by all facts except its values."""
        local = local_tensor(p)
        facts = name, tuple(local.shape), local.dtype, p.requires_grad, _mesh_axes(p)
        return facts == (self.name, self.shape, self.dtype, self.requires_grad, self.mesh)


def local_tensor(value: Tensor) -> Tensor:
    """Return a tensor's local part, if it is a DTensor."""
    return value.to_local() if isinstance(value, DTensor) else value


def unique_parameters(modules: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield a rank's parameters, each once, with their names.

    With several chunks, names begin with the chunk's number.
    """
    seen: set[int] = set()
    for number, module in enumerate(modules):
        for name, p in module.named_parameters():
            if id(p) not in seen:
                seen.add(id(p))
                yield (f"{number}:{name}" if len(modules) > 1 else name), p


def candidate_names(name: str) -> Iterator[str]:
    """Yield possible original names: the name itself, and the name without parts from wrappers."""
    parts = name.partition(":")[2].split(".") if ":" in name else name.split(".")
    yield ".".join(parts)
    for count in range(1, len(WRAPPERS) + 1):
        yield ".".join(part for part in parts if part not in WRAPPERS[:count])
    while parts and parts[0] == "module":
        parts = parts[1:]
        yield ".".join(parts)


def find_original_name(program: TrainingProgram, name: str, names: Mapping[str, Any]) -> str | None:
    """Return the original's name: from the program's `names`, or derived from the name itself."""
    bare = name.partition(":")[2] or name
    given_name = program.original_name(bare)
    if given_name is not None:
        if given_name not in names:
            message = f"`names` maps `{bare}` to `{given_name}`, which the original does not have"
            helps = (f"the original has {quote_names(names)}",)
            raise Refusal.of("S767", message, helps=helps)
        return given_name
    return next((candidate for candidate in candidate_names(name) if candidate in names), None)


def match_parameters(
    program: TrainingProgram, table: ElementIndex
) -> tuple[list[RankTensor], list[str]]:
    """Match this rank's parameters; also return descriptions of those without a match."""
    matched, unmatched = [], []
    for name, p in unique_parameters(program.modules):
        local = local_tensor(p.detach())
        if local.is_floating_point() and not table.represents(local.dtype):
            dtypes = ", ".join(_dtype_name(dtype) for dtype in table.dtypes)
            unmatched.append(f"`{name}` is {_dtype_name(local.dtype)}, not {dtypes}")
            continue
        numbers, matched_by = _find_indices(program, table, name, p, local)
        if numbers is None:
            unmatched.append(f"`{name}` {tuple(p.shape)}")
            continue
        pieces, padding = table.split_by_parameter(numbers, local.shape), int((numbers < 0).sum())
        shape = tuple(local.shape)
        facts = name, shape, local.dtype, p.requires_grad, matched_by
        matched.append(RankTensor(*facts, _mesh_axes(p), pieces, padding))
    table.clear_cache()
    return matched, unmatched


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _mesh_axes(p: nn.Parameter) -> tuple[tuple[str, int], ...]:
    if not isinstance(p, DTensor):
        return ()
    names = p.device_mesh.mesh_dim_names or [f"dim {k}" for k in range(p.device_mesh.ndim)]
    return tuple(zip(names, p.device_mesh.shape))


def _find_indices(
    program: TrainingProgram, table: ElementIndex, name: str, p: nn.Parameter, local: Tensor
) -> tuple[Tensor | None, str]:
    """Return the indices of a parameter's elements and how they were found; None: no match.

    A parameter with a known name whose values match is done; only others are looked up by value.
    """
    original = find_original_name(program, name, table.aliases)
    by_name = None
    if original is not None and (
        isinstance(p, DTensor) or p.shape == table.shapes[table.aliases[original]]
    ):
        by_name = _indices_by_name(program, table, name, table.aliases[original], p)
        if by_name is not None and table.equals_elements(table.aliases[original], by_name, local):
            return by_name.reshape(-1), "values" if local.numel() else "name"
    index = table.find(local)
    if bool((index >= 0).all()) and (local.numel() or original is None):
        return index, "values"
    if original is not None and by_name is None:
        by_name = _indices_by_name(program, table, name, table.aliases[original], p)
    if by_name is not None:
        return by_name.reshape(-1), "name"
    if original is not None:
        window = table.find_window(table.aliases[original], local)
        if window is not None:
            return window.reshape(-1), "values"
    return (index if _is_padding(p, local, index) else None), "values"


def _is_padding(p: nn.Parameter, local: Tensor, index: Tensor) -> bool:
    """Return whether unmatched elements are padding: zeros, a dim's end, a flat parameter's."""
    unknown = index < 0
    flat = type(p).__name__ == "FlatParameter"
    if flat:
        return True
    if not bool((index >= 0).any()):
        return not local.numel()
    if not bool(local.reshape(-1)[unknown].any()):
        return True
    shaped = unknown.reshape(local.shape)
    for dim in range(local.dim()):
        rows = shaped.movedim(dim, 0).reshape(local.shape[dim], -1)
        full, partial = rows.all(1), rows.any(1)
        first_full = int(full.long().argmax())
        if bool((full == partial).all()) and bool(full[first_full:].all()):
            return True
    return False


def _indices_by_name(
    program: TrainingProgram, table: ElementIndex, name: str, original: str, p: nn.Parameter
) -> Tensor | None:
    """Return the indices of a rank's part of a tensor with a known name; None if shapes differ."""
    full = table.numbers(original)
    if isinstance(p, DTensor):
        if p.shape != full.shape:
            return None
        spread = distribute_tensor(full, p.device_mesh, p.placements, src_data_rank=None)
        return spread.to_local()
    layout = (program.layouts or {}).get(name.partition(":")[2] or name)
    if layout is not None:
        return declared_shard(name, layout, full)
    return full if p.shape == full.shape else None


def declared_shard(name: str, declaration: Any, full: Tensor) -> Tensor:
    """Return the part of a full tensor that this rank has by the user's declaration."""
    placement, ranks = declaration if isinstance(declaration, tuple) else (declaration, None)
    rank = comm.rank()
    shard_ranks = list(range(comm.size())) if ranks is None else list(ranks)
    if isinstance(placement, Replicate):
        return full
    valid_dim = isinstance(placement, Shard) and -full.dim() <= placement.dim < full.dim()
    if not valid_dim or rank not in shard_ranks:
        reason = kind_of(placement) if not isinstance(placement, Shard) else f"not of rank {rank}"
        if isinstance(placement, Shard) and not valid_dim:
            reason = f"of dim {placement.dim}, and it has {full.dim()}"
        message = f"the layout of `{name}` is {reason}"
        helps = (
            "give `Shard(dim)` or `Replicate()` for all ranks, or a pair with the list of ranks "
            "that hold the shards, including this rank: `(Shard(0), [0, 1])`",
        )
        raise Refusal.of("S767", message, helps=helps)
    parts = full.chunk(len(shard_ranks), placement.dim)
    index = shard_ranks.index(rank)
    return parts[index] if index < len(parts) else full.narrow(placement.dim, 0, 0)


# ---- Layouts of all ranks.


@dataclass(frozen=True)
class RankLayouts:
    """Layouts of all ranks' parameters, and the original's elements that no rank holds."""

    ranks: tuple[tuple[RankTensor, ...], ...]
    table: ElementIndex = field(repr=False)

    @cached_property
    def missing(self) -> dict[str, int]:
        """Number of elements that no rank holds, by parameter, where there are any."""
        lost = {}
        for name in self.table.names:
            held = torch.zeros(self.table.shapes[name].numel(), dtype=torch.bool)
            for tensor in self.all_tensors:
                if name in tensor.pieces:
                    tensor.pieces[name][1].write(held, True)
            lost[name] = int((~held).sum())
        return {name: count for name, count in lost.items() if count}

    def still_matches(self, rank: int, modules: Sequence[nn.Module], table: ElementIndex) -> bool:
        """Return whether a rank's parameters still have the values and layouts that were found."""
        current, earlier = [*unique_parameters(modules)], self.ranks[rank]
        return len(current) == len(earlier) and all(
            tensor.matched_by == "values"
            and tensor.describes(name, p)
            and table.still_matches(tensor, local_tensor(p.detach()))
            for (name, p), tensor in zip(current, earlier, strict=True)
        )

    def checked(self, rank: int, modules: Sequence[nn.Module]) -> RankLayouts:
        """Return the layouts; refuse (S767) modules of a rank that have other parameters."""
        old = [(tensor.name, tensor.shape) for tensor in self.ranks[rank]]
        new = [(name, tuple(local_tensor(p).shape)) for name, p in unique_parameters(modules)]
        if old != new:
            other = next((name for name, shape in new if (name, shape) not in old), "nothing")
            message = f"`program` makes a different module when it is called again: `{other}`"
            helps = ("its result may depend only on the model and the rank",)
            raise Refusal.of("S767", message, helps=helps)
        return self

    @property
    def all_tensors(self) -> Iterator[RankTensor]:
        """All parameters of all ranks."""
        return (tensor for rank in self.ranks for tensor in rank)

    @cached_property
    def groups(self) -> dict[str, str]:
        """The first name of the group that a parameter trains in, by original or program name.

        Parameters that a program fuses share one weight decay, so the original's get one, too.
        """
        parents = {name: name for name in self.table.names}

        def of(name: str) -> str:
            while parents[name] != name:
                name = parents[name]
            return name

        for tensor in self.all_tensors:
            joined = sorted((of(name) for name in tensor.pieces), key=self.table.names.index)
            for joined_name in joined[1:]:
                parents[joined_name] = joined[0]
        group_names = {name: of(name) for name in parents}
        for tensor in self.all_tensors:
            for name in tensor.pieces:
                group_names.setdefault(tensor.name, group_names[name])
        return group_names

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtype that ranks store a parameter in, by original name; maybe wider than its own."""
        stored = {name: tensor.dtype for tensor in self.all_tensors for name in tensor.pieces}
        return {name: stored[key] for name, key in self.table.aliases.items() if key in stored}

    @property
    def axes(self) -> dict[str, int]:
        """Sizes of the mesh axes of all DTensors."""
        return {name: size for tensor in self.all_tensors for name, size in tensor.mesh if size > 1}

    @property
    def padding(self) -> dict[str, int]:
        """Number of padding elements on all ranks, by tensor."""
        count: Counter[str] = Counter()
        for tensor in self.all_tensors:
            count[tensor.name] += tensor.padding
        return dict(+count)


def join_layouts(
    results: Sequence[tuple[list[RankTensor], list[str]]], table: ElementIndex
) -> RankLayouts:
    """Join all ranks' layouts; refuse (S763) tensors that match nothing in the original."""
    unmatched = {
        text: rank for rank, (_, texts) in reversed([*enumerate(results)]) for text in texts
    }
    holdings = RankLayouts(tuple(tuple(tensors) for tensors, _ in results), table)
    if not unmatched:
        return holdings
    (text, rank), *_ = unmatched.items()
    others = f", and {len(unmatched) - 1} more" if len(unmatched) > 1 else ""
    notes = [f"on rank {rank}: {', '.join(list(unmatched)[:_MOST_LISTED])}"]
    if holdings.missing:
        notes.append(f"no rank holds {quote_names(holdings.missing)} of the original")
    raise Refusal.of(
        "S763",
        f"{text} on rank {rank} cannot be matched with the original{others}",
        notes=tuple(notes),
        helps=(
            "keep the values and dtype of the model that `program` gets: a weight is found by "
            "its values, also if it is sharded, fused or renamed",
            'or give the match: `names={"its.name": "original.name"}`, and of a plain part '
            '`layouts={"its.name": Shard(0)}`',
        ),
    )
