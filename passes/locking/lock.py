"""What a lock file holds: the structure of a model, and what its schedule makes of it, as names."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from schedlang import __version__
from schedlang.passes.reading.words import arguments
from schedlang.passes.shrinking.ranges import WHOLE

if TYPE_CHECKING:
    from torch import nn

    from schedlang.passes.costs.account import Account
    from schedlang.plan import Plan

Section = Mapping[str, tuple[str, ...]]
SECTIONS = {  # in the order of the file; what the names of each are
    "schedule": "decisions, mesh and order",
    "modules": "classes, and what they say of themselves",
    "parameters": "dtype and shape",
    "buffers": "dtype and shape",
    "rows": "what the schedule does to which module",
    "placements": "parameters that do not lie whole on every rank",
    "activations": "how they enter and leave a module",
    "stages": "units of the pipeline",
    "collectives": "of one step: how many, bytes each",
    "ranks": "bytes held, by kind of rank",
}
STRUCTURE = ("modules", "parameters", "buffers")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


@dataclass(frozen=True)
class Lock:
    """A model and its schedule as they were found.

    sections  section -> full name -> what is said of it; names of modules without ranges
    settings  the settings it was made with: ("--mesh", "dp=2"), ("--knob", "micro=4")
    made      versions of packages; information, not part of any comparison
    """

    sections: Mapping[str, Section]
    settings: tuple[tuple[str, str], ...] = ()
    made: tuple[tuple[str, str], ...] = ()

    @property
    def structure(self) -> str:
        """The hash of the model alone: its modules, parameters and buffers."""
        lines = [
            "\t".join((section, name, *said))
            for section in STRUCTURE
            for name, said in sorted(self.sections.get(section, {}).items())
        ]
        return "sha256:" + hashlib.sha256("\n".join(lines).encode()).hexdigest()


def lock(plan: Plan, account: Account, settings: tuple[tuple[str, str], ...] = ()) -> Lock:
    """The lock of a plan and what it costs; the model may lie on the meta device."""
    model = plan.model.model
    sections = {
        "schedule": _schedule(plan),
        "modules": dict(_modules(model)),
        "parameters": dict(_parameters(plan)),
        "buffers": {
            name: (_tensor(buffer.dtype, buffer.shape),) for name, buffer in model.named_buffers()
        },
        "rows": _rows(plan),
        "placements": dict(_placements(plan)),
        "activations": dict(_activations(plan)),
        "stages": {name or WHOLE: (str(stage),) for name, stage in account.stages.items()},
        "collectives": _collectives(plan, account),
        "ranks": dict(_ranks(account)),
    }
    return Lock(sections, settings, versions(model))


def versions(model: nn.Module) -> tuple[tuple[str, str], ...]:
    """Versions of this package and of those that the model's modules come from."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"schedlang": __version__}
    for package in {"torch", *(_package(module) for module in model.modules())}:
        try:
            found[package] = version(package).partition("+")[0]
        except PackageNotFoundError:
            continue
    return tuple(sorted(found.items()))


def _package(module: nn.Module) -> str:
    return type(module).__module__.partition(".")[0]


def _schedule(plan: Plan) -> Section:
    found = {f"knob {name}": (str(value),) for name, value in plan.decisions}
    found |= {f"axis {name}": (str(size),) for name, size in plan.mesh.axes}
    if plan.order is not None:
        order = plan.order
        parts = f"microbatches {order.micro}, stages a rank {order.chunks}"
        parts += f", an update every {order.every}" if order.every is not None else ""
        found["order"] = (f"{order.name}, {parts}",)
    return {"model": (plan.model.class_name,), **found}


def _modules(model: nn.Module) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Plain names of classes: where a library keeps a class is not structure."""
    for name, module in model.named_modules(remove_duplicate=False):
        said = " ".join(_ADDRESS.sub("", module.extra_repr()).split())
        yield name or WHOLE, (f"{type(module).__qualname__}({said})",)


def _tensor(dtype: object, shape: object) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"  # type: ignore[call-overload]


def _parameters(plan: Plan) -> Iterator[tuple[str, tuple[str, ...]]]:
    for fact in plan.model.unique.values():
        said = _tensor(fact.dtype, fact.shape) + ("" if fact.requires_grad else ", frozen")
        yield fact.name, (said, *(f"tied to {name}" for name in fact.names[1:]))


def _rows(plan: Plan) -> Section:
    found: dict[str, tuple[str, ...]] = {}
    for action in plan.actions:
        if not action.primitive.writes:
            continue  # a check changes nothing
        said = f"{action.name}({arguments(action.primitive)})"
        for site in action.sites:
            found[site or WHOLE] = (*found.get(site or WHOLE, ()), said)
    return found


def _placements(plan: Plan) -> Iterator[tuple[str, tuple[str, ...]]]:
    for name in plan.layouts:
        held = plan.held(name)
        blocks = [f"dim {s.dim} in blocks {list(s.blocks)}" for s in held.splits if s.blocks[1:]]
        if held.splits:
            yield name, (", ".join((held.show(), *blocks)),)


def _activations(plan: Plan) -> Iterator[tuple[str, tuple[str, ...]]]:
    for fqn, edges in plan.boundaries.items():
        said = [
            f"{edge.axis}: {_edge(edge.input)} -> {_edge(edge.output)}"
            for edge in edges
            if plan.mesh.size(edge.axis) > 1
        ]
        if said:
            yield fqn or WHOLE, tuple(said)


def _edge(placement: object) -> str:
    return "as it comes" if placement is None else str(placement)


def _collectives(plan: Plan, account: Account) -> Section:
    if account.collectives is None:
        return {WHOLE: ("not counted: there is no batch to count them with",)}
    line = plan.cuts[0].axis if plan.cuts else ""
    found: dict[str, list[str]] = {}
    for one in account.collectives:
        at = "" if one.places is None else f" at {line}={','.join(map(str, sorted(one.places)))}"
        found.setdefault(one.fqn or WHOLE, []).append(
            f"{one.phase}: {one.kind} over {'x'.join(one.axes)}{at}, {one.what}: "
            f"{one.count} x {one.bytes} B"
        )
    return {fqn: tuple(sorted(said)) for fqn, said in found.items()}


def _ranks(account: Account) -> Iterator[tuple[str, tuple[str, ...]]]:
    if account.classes is None:
        yield WHOLE, ("not counted: there is no batch to cut the model with",)
        return
    for one in account.classes:
        yield f"from rank {one.first}", (
            f"ranks: {one.ranks}", f"parameters: {one.parameters} B",
            f"gradients: {one.gradients} B", f"optimizer: {one.optimizer} B",
            f"in a step: {one.working} B",
        )  # fmt: skip
