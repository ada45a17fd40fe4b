"""Which tier each parameter lies on, and its gradients and state; and putting them there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from schedlang.diagnostic import Diagnostic, Refusal
from schedlang.facets import Stored
from schedlang.passes.preparing.peers import peer_of
from schedlang.plan import Plan

if TYPE_CHECKING:
    import torch
    from torch import nn

    from schedlang.passes.cutting.staging import Staged
    from schedlang.passes.running.build import Builder
    from schedlang.runtime.keeping.away import Away, Home, Tiers
    from schedlang.runtime.keeping.streamed import Held, Window
    from schedlang.runtime.saving.holding import Holding
    from schedlang.runtime.storage.scratch import Scratch
    from schedlang.runtime.summing.replicas import Sliced

UNCALLED = tuple(f"torch.nn.modules.container.{kind}" for kind in ("ModuleList", "ModuleDict"))


def tiers_of(plan: Plan) -> dict[str, Tiers]:
    """The tiers of every parameter (first names) of which a row keeps something off the device.

    State lies no nearer than its parameter, and gradients leave where the parameter has left.
    """
    from schedlang.runtime.keeping.away import Tiers
    from schedlang.runtime.storage.tiers import CPU, DEVICE

    said: dict[str, dict[str, str]] = {}
    for row in plan.stores:
        if row.what != "activations":
            for fact in plan.model.below(row.fqn):
                said.setdefault(fact.name, {})[row.what] = row.tier
    found = {}
    for name, tiers in said.items():
        parameter = tiers.get("parameters", DEVICE)
        least = DEVICE if parameter == DEVICE else CPU
        found[name] = Tiers(parameter, tiers.get("gradients", least), tiers.get("optimizer", least))
    return {name: found[name] for name in plan.model.unique if name in found}


def streamed_units(plan: Plan, trunk: frozenset[str]) -> dict[str, tuple[Stored, tuple[str, ...]]]:
    """The modules that are given parameters for a forward, each with its row and their first names.

    A row about the model, or about a list, is about each element of the trunk, and what is beside.
    Another module that shares such a parameter is given it too.
    """
    found: dict[str, tuple[Stored, tuple[str, ...]]] = {}
    for row in plan.stores:
        if row.what == "parameters":
            for fqn, names in _units(plan, row.fqn, trunk):
                found[fqn] = (row, names)
    streamed = {name: row for row, names in found.values() for name in names}
    for name, row in streamed.items():
        for alias in plan.model.unique[name].names:
            owner = alias.rpartition(".")[0]
            inside = any(_within(owner, fqn) and name in names for fqn, (_, names) in found.items())
            if not inside:
                known = found.get(owner, (row, ()))[1]
                found[owner] = (row, (*known, name))
    return found


def window_bytes(plan: Plan, staged: Staged, holdings: Mapping[str, Holding], place: int) -> int:
    """Bytes of streamed parameters that a place has on the device at once, at most."""
    from math import prod

    found = []
    for row, names in streamed_units(plan, staged.trunk).values():
        held = [holdings[n] for n in names if not holdings[n].sliced]
        mine = [h for h in held if h.stages is None or place in h.stages]
        sizes = [plan.model.unique[h.name].itemsize * prod(h.layout.local_shape(plan.mesh))
                 for h in mine]  # fmt: skip
        found.append((sum(sizes), row.ahead))
    ahead = max((ahead for _, ahead in found), default=0)
    return sum(sorted(size for size, _ in found)[-1 - ahead :])


def _units(plan: Plan, fqn: str, trunk: frozenset[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    site = plan.model.sites[fqn]
    holds = any(one != fqn and _within(one, fqn) for one in trunk)
    if fqn in trunk or not holds and not any(site.is_a(kind) for kind in UNCALLED):
        names = tuple(dict.fromkeys(fact.name for fact in plan.model.below(fqn)))
        if names:
            yield fqn, names
        return
    for child in site.children:
        yield from _units(plan, f"{fqn}.{child}" if fqn else child, trunk)
    own = tuple(dict.fromkeys(fact.name for fact in site.parameters.values()))
    if own:
        yield fqn, own


def _within(one: str, other: str) -> bool:
    return one == other or not other or one.startswith(f"{other}.")


def tier_of_unit(plan: Plan, fqn: str, names: Sequence[str]) -> str:
    """Where the slices lie that `zero` gathers together for a module; refuses a mixture (S854)."""
    from schedlang.runtime.storage.tiers import DEVICE

    tiers = tiers_of(plan)
    found = {name: tiers[name].parameter if name in tiers else DEVICE for name in names}
    kinds = sorted(set(found.values()))
    if len(kinds) > 1:
        near = next(name for name, tier in found.items() if tier == kinds[-1])
        away = next(name for name, tier in found.items() if tier == kinds[0])
        unit = f"`{fqn}`" if fqn else "the part outside its list of layers"
        row = next((a for a in plan.actions if a.name == "offload"), None)
        refusal = Refusal(
            Diagnostic(
                "S854", f"`zero` gathers {unit} as one, but its parameters are on two devices",
                notes=(f"`{near}` is on `{kinds[-1]}`, `{away}` on `{kinds[0]}`",),
                helps=("select complete layers",
                       "or leave the selector out: `offload(parameters, to=cpu)`"),
            )
        )  # fmt: skip
        raise refusal.at(row.span) if row is not None and row.span is not None else refusal
    return kinds[0] if kinds else DEVICE


def away(
    builder: Builder,
    staged: Staged,
    found: Mapping[str, nn.Parameter],
    sliced: Mapping[int, Sliced],
    optimizer: Callable[..., torch.optim.Optimizer] | None,
) -> Away | None:
    """Put this rank's parameters where they lie; None where all is on the device."""
    from schedlang.runtime.keeping.away import Away
    from schedlang.runtime.keeping.streamed import Window
    from schedlang.runtime.stepping.elementwise import is_tensorwise
    from schedlang.runtime.storage.leaving import let_leave
    from schedlang.runtime.storage.scratch import Scratch
    from schedlang.runtime.storage.tiers import CPU, DISK

    plan = builder.plan
    disk = any(row.tier == DISK for row in plan.stores)
    if not disk and all(row.what == "activations" for row in plan.stores):
        return None
    scratch, window = builder.shared("scratch", Scratch), Window()
    tiers = {name: one for name, one in tiers_of(plan).items() if name in found}
    homes = {**_sliced(found, sliced, scratch, tiers)}
    homes |= _streamed(builder, staged, found, window, scratch, tiers, frozenset(homes))
    for tier, to in ((CPU, None), (DISK, scratch)):
        let_leave([found[name] for name, one in tiers.items() if one.gradient == tier], to)
    alone = optimizer is None or is_tensorwise(optimizer)
    files = any(r.tier == DISK and r.what in ("parameters", "optimizer") for r in plan.stores)
    ring = peer_of(builder, found, tiers, optimizer)
    made = Away(found, tiers, homes, window, scratch, disk, files, alone, ring)
    made.check("the program was not built")
    return made


def _sliced(
    found: Mapping[str, nn.Parameter],
    sliced: Mapping[int, Sliced],
    scratch: Scratch,
    tiers: Mapping[str, Tiers],
) -> dict[str, Home]:
    """Slices that fully_shard gathers from the host."""
    from schedlang.runtime.storage.tiers import DEVICE, DISK, mark
    from schedlang.runtime.summing.gathered import shards_of

    held: dict[str, Home] = {}
    shards = shards_of(unit for one in sliced.values() for unit in one.units)
    for name, one in tiers.items():
        shard = shards.get(found[name])
        if shard is not None and one.parameter != DEVICE:
            held[name] = shard
            if one.parameter == DISK:
                shard.settle(scratch.put(shard.home))
            else:
                mark(shard.home, one.parameter)
    return held


def _streamed(
    builder: Builder,
    staged: Staged,
    found: Mapping[str, nn.Parameter],
    window: Window,
    scratch: Scratch,
    tiers: Mapping[str, Tiers],
    sliced: frozenset[str],
) -> dict[str, Home]:
    """Move whole parameters to their homes, and let modules fetch them."""
    from schedlang.runtime.keeping.streamed import Held, stream
    from schedlang.runtime.storage.tiers import DISK, plain_copy

    held: dict[str, Held] = {}
    for fqn, (row, names) in streamed_units(builder.plan, staged.trunk).items():
        mine = [name for name in names if name in found and name not in sliced]
        for name in mine:
            if name not in held:
                put = scratch.put if tiers[name].parameter == DISK else plain_copy
                held[name] = Held(found[name], put(found[name].detach()))
        if mine:
            stream(builder.at(fqn), [held[name] for name in mine], window, row.ahead)
    return {**held}
