"""Splits over ranks of saved tensors: activations that a module saves for backward.

Compressed activations are rounded block by block. A single process (the original of a proof) must
round the blocks that each rank rounds, so it has to know each rank's shard of a saved tensor.
`WeightSplits` describes shards on ranks that split weights, `TokenSplits` on ranks that split
sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from schedlang.diagnostics.diagnostic import Label, Refusal
from schedlang.diagnostics.source import NOWHERE
from schedlang.ir.features import Recomputing
from schedlang.ir.plan import Action, Plan

if TYPE_CHECKING:
    from torch import Tensor

    from schedlang.passes.partition.recomputed_chains import Chains
    from schedlang.passes.propagate.propagate import Traced
    from schedlang.remat import RecomputedRegion
    from schedlang.runtime.context_parallel.token_layout import SequenceLayout
    from schedlang.runtime.propagation.saved_tensors import SavedTensor


class SavedPlace(NamedTuple):
    """The place of a saved tensor: compressed module, module inside it, and turn there, from 1."""

    fqn: str
    site: str
    turn: int
    samples: int  # in this part of the batch


_Place = tuple[str, str, int]  # compressed module, innermost module that saves, number of dims
_ShapeKey = tuple[int, tuple[bool, ...]]  # size of the last dim, and which middle dims have size 1
Turn = tuple[str, bool, int]  # module that saves, whether ranks split the tensor, count from 1


@dataclass(frozen=True)
class WeightSplits:
    """Splits of tensors that compressed modules save, over the axis that splits weights.

    splits      place -> for full tensors of one `_ShapeKey`, the dim that is split, or None
    blocks      module -> sizes of its outputs side by side (queries, keys, values); a rank has a
                shard of each
    same_turns  (compressed module, turn) -> the turn of the same call that saves this tensor on a
                rank (None: no turn), where the turn differs from that in the full model
    """

    ranks: int
    splits: Mapping[_Place, Mapping[_ShapeKey, int | None]]
    blocks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    same_turns: Mapping[tuple[str, Turn], Turn | None] = field(default_factory=dict)

    def change_shards(
        self, place: SavedPlace, tensor: Tensor, change: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return a full tensor in which `change` was applied to each rank's shard."""
        import torch

        dim = self.split_dim(place.fqn, place.site, tensor)
        if dim is None:
            return change(tensor)
        sizes = self.blocks.get(place.site, ())
        if sizes and sum(sizes) == tensor.shape[dim]:
            return self._in_blocks(tensor, dim, sizes, change)
        if dim:
            return torch.cat([change(part) for part in tensor.chunk(self.ranks, dim)], dim)
        runs = self._runs(tensor.shape[0], place.samples)  # samples, with heads in one dim
        by_sample = tensor.reshape(runs, -1, *tensor.shape[1:])
        parts = [change(part) for part in by_sample.chunk(self.ranks, 1)]
        return torch.cat(parts, 1).flatten(0, 1)

    def _in_blocks(
        self, tensor: Tensor, dim: int, sizes: tuple[int, ...], change: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Apply `change` to each rank's shards of all blocks, concatenated into one tensor."""
        import torch

        local = [size // self.ranks for size in sizes]
        blocks = [block.chunk(self.ranks, dim) for block in torch.split(tensor, list(sizes), dim)]
        changed = [
            torch.split(
                change(torch.cat([block_parts[rank] for block_parts in blocks], dim)), local, dim
            )
            for rank in range(self.ranks)
        ]
        return torch.cat([torch.cat(parts, dim) for parts in zip(*changed)], dim)

    def split_dim(self, fqn: str, site: str, tensor: Tensor) -> int | None:
        """Return the dim along which ranks split a full tensor, or None."""
        for name in _enclosing_modules(site):  # a module whose inside is not traced has the entry
            dims_by_shape = self.splits.get((fqn, name, tensor.dim()))
            if dims_by_shape is not None:
                dims = set(dims_by_shape.values())
                return dims.pop() if len(dims) == 1 else dims_by_shape.get(_shape_key(tensor.shape))
        return None

    def _runs(self, size: int, samples: int) -> int:
        fits = size % samples == 0 and size // samples % self.ranks == 0
        return samples if fits else 1


def next_turn(earlier: Iterable[Turn], site: str, split: bool) -> Turn:
    """Return the turn of the next tensor that a module saves in a call.

    Masks are not split; they are counted separately, since a batch without padding has none.
    """
    return site, split, 1 + sum(turn[:2] == (site, split) for turn in earlier)


def _shape_key(shape: Sequence[int]) -> _ShapeKey:
    """Return a key that distinguishes tensors of one module.

    The last dim is not enough: a mask with one head may be as wide as the queries.
    """
    return shape[-1], tuple(size == 1 for size in shape[1:-1])


def _enclosing_modules(site: str) -> Iterator[str]:
    """Yield a module and the modules around it, innermost first."""
    while site:
        yield site
        site = site.rpartition(".")[0]


def experts_of(plan: Plan) -> tuple[str, ...]:
    """Return the modules with experts spread over ranks; their saved tensors are not compressed."""
    from schedlang.runtime.propagation.stand_ins import ROUTED

    return tuple(fqn for fqn, kind in plan.computes.items() if kind in ROUTED)


def weight_axes(plan: Plan) -> list[str]:
    """Return the axes that split weights (without experts') and whose ranks have equal samples."""
    data = {a for row in plan.replicas for axis_name in row.axes for a in plan.mesh.fold(axis_name)}
    experts = experts_of(plan)
    sharding_axes = {
        axis
        for name, layout in plan.layouts.items()
        if not _inside(name, experts)
        for axis in layout.axes
    }
    return sorted(axis for axis in sharding_axes - data if plan.mesh.size(axis) > 1)


def recomputed_modules(plan: Plan, chains: Chains | None = None) -> tuple[RecomputedRegion, ...]:
    """Return the recomputed modules that are compressed or inside compressed modules.

    `chains`: the choices of rows with a memory limit, once these are known.
    """
    regions: dict[RecomputedRegion, None] = {}
    for action, row in recomputing_rows(plan):
        choice = (chains or {}).get(action.sites, ())
        regions |= dict.fromkeys(row.reruns(action.sites, choice) or ())
    coded_modules = [row.fqn for row in plan.activation_codings]
    return tuple(
        region for region in regions if any(_inside(site, coded_modules) for site in region.modules)
    )


def partial_modules(traced: Traced) -> tuple[str, ...]:
    """Return the modules whose results are partial over ranks.

    A recomputation that saves these results gets them as partial values.
    """
    from schedlang.ir.placement import P

    pairs = traced.edges.items()
    return tuple(fqn for fqn, edges in pairs if any(isinstance(e.output_before, P) for e in edges))


def recomputing_rows(plan: Plan) -> list[tuple[Action, Recomputing]]:
    """Return the rows that recompute, or may recompute, from compressed activations."""
    coded = [row.fqn for row in plan.activation_codings]
    rows = plan.rows_with(Recomputing) if coded else []
    return [(a, row) for a, row in rows if any(_inside(site, coded) for site in a.sites)]


def _inside(fqn: str, modules: Sequence[str]) -> bool:
    return any(fqn == module or fqn.startswith(f"{module}.") for module in modules)


def compare_saved(
    plan: Plan,
    full_saved: Mapping[str, Sequence[SavedTensor]],
    local: Mapping[str, Sequence[SavedTensor]],
) -> WeightSplits | None:
    """Compare the tensors that the original and a rank save, by compressed module.

    Returns None where not exactly one axis splits weights. Raises Refusal S935 where a rank saves
    other tensors than equal shards of the original's.
    """
    axes = weight_axes(plan)
    if not full_saved or len(axes) != 1:  # several axes are refused elsewhere
        return None
    ranks = plan.mesh.size(axes[0])
    splits: dict[_Place, dict[_ShapeKey, int | None]] = {}
    same_as: dict[tuple[str, Turn], Turn | None] = {}
    for fqn, saved in full_saved.items():
        local_saved = local[fqn]
        if len(saved) != len(local_saved):
            difference = f"{len(local_saved)} tensors a rank, {len(saved)} of the model"
            raise unequal_shards(plan, fqn, axes[0], difference)
        turns: dict[tuple[str, int] | None, Turn] = {}  # (module, turn) on a rank -> turn
        for full, local_tensor in zip(saved, local_saved):
            dim = _split(full, local_tensor, ranks)
            turn = next_turn(turns.values(), full.site, dim is not None)
            turns[local_tensor.site, local_tensor.turn] = turn
            if full.same != local_tensor.same:
                same_as[fqn, turn] = turns.get(local_tensor.same)
            dims = splits.setdefault((fqn, full.site, len(full.shape)), {})
            if isinstance(dim, str) or dims.setdefault(_shape_key(full.shape), dim) != dim:
                difference = dim if isinstance(dim, str) else "one size, split and whole"
                raise unequal_shards(plan, fqn, axes[0], f"{difference}, in `{full.site}`")
    return WeightSplits(ranks, splits, _blocks(plan, axes[0]), same_as)


def _blocks(plan: Plan, axis: str) -> dict[str, tuple[int, ...]]:
    """Return block sizes of the modules whose weights are split over `axis` in several blocks."""
    return {
        name.rpartition(".")[0]: split.blocks
        for name, layout in plan.layouts.items()
        for split in layout.splits
        if split.axis == axis and len(split.blocks) > 1
    }


def _split(full_tensor: SavedTensor, local_tensor: SavedTensor, ranks: int) -> int | None | str:
    """Return the dim along which a rank saves an equal shard, or None for the full tensor.

    Returns a text that describes the difference where the rank's tensor is neither.
    """
    if full_tensor.site != local_tensor.site or len(full_tensor.shape) != len(local_tensor.shape):
        return f"{list(local_tensor.shape)} in `{local_tensor.site}` for {list(full_tensor.shape)}"
    pairs = list(zip(full_tensor.shape, local_tensor.shape))
    dims = [dim for dim, (full_size, local) in enumerate(pairs) if full_size != local]
    if not dims:
        return None
    if len(dims) > 1 or pairs[dims[0]][0] != ranks * pairs[dims[0]][1]:
        return f"{list(local_tensor.shape)} for {list(full_tensor.shape)}"
    return dims[0]


def unequal_shards(plan: Plan, fqn: str, axis: str, difference: str) -> Refusal:
    """Return S935: ranks save other tensors than equal shards of the model's saved tensors."""
    row = next(
        (plan.origin(coding) for coding in plan.activation_codings if coding.fqn == fqn), None
    )
    label = Label((row and row.span) or NOWHERE, "rounds saved activations, block by block")
    return Refusal.of(
        "S935",
        f"ranks of `{axis}` save unequal shards of activations of `{fqn}`",
        label,
        notes=(difference, "a single process would round other blocks"),
        helps=(
            "select modules whose activations are replicated, or sharded in equal parts",
            f"or set `{axis}` to 1: `--mesh {axis}=1`",
        ),
    )


class SavedSplit(NamedTuple):
    """The shard of a tensor that a rank has.

    tokens  the dim of tokens that is split as sequences are; None: the rank has all tokens
    heads   whether dim 1 is split into equal runs of heads
    copies  how often dim 1 of the full tensor repeats each head of the rank (keys of several
            queries)
    """

    tokens: int | None = None
    heads: bool = False
    copies: int = 1


@dataclass(frozen=True)
class TokenSplits:
    """Splits of tensors that compressed modules save, over the ranks that split sequences.

    splits  (compressed module, module that saves) -> split of each saved tensor, in order
    """

    ranks: int
    kind: str  # of token layout
    splits: Mapping[tuple[str, str], tuple[SavedSplit, ...]]

    def change_shards(
        self, place: SavedPlace, tensor: Tensor, change: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return a full tensor in which `change` was applied to each rank's shard."""
        site_splits = self.splits.get((place.fqn, place.site), (SavedSplit(),))
        split = site_splits[(place.turn - 1) % len(site_splits)]
        copies = split.copies if _has_copies(tensor, split.copies) else 1
        single = tensor[:, ::copies] if copies > 1 else tensor
        if split.heads:
            changed = _change_heads(single, self.ranks, change)
        elif split.tokens is None:
            changed = change(single)
        else:
            changed = self._tokens(single, split.tokens, place.samples, change)
        return changed.repeat_interleave(copies, 1) if copies > 1 else changed

    def _tokens(
        self, tensor: Tensor, dim: int, samples: int, change: Callable[[Tensor], Tensor]
    ) -> Tensor:
        if dim:
            return _change_placed(tensor, dim, self._layout(tensor.shape[dim]), change)
        rows = tensor.reshape(samples, -1, *tensor.shape[1:])  # samples and tokens are in one dim
        return _change_placed(rows, 1, self._layout(rows.shape[1]), change).flatten(0, 1)

    def _layout(self, total: int) -> SequenceLayout:
        from schedlang.runtime.context_parallel.token_layout import SequenceLayout

        return SequenceLayout.of_kind(self.kind, total, self.ranks)


@dataclass(frozen=True)
class WeightAndTokenSplits:
    """Splits of saved tensors where some axes split weights and other axes split sequences.

    A rank has its shard by weights, and of this shard its tokens, or its heads (Ulysses).
    """

    weights: WeightSplits
    tokens: TokenSplits

    def change_shards(
        self, place: SavedPlace, tensor: Tensor, change: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return a full tensor in which `change` was applied to each rank's shard."""
        return self.weights.change_shards(
            place, tensor, lambda part: self.tokens.change_shards(place, part, change)
        )


SavedSplits = WeightSplits | TokenSplits | WeightAndTokenSplits


def _has_copies(tensor: Tensor, copies: int) -> bool:
    """Return whether the heads of a tensor are repeated `copies` times.

    A batch without padding has no mask, and attention without a mask does not repeat keys.
    """
    import torch

    return copies > 1 and torch.equal(tensor, tensor[:, ::copies].repeat_interleave(copies, 1))


def _change_heads(tensor: Tensor, ranks: int, change: Callable[[Tensor], Tensor]) -> Tensor:
    import torch

    return torch.cat([change(part) for part in tensor.chunk(ranks, 1)], 1)


def _change_placed(
    tensor: Tensor, dim: int, layout: SequenceLayout, change: Callable[[Tensor], Tensor]
) -> Tensor:
    places = range(len(layout.runs))
    return layout.concatenate(
        [change(layout.take(tensor, dim, position)) for position in places], dim
    )


class TokenCounts(NamedTuple):
    """The number of all tokens, of tokens on a rank, and of ranks."""

    total: int
    local: int
    ranks: int

    def split_of(self, full: tuple[int, ...], local: tuple[int, ...]) -> SavedSplit | None:
        """Return the rank's shard of a tensor from both shapes; None where no known split fits."""
        if len(full) != len(local):
            return None
        split = SavedSplit()
        for dim, (size, part_size) in enumerate(zip(full, local)):
            if size == part_size:
                continue
            if dim == 1 and self._has_heads(full) and size % part_size == 0:
                # with all tokens, some heads
                head_ranks = self.ranks if local[2] == self.total else 1
                split = split._replace(heads=head_ranks > 1, copies=size // part_size // head_ranks)
                if part_size * head_ranks * split.copies != size:
                    return None
            elif (
                dim < 3
                and split.tokens is None
                and self._counts_tokens(size, part_size, first=dim == 0)
            ):
                split = split._replace(tokens=dim)
            else:
                return None
        return split

    def _has_heads(self, shape: tuple[int, ...]) -> bool:
        """Return whether dims 1 and 2 are heads and tokens; of 3 dims they may be tokens, width."""
        heads = len(shape) == 4 or (len(shape) == 3 and shape[1] != self.total)
        return heads and shape[2] == self.total

    def _counts_tokens(self, full_size: int, local_size: int, *, first: bool) -> bool:
        """Return whether two sizes count tokens: of one sample, or in dim 0 of several samples."""
        samples = full_size // self.total if first and full_size % self.total == 0 else 1
        return (full_size, local_size) == (samples * self.total, samples * self.local)
