"""Residence of parameters, gradients and optimizer state: device, host, disk, or a peer rank.

* The tier of each parameter, of its gradients and of its state; which modules stream parameters.
* Offload to a peer (the next rank of the pipeline): refusals (S851), and rounds of transfers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, NoReturn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.annotations import OffloadedTensors
from schedlang.ir.model import is_inside
from schedlang.ir.plan import Plan, place_at_row
from schedlang.passes.partition.staging import CONTAINERS, peer_stores

if TYPE_CHECKING:
    from schedlang.passes.partition.staging import Staged
    from schedlang.runtime.checkpointing.holdings import Holding
    from schedlang.runtime.offload.offloaded_step import ParameterTiers


HELP_STATE_ON_HOST = "keep it in host memory: `offload(optimizer, to=cpu)`"
HELP_ON_HOST = "keep them in host memory: `offload({}, to=cpu)`"


def check_peers(plan: Plan, staged: Staged) -> None:
    """Refuse (S851) offload to a peer where it saves no memory or cannot be executed."""
    for one in peer_stores(plan):
        _check_axis(plan, one, staged)
    state_rows, saved_rows = peer_stores(plan, "optimizer"), peer_stores(plan, "activations")
    if state_rows and any(store.tier == "disk" for store in plan.stores):
        refuse_peer(
            plan,
            state_rows[0],
            "optimizer state cannot be sent to a peer where another row offloads to disk",
            "a step that finds the disk full is undone, but the state has been sent already",
            (HELP_STATE_ON_HOST, "or keep everything in memory: `to=cpu`"),
        )
    if state_rows:
        _check_homes(plan, state_rows[0])
    if saved_rows and staged.timeline.slices > 1:
        refuse_peer(
            plan,
            saved_rows[0],
            "activations of slices cannot be sent to a peer",
            "slices of one sequence share keys and values, which sending one slice would remove",
            (f"leave `slices` out, or {HELP_ON_HOST.format('activations')}",),
        )


def _check_axis(plan: Plan, store: OffloadedTensors, staged: Staged) -> None:
    """Refuse (S851) a peer along another axis than the pipeline's: its ranks hold as much."""
    axis, what = store.over, store.what
    if axis == staged.axis:
        return
    kept = "state" if what == "optimizer" else f"of {what}"
    host_help = HELP_STATE_ON_HOST if what == "optimizer" else HELP_ON_HOST.format(what)
    other_help = {
        "optimizer": f"or keep a shard on each rank: `zero(stage=1, over={axis})`",
        "activations": "or save fewer of them: `layers.*  checkpoint()`",
    }
    refuse_peer(
        plan,
        store,
        f"`to=peer` over `{axis}` saves no memory: each rank keeps as much {kept}",
        "ranks would only exchange it: none would hold less",
        (
            f"use the axis of the pipeline: `over={staged.axis}`" if staged.axis else host_help,
            other_help[what],
        ),
    )


def _check_homes(plan: Plan, store: OffloadedTensors) -> None:
    """Refuse (S851) state on a peer whose parameter is not on the device."""

    names = (n for n, t in tiers_of(plan).items() if t.state == "peer" and t.parameter != "device")
    name = next(names, None)
    if name is not None:
        refuse_peer(
            plan,
            store,
            f"`{name}` is in host memory, and is updated there",
            "its optimizer state would go to the host through another rank",
            (HELP_STATE_ON_HOST, "or keep its parameters on the device"),
        )


def refuse_peer(
    plan: Plan, store: OffloadedTensors, title: str, note: str, helps: tuple[str, ...]
) -> NoReturn:
    """Raise S851 at the row that offloads to a peer."""
    row = plan.origin(store)
    refusal = Refusal.of("S851", title, notes=(note,), helps=helps)
    raise place_at_row(refusal, row)


def state_rounds(plan: Plan, holdings: Mapping[str, Holding], rank: int) -> Iterator[int]:
    """Yield the bytes of each round in which a rank sends optimizer state to its peer."""

    peer_names = [n for n, t in tiers_of(plan).items() if t.state == "peer" and n in holdings]
    held_names = [n for n in peer_names if holdings[n].is_held(plan.mesh, rank)]
    params = [
        plan.model.unique_parameters[n]
        for n in held_names
        if plan.model.unique_parameters[n].requires_grad
    ]
    sizes = [
        param.itemsize * prod(holdings[param.name].local_shape(plan.mesh, rank)) for param in params
    ]
    for round_indices in group_into_rounds(sizes):
        yield sum(sizes[k] for k in round_indices)


def group_into_rounds(sizes: Sequence[int]) -> list[list[int]]:
    """Group tensors of these sizes in bytes into rounds of one transfer each."""
    from schedlang.runtime.grad_reduction.gradient import bucket_indices

    return bucket_indices([(size, None) for size in sizes])


def tiers_of(plan: Plan) -> dict[str, ParameterTiers]:
    """Return the tiers of each parameter (first names) with something off the device.

    By default state and gradients of a parameter in host memory or on disk are in host memory.
    """
    from schedlang.runtime.offload.offloaded_step import ParameterTiers
    from schedlang.runtime.storage.tiers import CPU, DEVICE

    by_name: dict[str, dict[str, str]] = {}
    for row in plan.stores:
        if row.what != "activations":
            for fact in plan.model.parameters_below(row.fqn):
                by_name.setdefault(fact.name, {})[row.what] = row.tier
    tiers_by_name = {}
    for name, tiers in by_name.items():
        parameter = tiers.get("parameters", DEVICE)
        default_tier = DEVICE if parameter == DEVICE else CPU
        tiers_by_name[name] = ParameterTiers(
            parameter, tiers.get("gradients", default_tier), tiers.get("optimizer", default_tier)
        )
    return {
        name: tiers_by_name[name] for name in plan.model.unique_parameters if name in tiers_by_name
    }


def streamed_units(
    plan: Plan, trunk: frozenset[str]
) -> dict[str, tuple[OffloadedTensors, tuple[str, ...]]]:
    """Return the modules to which parameters are streamed for a forward.

    Each has its row, and the first names of its parameters. A row at the root module or at a list
    is applied to each element of the trunk, and to the modules outside the trunk. Another module
    that shares a streamed parameter is a streamed module, too.
    """
    units: dict[str, tuple[OffloadedTensors, tuple[str, ...]]] = {}
    for row in plan.stores:
        if row.what == "parameters":
            for fqn, names in _units_below(plan, row.fqn, trunk):
                units[fqn] = (row, names)
    streamed = {name: row for row, names in units.values() for name in names}
    for name, row in streamed.items():
        for alias in plan.model.unique_parameters[name].names:
            owner = alias.rpartition(".")[0]
            is_held = any(
                is_inside(owner, fqn) and name in names for fqn, (_, names) in units.items()
            )
            if not is_held:
                unit_names = units.get(owner, (row, ()))[1]
                units[owner] = (row, (*unit_names, name))
    return units


def window_bytes(plan: Plan, staged: Staged, holdings: Mapping[str, Holding], position: int) -> int:
    """Return the largest number of bytes of streamed parameters on the device at one time."""
    sizes_ahead = []
    for row, names in streamed_units(plan, staged.trunk).values():
        unsliced = [holdings[n] for n in names if not holdings[n].sliced]
        local = [
            holding for holding in unsliced if holding.stages is None or position in holding.stages
        ]
        sizes = [
            plan.model.unique_parameters[holding.name].itemsize
            * prod(holding.layout.local_shape(plan.mesh))
            for holding in local
        ]
        sizes_ahead.append((sum(sizes), row.ahead))
    ahead = max((ahead for _, ahead in sizes_ahead), default=0)
    return sum(sorted(size for size, _ in sizes_ahead)[-1 - ahead :])


def _units_below(
    plan: Plan, fqn: str, trunk: frozenset[str]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    site = plan.model.sites[fqn]
    has_units = any(unit != fqn and is_inside(unit, fqn) for unit in trunk)
    if fqn in trunk or not has_units and not any(site.is_a(kind) for kind in CONTAINERS):
        names = tuple(dict.fromkeys(param.name for param in plan.model.parameters_below(fqn)))
        if names:
            yield fqn, names
        return
    for child in site.children:
        yield from _units_below(plan, f"{fqn}.{child}" if fqn else child, trunk)
    own_names = tuple(dict.fromkeys(param.name for param in site.parameters.values()))
    if own_names:
        yield fqn, own_names


def tier_of_unit(plan: Plan, fqn: str, names: Sequence[str]) -> str:
    """Return the tier of the slices that `zero` gathers together for a module.

    Refuses (S854) a unit whose parameters are on several tiers.
    """
    from schedlang.runtime.storage.tiers import DEVICE

    tiers = tiers_of(plan)
    tier_by_name = {name: tiers[name].parameter if name in tiers else DEVICE for name in names}
    kinds = sorted(set(tier_by_name.values()))
    if len(kinds) > 1:
        last_name = next(name for name, tier in tier_by_name.items() if tier == kinds[-1])
        first_name = next(name for name, tier in tier_by_name.items() if tier == kinds[0])
        unit = f"`{fqn}`" if fqn else "the part outside its list of layers"
        row = plan.origin(plan.stores[0])
        refusal = Refusal.of(
            "S854",
            f"`zero` gathers {unit} as one, but its parameters are on two devices",
            notes=(f"`{last_name}` is on `{kinds[-1]}`, `{first_name}` on `{kinds[0]}`",),
            helps=(
                "select complete layers",
                "or leave the selector out: `offload(parameters, to=cpu)`",
            ),
        )
        raise place_at_row(refusal, row)
    return kinds[0] if kinds else DEVICE
