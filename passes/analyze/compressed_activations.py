"""Compressed activations (`compress(activations)`): bits per tensor, shards on ranks, conflicts.

* Bits for saved tensors under a budget that keep the variance of the gradient small. Before
  training, the unmodified model runs in this process with the first microbatch. Each tensor is
  rounded alone; the change of the gradient is its sensitivity. The resulting table belongs to the
  plan: it is the same for all ranks, all steps, and the original of a proof. Sensitivities are
  rounded to powers of sqrt(2), so that small numerical differences do not change the table.
* Saved tensors of compressed modules where ranks split them: a rank's shards of the full tensors.
* Refusals of rows that also decide which tensors are saved.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.diagnostic import Label, Refusal
from schedlang.diagnostics.source import NOWHERE
from schedlang.ir.annotations import ActivationCoding
from schedlang.ir.features import Lowered, Recomputing
from schedlang.ir.model import is_inside
from schedlang.ir.module_copies import copy_module
from schedlang.ir.plan import Action, Plan
from schedlang.ir.primitive import Facet
from schedlang.passes.analyze.expert_capacity import find_capacities
from schedlang.passes.partition.recomputed_chains import (
    Chains,
    CostSubject,
    install_recomputation,
    run_local_model,
    single_process,
)
from schedlang.passes.propagate.saved_splits import (
    SavedSplit,
    SavedSplits,
    TokenCounts,
    TokenSplits,
    WeightAndTokenSplits,
    WeightSplits,
    compare_saved,
    experts_of,
    partial_modules,
    recomputed_modules,
    recomputing_rows,
    unequal_shards,
    weight_axes,
)

if TYPE_CHECKING:
    from schedlang.passes.partition.staging import Staged
    from schedlang.passes.propagate.propagate import Traced
    from schedlang.passes.propagate.sharded_run import Loss
    from schedlang.runtime.activation_memory.costs import PlaceFacts, SavedPlace
    from schedlang.runtime.propagation.saved_tensors import SavedTensor
    from schedlang.runtime.sequence_pipelining.slices import Slicing


BIT_CHOICES = (2, 4, 8)
_LOWEST = -2000  # exponent of a tensor whose rounding changes nothing


@dataclass(frozen=True)
class AllottedBits:
    """One saved tensor of each call of a module: its place, size, sensitivity and bits.

    The sensitivity is sqrt(2)**exponent; `exponent` is None for a model without values.
    """

    number: int
    site: str
    elements: int
    exponent: int | None
    bits: int = 0


BitTable = Mapping[str, tuple[AllottedBits, ...]]  # by compressed module


def bits_by_number(bits: BitTable, fqn: str) -> dict[int, int]:
    """Return the bits of a module's saved tensors, by their number among the floats of a call."""
    return {allotted.number: allotted.bits for allotted in bits.get(fqn, ())}


def find_bit_table(
    plan: Plan, sample: Mapping[str, Any], loss: Loss | None, chains: Chains | None = None
) -> BitTable:
    """Return the table of bits of a plan; empty without budgets. Each row has its own budget.

    `chains`: the modules that rows with a memory limit chose to recompute.
    """
    rows = [row for row in plan.activation_codings if row.budget is not None]
    if not rows:
        return {}
    facts = _measure_places(plan, rows, sample, loss, chains or {})
    table: dict[str, tuple[AllottedBits, ...]] = {}
    for number in dict.fromkeys(coding.row for coding in rows):
        parts = [coding for coding in rows if coding.row == number]
        if parts[0].budget is not None:
            table |= _allot_row([coding.fqn for coding in parts], facts, parts[0].budget)
    return table


def _allot_row(
    names: Sequence[str], facts_by_place: Mapping[SavedPlace, PlaceFacts], budget: float
) -> dict[str, Any]:
    places = [(place, entry) for place, entry in facts_by_place.items() if place.module in names]
    # equal changes: interleave modules, so that none is filled first
    if any(entry.change is None for _, entry in places):
        places.sort(key=lambda pair: pair[0].number)
    entries = [_entry_of(place, entry) for place, entry in places]
    allotted = allot_bits([entry.elements for entry in entries], _relative_changes(entries), budget)
    table: dict[str, tuple[AllottedBits, ...]] = {}
    for (place, _), entry, bits in zip(places, entries, allotted):
        table[place.module] = (*table.get(place.module, ()), replace(entry, bits=bits))
    return table


def _entry_of(place: SavedPlace, facts: PlaceFacts) -> AllottedBits:
    return AllottedBits(place.number, facts.site, facts.elements, _exponent(facts.change))


def _exponent(change: float | None) -> int | None:
    """Return the exponent of the nearest power of sqrt(2); an infinite or NaN change is largest."""
    if change is None:
        return None
    if not math.isfinite(change):
        return -_LOWEST
    return round(2 * math.log2(change)) if change > 0 else _LOWEST


def _relative_changes(entries: Sequence[AllottedBits]) -> list[float]:
    """Return sensitivities relative to the largest; without values the numbers of elements."""
    top = max((item.exponent for item in entries if item.exponent is not None), default=0)
    return [
        float(item.elements)
        if item.exponent is None
        else 2.0 ** max(-900, (item.exponent - top) / 2)
        for item in entries
    ]


def allot_bits(elements: Sequence[int], changes: Sequence[float], budget: float) -> list[int]:
    """Return the bits of each tensor; the mean over all elements is at most `budget`.

    Makes the sum of `change / (2**bits - 1)**2` small by the greedy rule of ActNN and GACT: all
    tensors begin with the fewest bits, and the tensor that reduces the sum most per bit of memory
    gets more, while the budget allows. The sum is convex in the bits, so at most the last step is
    lost. The result is never worse than equal bits for all tensors.
    """
    budget_left = budget * sum(elements) - BIT_CHOICES[0] * sum(elements)
    bits = [BIT_CHOICES[0]] * len(elements)
    heap = [_step(k, 0, elements[k], changes[k]) for k in range(len(elements))]
    heapq.heapify(heap)
    while heap:
        _, k, level = heapq.heappop(heap)
        added = (BIT_CHOICES[level + 1] - BIT_CHOICES[level]) * elements[k]
        if added > budget_left:
            continue
        budget_left -= added
        bits[k] = BIT_CHOICES[level + 1]
        if level + 2 < len(BIT_CHOICES):
            heapq.heappush(heap, _step(k, level + 1, elements[k], changes[k]))
    equal = [max(c for c in BIT_CHOICES if c <= budget)] * len(elements)
    return min(bits, equal, key=lambda allocation: gradient_variance(changes, allocation))


def _step(k: int, level: int, elements: int, change: float) -> tuple[float, int, int]:
    drop = _rounding_variance(BIT_CHOICES[level]) - _rounding_variance(BIT_CHOICES[level + 1])
    added_bits = (BIT_CHOICES[level + 1] - BIT_CHOICES[level]) * elements
    return -change * drop / added_bits, k, level


def _rounding_variance(bits: int) -> float:
    return 1.0 / float(2**bits - 1) ** 2


def gradient_variance(changes: Sequence[float], bits: Sequence[int]) -> float:
    """Return the variance that rounding adds to the gradient, in the unit of `changes`."""
    return sum(change * _rounding_variance(width) for change, width in zip(changes, bits))


def _measure_places(
    plan: Plan,
    rows: Sequence[ActivationCoding],
    sample: Mapping[str, Any],
    loss: Loss | None,
    chains: Chains,
) -> dict[SavedPlace, PlaceFacts]:
    """Return the model's saved tensors with the gradient's sensitivity to each.

    Without values the sensitivities are missing.
    """

    from schedlang.passes.propagate.propagate import backward_root
    from schedlang.passes.propagate.sequence_trials import is_on_meta
    from schedlang.runtime.activation_memory.costs import find_places
    from schedlang.runtime.tracing.meta_runs import meta_model, without_values

    blocks = {row.fqn: row.block for row in rows}
    on_meta = is_on_meta(plan.model.model)
    module: Any = plan.model.reference_model
    module = meta_model(module, {}) if on_meta else copy_module(module)
    module.train()
    install_recomputation(plan, module, chains)
    if not on_meta:
        return find_places(module, blocks, lambda: backward_root(module, sample, loss))
    with without_values(sample) as (inputs, _):
        return find_places(module, blocks, lambda: backward_root(module, inputs, loss))


def describe_bits(bits: BitTable) -> Iterator[str]:
    """Yield the table of bits as text: one line for modules whose tensors have the same bits."""
    lines: dict[str, list[str]] = {}
    for fqn, entries in bits.items():
        parts = []
        for level in reversed(BIT_CHOICES):
            sites = [item.site.removeprefix(f"{fqn}.") for item in entries if item.bits == level]
            parts += [f"{level} bits for {', '.join(sites)}"] if sites else []
        lines.setdefault("; ".join(parts).replace(fqn, "itself"), []).append(fqn)
    for text, names in lines.items():
        yield f"`compress` of {', '.join(f'`{name}`' for name in names)}: {text}"
    if bits:
        items = [item for entries in bits.values() for item in entries]
        mean = sum(item.bits * item.elements for item in items) / sum(
            item.elements for item in items
        )
        note = " (as if all were alike, in each module: there are no values)"
        note = note if items[0].exponent is None else ""
        yield f"`compress` in {mean:.3g} bits for an element in the mean{note}"


def find_saved_splits(counting: CostSubject, chains: Chains) -> SavedSplits | None:
    """Return how ranks split the tensors that compressed modules save; None: they do not.

    Recomputation is taken into account. Raises Refusal S857 where results of single operators are
    saved and ranks split weights: these ranks may call other operators than a single process.
    """
    plan, traced = counting.plan, counting.traced
    if not weight_axes(plan):
        return _by_tokens(counting, chains)
    if any(recomputed.saved_operators for recomputed in recomputed_modules(plan, chains)):
        raise _other_operators(plan, weight_axes(plan)[0])
    local = _find_saved(replace(counting, tokens=None), chains)
    full = _find_saved(single_process(counting), chains, partial_modules(traced))
    traced = replace(traced, saved_splits=compare_saved(plan, full, local))
    return _by_tokens(replace(counting, traced=traced), chains)


def _other_operators(plan: Plan, axis: str) -> Refusal:
    row = next(
        action for action, recomputing in recomputing_rows(plan) if recomputing.budget is not None
    )
    return Refusal.of(
        "S857",
        "the compressed results would differ from those of a single process",
        Label(row.span or NOWHERE, "saves results of single operators"),
        (),
        (f"ranks that shard weights over `{axis}` call other operators than a single process",),
        (
            "save classes of operators instead: `checkpoint(save=[linear])`",
            "or whole regions: `checkpoint(plan=rotor, memory=2GiB)`",
        ),
    )


def _by_tokens(counting: CostSubject, chains: Chains) -> SavedSplits | None:
    """Return how ranks that split sequences split the tensors that compressed modules save.

    Compares two forwards of a rank's model on the meta device: with all tokens and with the rank's
    tokens, both with the attention that runs on real devices. Raises Refusal S935 where a rank
    saves other tensors than shards of those of all tokens.
    """
    plan, tokens = counting.plan, counting.tokens
    if tokens is None or not plan.activation_codings:
        return counting.traced.saved_splits
    full = _find_saved(replace(counting, tokens=None), chains)
    local = _find_saved(counting, chains)
    layout = tokens.layout(counting.sample)
    cut = TokenCounts(layout.total, layout.counts[0], tokens.ranks)
    splits_of: dict[tuple[str, str], tuple[SavedSplit, ...]] = {}
    for fqn, saved_full in full.items():
        for site in dict.fromkeys(saved.site for saved in (*saved_full, *local[fqn])):
            full_shapes, shapes = (
                [item.shape for item in tensors if item.site == site]
                for tensors in (saved_full, local[fqn])
            )
            splits = _match_splits(cut, full_shapes, shapes)
            if splits is None:
                raise unequal_shards(
                    plan, fqn, plan.context_axes[0], _describe_shapes(site, full_shapes, shapes)
                )
            splits_of[fqn, site] = splits
    by_token = TokenSplits(tokens.ranks, tokens.kind, splits_of)
    weights = counting.traced.saved_splits
    if weights is None:
        return by_token
    assert isinstance(weights, WeightSplits), "weights are followed before tokens are"
    return WeightAndTokenSplits(weights, by_token)


Shapes = Sequence[tuple[int, ...]]


def _match_splits(cut: TokenCounts, full: Shapes, local: Shapes) -> tuple[SavedSplit, ...] | None:
    """Return the split of each tensor that a rank saves, or None where the tensors do not match.

    A rank saves no masks of queries and keys; such full tensors are skipped.
    """
    if not full:
        return None if local else ()
    if len(full) > len(local) and full[0][-2:] == (cut.total, cut.total):
        splits = _match_splits(cut, full[1:], local)
        if splits is not None:
            return splits
    split = cut.split_of(full[0], local[0]) if local else None
    rest = _match_splits(cut, full[1:], local[1:]) if split is not None else None
    return None if split is None or rest is None else (split, *rest)


def _describe_shapes(site: str, full: Shapes, local: Shapes) -> str:
    sizes = [", ".join(str(list(shape)) for shape in group) or "nothing" for group in (local, full)]
    return f"{sizes[0]} for {sizes[1]}, in `{site}`"


def _find_saved(
    counting: CostSubject, chains: Chains, parts: Sequence[str] = ()
) -> Mapping[str, Sequence[SavedTensor]]:
    """Return the tensors that compressed modules of the local model save in a meta forward.

    `parts`: modules whose results are partial on ranks, and are saved as partial values.
    """
    from schedlang.runtime.propagation.saved_tensors import watch_saved
    from schedlang.runtime.propagation.trace import ModuleStack
    from schedlang.runtime.sharding.sharded_layer import mark_coded
    from schedlang.runtime.storage.saved_tensors_slot import partial_sums, wrap_modules

    saved: dict[str, Any] = {}

    def watch(model: Any) -> None:
        stack = ModuleStack()
        mark_coded(model)
        wrap_modules(partial_sums, model, parts)
        install_recomputation(counting.plan, model, chains)
        stack.watch(model)
        saved.update(
            watch_saved(model, [row.fqn for row in counting.plan.activation_codings], stack)
        )

    with run_local_model(counting, watch):
        return saved


CONFLICT_REASONS = {
    Facet.RECOMPUTE: "tensors that are recomputed inside or dropped at run time are not compressed",
    Facet.STRUCTURE: "its kernel saves other tensors than the module does",
    Facet.RESIDENCE: "tensors that are offloaded inside, and parameters that are moved in and out,"
    " are not compressed",
}


def check_compressed(plan: Plan, traced: Traced, staged: Staged, slicing: Slicing | None) -> None:
    """Refuse conflicts with compressed activations: rows (S857), splits (S858), orders (S859).

    In these cases it is unknown which tensors a single process would save and round.
    """
    if not plan.activation_codings:
        return
    numbers = {row_part.row for row_part in plan.activation_codings}
    stored = {row_part.row: row_part.what for row_part in plan.stores}
    coded_rows = [action for action in plan.actions if action.row in numbers]
    for row in coded_rows:
        for other in plan.actions:
            facet = next((f for f in CONFLICT_REASONS if other.changes(f)), None)
            primitive, stored_kind = other.primitive, stored.get(other.row)
            idle = (
                facet is Facet.RESIDENCE
                and stored_kind is None
                and not isinstance(primitive, Lowered)
            )
            if facet is None or idle or other.row in numbers or stored_kind in _STATE:
                continue  # an idle row offloads to a peer along an axis of one rank
            _check_overlap(row, other, facet, moves=stored_kind == "activations")
    _check_choices(plan, traced)
    _check_results(plan)
    _check_split(plan, coded_rows[0])
    _check_capacity(plan, coded_rows[0])
    _check_chosen_rows(plan, traced, coded_rows)
    _check_order(staged, slicing, coded_rows[0])


_STATE = ("gradients", "optimizer")  # tensors that no forward saves


def _check_overlap(row: Action, other: Action, facet: Facet, moves: bool) -> None:
    """Refuse (S857) two rows at the same module, or at modules of which one contains the other."""
    primitive = other.primitive
    reruns_too = (
        isinstance(primitive, Recomputing) and primitive.reruns(other.sites, ()) is not None
    )
    pairs = ((a, b) for a in row.sites for b in other.sites)
    # integers may be offloaded
    pairs = ((a, b) for a, b in pairs if not (moves and is_inside(a, b)))
    # inputs may be rounded
    pairs = ((a, b) for a, b in pairs if not (reruns_too and is_inside(b, a)))
    overlap = next(((a, b) for a, b in pairs if is_inside(b, a) or is_inside(a, b)), None)
    if overlap is None:
        return
    label = Label(row.span or NOWHERE, f"compresses the activations of `{overlap[0]}`")
    other_label = Label(other.span or NOWHERE, f"`{other.name}` selects `{overlap[1]}`")
    raise Refusal.of(
        "S857",
        f"`{other.name}` and `compress(activations)` both select `{overlap[0]}`",
        label,
        (other_label,),
        (CONFLICT_REASONS[facet],),
        ("select other modules in one of the two rows, or drop one",),
    )


def _check_choices(plan: Plan, traced: Traced) -> None:
    """Refuse (S857) recomputation from rounded inputs of a module that chooses by values.

    The second forward could choose differently from the first.
    """
    for row, site in (
        (action, site) for action, _ in recomputing_rows(plan) for site in action.sites
    ):
        choosing = next((fqn for fqn in traced.choosing_modules if is_inside(fqn, site)), None)
        if choosing is not None:
            label = Label(row.span or NOWHERE, "recomputes from compressed inputs")
            raise Refusal.of(
                "S857",
                f"`{site}` could choose differently when it is recomputed",
                label,
                (),
                (
                    f"`{traced.choosing_modules[choosing]}` in `{choosing}` depends on values",
                    "rounded inputs may change the choice: the backward would be of a"
                    " different function",
                ),
                ("drop one of the two rows",),
            )


def _check_results(plan: Plan) -> None:
    """Refuse (S857) saved results of collectives, which a single process does not have."""
    for row, row_part in recomputing_rows(plan):
        if not any(
            "collective" in rerun.saved_classes for rerun in row_part.reruns(row.sites, ()) or ()
        ):
            continue
        label = Label(row.span or NOWHERE, "saves results for the recomputation")
        raise Refusal.of(
            "S857",
            "the compressed results would differ from those of a single process",
            label,
            (),
            ("results of collectives do not exist in a single process",),
            ("leave `collective` out: collectives are then repeated",),
        )


def _check_capacity(plan: Plan, row: Action) -> None:
    """Refuse (S858) a capacity of experts where the batch has several parts.

    The capacity counts tokens of the full batch; a single process runs the batch in parts.
    """
    limited = [fqn for fqn, _ in find_capacities(plan)]
    if not limited or plan.shares * plan.micro == 1:
        return
    raise Refusal.of(
        "S858",
        f"`{limited[0]}` has a `capacity` for the full batch, and activations are compressed",
        Label(row.span or NOWHERE, "rounds saved activations"),
        (),
        (
            f"a single process takes the batch in {plan.shares * plan.micro} parts, as the"
            " ranks do, and counts the tokens of each part separately",
        ),
        ("leave out `capacity=`", "or drop this row"),
    )


def _check_chosen_rows(plan: Plan, traced: Traced, coded_rows: Sequence[Action]) -> None:
    """Refuse (S858) compressed experts, chosen by values, on ranks that split tokens.

    The rows of such an expert on a rank are other rows than those of a single process.
    """
    tokens = [axis for axis in plan.context_axes if plan.mesh.size(axis) > 1]
    expert_modules = experts_of(plan)  # their saved tensors are not compressed
    pairs = (
        (row, fqn)
        for row in coded_rows
        for site in row.sites
        for fqn in traced.choosing_modules
        if is_inside(fqn, site)
    )
    for row, fqn in pairs:
        parent = fqn.rpartition(".")[0]
        if not tokens or any(is_inside(expert, parent) for expert in expert_modules):
            continue
        raise Refusal.of(
            "S858",
            f"activations of experts, which tokens choose, are sharded over `{tokens[0]}`",
            Label(row.span or NOWHERE, "rounds saved activations, block by block"),
            (),
            (
                f"`{traced.choosing_modules[fqn]}` in `{fqn}` depends on values: a rank's experts"
                " have other"
                " rows than those of a single process",
            ),
            (
                "select modules without experts in them",
                f"or set `{tokens[0]}` to 1: `--mesh {tokens[0]}=1`",
            ),
        )


def _check_split(plan: Plan, row: Action) -> None:
    """Refuse (S858) other splits of saved tensors than one axis of weights and one of tokens.

    The blocks of a shard differ from the blocks of the full tensor; only for these splits can a
    single process reproduce them.
    """
    data = {a for r in plan.replicas for axis_name in r.axes for a in plan.mesh.fold(axis_name)}
    stage = {a for cut in plan.cuts for a in plan.mesh.fold(cut.axis)}
    split = [axis for axis in plan.mesh.sizes if plan.mesh.size(axis) > 1]
    split = [a for a in split if a in plan.used_axes and a not in data | stage]
    weights = weight_axes(plan)
    expert_modules = experts_of(plan)
    experts = {
        a
        for n, layout in plan.layouts.items()
        if any(is_inside(n, expert) for expert in expert_modules)
        for a in layout.axes
    }
    routed = [
        axis
        for name, layout in plan.layouts.items()
        if not any(is_inside(name, expert) for expert in expert_modules)
        for axis in layout.axes
        if axis in data and plan.mesh.size(axis) > 1
    ]
    tokens = [axis for axis in plan.context_axes if plan.mesh.size(axis) > 1]
    unsupported = [axis for axis in split if axis not in (*weights, *tokens, *experts)]
    refused = [*unsupported, *routed, *weights[1:]]
    if not refused:
        return
    raise Refusal.of(
        "S858",
        f"activations sharded over `{refused[0]}` cannot be compressed",
        Label(row.span or NOWHERE, "rounds saved activations, block by block"),
        (),
        (
            "a shard has other blocks than the full tensor; a single process can reproduce them"
            " for one axis that shards weights and one that splits tokens",
        ),
        (
            f"leave `{refused[0]}` out: split the batch with `zero` instead",
            f"or set `{refused[0]}` to 1: `--mesh {refused[0]}=1`",
        ),
    )


def _check_order(staged: Staged, slicing: Slicing | None, row: Action) -> None:
    """Refuse (S859) an order that saves a tensor in several slices or versions."""
    stale = staged.timeline.stale
    if not stale and slicing is None:
        return
    feature = "uses several versions of the weights" if stale else "splits sequences into slices"
    raise Refusal.of(
        "S859",
        f"activations are compressed, and the order {feature}",
        Label(row.span or NOWHERE, "rounds saved activations"),
        (),
        ("for such an order it is not known which tensors a single process would round",),
        ('use a synchronous order without slices: `pipeline(order="1F1B", micro=...)`',),
    )
