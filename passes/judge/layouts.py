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

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal, kind_of, quote_names
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
        first = {id(p): name for name, p in self.parameters.items()}
        for name, p in module.named_parameters(remove_duplicate=False):
            self.aliases[name] = first[id(p)]
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
        twice = ordered[1:] == ordered[:-1]
        alone = torch.ones_like(ordered, dtype=torch.bool)
        alone[1:] &= ~twice
        alone[:-1] &= ~twice
        return ordered, order, alone

    def find(self, values: Tensor) -> Tensor:
        """Return the index of each element; -1 where its value is unknown, or occurs twice."""
        ordered, order, alone = self._sorted_values
        flat = values.detach().reshape(-1).double()
        if not len(ordered) or not len(flat):
            return torch.full((len(flat),), -1)
        place = torch.searchsorted(ordered, flat).clamp(max=len(ordered) - 1)
        there = (ordered[place] == flat) & alone[place]
        return torch.where(there, order[place], -1)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle names and shapes, without values."""
        return {k: v for k, v in vars(self).items() if k not in ("parameters", "_found")}

    def clear_cache(self) -> None:
        """Free the sorted values; the next lookup builds them again."""
        self.__dict__.pop("_found", None)

    def represents(self, dtype: torch.dtype) -> bool:
        """Return whether a dtype represents some original dtype exactly; it may be wider."""
        return any(torch.promote_types(dtype, own) == dtype for own in self.dtypes)

    def equals_elements(self, name: str, numbers: Tensor, values: Tensor) -> bool:
        """Return whether values equal a parameter's elements at these indices."""
        p = self.parameters[name].detach().to(values.dtype)
        if numbers.numel() != values.numel():
            return False
        region = Region.from_numbers(numbers.reshape(-1) - self.starts[name], numbers.shape)
        here = region.read(p.reshape(-1)).reshape(values.shape)
        return torch.equal(here, values.detach())

    def still_matches(self, one: RankTensor, own: Tensor) -> bool:
        """Return whether a rank's tensor still has the values of the elements that it holds."""
        flat = own.reshape(-1)
        return not one.padding and all(
            torch.equal(here.read(flat).reshape(-1), there.read(p).reshape(-1).to(own.dtype))
            for name, (here, there) in one.pieces.items()
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
        here = (index >= 0).nonzero().reshape(-1)
        owners = torch.bucketize(index[here], self._bounds, right=True)
        found = {}
        for owner in sorted(set(owners.tolist())):
            name, mine = self.names[owner], here[owners == owner]
            there = index[mine] - self.starts[name]
            found[name] = Region.from_numbers(mine), Region.from_numbers(there, shape)
        return found


@dataclass(frozen=True)
class RankTensor:
    """A rank's parameter, and which elements of the original it holds.

    name      its name on the rank
    `matched_by`      "values" or "name"
    padding   number of elements that are not the original's
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
        own = local_tensor(p)
        seen = name, tuple(own.shape), own.dtype, p.requires_grad, _mesh_axes(p)
        return seen == (self.name, self.shape, self.dtype, self.requires_grad, self.mesh)


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
    words = name.partition(":")[2].split(".") if ":" in name else name.split(".")
    yield ".".join(words)
    for count in range(1, len(WRAPPERS) + 1):
        yield ".".join(word for word in words if word not in WRAPPERS[:count])
    while words and words[0] == "module":
        words = words[1:]
        yield ".".join(words)


def find_original_name(program: TrainingProgram, name: str, known: Mapping[str, Any]) -> str | None:
    """Return the original's name: from the program's `names`, or derived from the name itself."""
    plain = name.partition(":")[2] or name
    given_name = program.original_name(plain)
    if given_name is not None:
        if given_name not in known:
            title = f"`names` maps `{plain}` to `{given_name}`, which the original does not have"
            helps = (f"the original has {quote_names(known)}",)
            raise Refusal(Diagnostic("S767", title, helps=helps))
        return given_name
    return next((one for one in candidate_names(name) if one in known), None)


def match_parameters(
    program: TrainingProgram, table: ElementIndex
) -> tuple[list[RankTensor], list[str]]:
    """Match this rank's parameters; also return descriptions of those without a match."""
    found, lost = [], []
    for name, p in unique_parameters(program.modules):
        own = local_tensor(p.detach())
        if own.is_floating_point() and not table.represents(own.dtype):
            meant = ", ".join(_dtype_name(one) for one in table.dtypes)
            lost.append(f"`{name}` is {_dtype_name(own.dtype)}, not {meant}")
            continue
        numbers, by = _find_indices(program, table, name, p, own)
        if numbers is None:
            lost.append(f"`{name}` {tuple(p.shape)}")
            continue
        pieces, padding = table.split_by_parameter(numbers, own.shape), int((numbers < 0).sum())
        shape = tuple(own.shape)
        about = name, shape, own.dtype, p.requires_grad, by
        found.append(RankTensor(*about, _mesh_axes(p), pieces, padding))
    table.clear_cache()
    return found, lost


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _mesh_axes(p: nn.Parameter) -> tuple[tuple[str, int], ...]:
    if not isinstance(p, DTensor):
        return ()
    words = p.device_mesh.mesh_dim_names or [f"dim {k}" for k in range(p.device_mesh.ndim)]
    return tuple(zip(words, p.device_mesh.shape))


def _find_indices(
    program: TrainingProgram, table: ElementIndex, name: str, p: nn.Parameter, own: Tensor
) -> tuple[Tensor | None, str]:
    """Return the indices of a parameter's elements and how they were found; None: no match.

    A parameter with a known name whose values match is done; only others are looked up by value.
    """
    original = find_original_name(program, name, table.aliases)
    known = None
    if original is not None and (
        isinstance(p, DTensor) or p.shape == table.shapes[table.aliases[original]]
    ):
        known = _indices_by_name(program, table, name, table.aliases[original], p)
        if known is not None and table.equals_elements(table.aliases[original], known, own):
            return known.reshape(-1), "values" if own.numel() else "name"
    index = table.find(own)
    if bool((index >= 0).all()) and (own.numel() or original is None):
        return index, "values"
    if original is not None and known is None:
        known = _indices_by_name(program, table, name, table.aliases[original], p)
    if known is not None:
        return known.reshape(-1), "name"
    return (index if _is_padding(p, own, index) else None), "values"


def _is_padding(p: nn.Parameter, own: Tensor, index: Tensor) -> bool:
    """Return whether unmatched elements are padding: zeros, a dim's end, a flat parameter's."""
    unknown = index < 0
    flat = type(p).__name__ == "FlatParameter"
    if flat:
        return True
    if not bool((index >= 0).any()):
        return not own.numel()
    if not bool(own.reshape(-1)[unknown].any()):
        return True
    shaped = unknown.reshape(own.shape)
    for dim in range(own.dim()):
        rows = shaped.movedim(dim, 0).reshape(own.shape[dim], -1)
        full, some = rows.all(1), rows.any(1)
        first = int(full.long().argmax())
        if bool((full == some).all()) and bool(full[first:].all()):
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
    among = list(range(comm.size())) if ranks is None else list(ranks)
    if isinstance(placement, Replicate):
        return full
    there = isinstance(placement, Shard) and -full.dim() <= placement.dim < full.dim()
    if not there or rank not in among:
        what = kind_of(placement) if not isinstance(placement, Shard) else f"not of rank {rank}"
        if isinstance(placement, Shard) and not there:
            what = f"of dim {placement.dim}, and it has {full.dim()}"
        title = f"the layout of `{name}` is {what}"
        helps = (
            "give `Shard(dim)` or `Replicate()` for all ranks, or a pair with the list of ranks "
            "that hold the shards, including this rank: `(Shard(0), [0, 1])`",
        )
        raise Refusal(Diagnostic("S767", title, helps=helps))
    parts = full.chunk(len(among), placement.dim)
    place = among.index(rank)
    return parts[place] if place < len(parts) else full.narrow(placement.dim, 0, 0)


# ---- Layouts of all ranks.


@dataclass(frozen=True)
class RankLayouts:
    """Layouts of all ranks' parameters, and the original's elements that no rank holds."""

    ranks: tuple[tuple[RankTensor, ...], ...]
    table: ElementIndex = field(repr=False)

    @cached_property
    def missing(self) -> dict[str, int]:
        """Number of elements that no rank holds, by parameter, where there are any."""
        gone = {}
        for name in self.table.names:
            there = torch.zeros(self.table.shapes[name].numel(), dtype=torch.bool)
            for one in self.all_tensors:
                if name in one.pieces:
                    one.pieces[name][1].write(there, True)
            gone[name] = int((~there).sum())
        return {name: count for name, count in gone.items() if count}

    def still_matches(self, rank: int, modules: Sequence[nn.Module], table: ElementIndex) -> bool:
        """Return whether a rank's parameters still have the values and layouts that were found."""
        now, before = [*unique_parameters(modules)], self.ranks[rank]
        return len(now) == len(before) and all(
            one.matched_by == "values"
            and one.describes(name, p)
            and table.still_matches(one, local_tensor(p.detach()))
            for (name, p), one in zip(now, before, strict=True)
        )

    @property
    def all_tensors(self) -> Iterator[RankTensor]:
        """All parameters of all ranks."""
        return (one for rank in self.ranks for one in rank)

    @cached_property
    def groups(self) -> dict[str, str]:
        """The first name of the group that a parameter trains in, by original or program name.

        Parameters that a program fuses share one weight decay, so the original's get one, too.
        """
        first = {name: name for name in self.table.names}

        def of(name: str) -> str:
            while first[name] != name:
                name = first[name]
            return name

        for one in self.all_tensors:
            joined = sorted((of(name) for name in one.pieces), key=self.table.names.index)
            for other in joined[1:]:
                first[other] = joined[0]
        found = {name: of(name) for name in first}
        for one in self.all_tensors:
            for name in one.pieces:
                found.setdefault(one.name, found[name])
        return found

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtype that ranks store a parameter in, by original name; maybe wider than its own."""
        first = {name: one.dtype for one in self.all_tensors for name in one.pieces}
        return {name: first[own] for name, own in self.table.aliases.items() if own in first}

    @property
    def axes(self) -> dict[str, int]:
        """Sizes of the mesh axes of all DTensors."""
        return {name: size for one in self.all_tensors for name, size in one.mesh if size > 1}

    @property
    def padding(self) -> dict[str, int]:
        """Number of padding elements on all ranks, by tensor."""
        count: Counter[str] = Counter()
        for one in self.all_tensors:
            count[one.name] += one.padding
        return dict(+count)


def join_layouts(
    everyone: Sequence[tuple[list[RankTensor], list[str]]], table: ElementIndex
) -> RankLayouts:
    """Join all ranks' layouts; refuse (S763) tensors that match nothing in the original."""
    lost = {text: rank for rank, (_, texts) in reversed([*enumerate(everyone)]) for text in texts}
    holdings = RankLayouts(tuple(tuple(found) for found, _ in everyone), table)
    if not lost:
        return holdings
    (text, rank), *_ = lost.items()
    more = f", and {len(lost) - 1} more" if len(lost) > 1 else ""
    notes = [f"on rank {rank}: {', '.join(list(lost)[:_MOST_LISTED])}"]
    if holdings.missing:
        notes.append(f"no rank holds {quote_names(holdings.missing)} of the original")
    raise Refusal(
        Diagnostic(
            "S763",
            f"{text} on rank {rank} cannot be matched with the original{more}",
            notes=tuple(notes),
            helps=(
                "keep the values and dtype of the model that `program` gets: a weight is found by "
                "its values, also if it is sharded, fused or renamed",
                'or give the match: `names={"its.name": "original.name"}`, and of a plain part '
                '`layouts={"its.name": Shard(0)}`',
            ),
        )
    )
