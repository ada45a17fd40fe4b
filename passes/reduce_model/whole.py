"""The schedule at full size: planned, traced in full width, and planned again for other models."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.plan import Plan
from schedlang.language import nodes as n
from schedlang.passes.elaborate.expand import expand
from schedlang.passes.elaborate.state import Settings
from schedlang.passes.reduce_model.small_batch import Batch

if TYPE_CHECKING:
    from torch import nn

# -- meshes that one machine runs ------------------------------------------------------------------


MOST = 8


def small_meshes(axes: Mapping[str, int], most: int = MOST) -> Iterator[dict[str, int]]:
    """Smaller sizes of the axes, the best first; the mesh itself where it is small enough.

    Best is a mesh that leaves no axis out, whose axes differ in size (so that a sum over the wrong
    one shows), and that has few ranks.
    """
    if math.prod(axes.values()) <= most:
        yield dict(axes)
        return
    ranges = [range(1, min(size, most) + 1) for size in axes.values()]
    found = [
        dict(zip(axes, sizes)) for sizes in itertools.product(*ranges) if math.prod(sizes) <= most
    ]
    yield from sorted(
        (mesh for mesh in found if max(mesh.values()) > 1), key=lambda m: _cost(m, axes)
    )


def _cost(mesh: Mapping[str, int], axes: Mapping[str, int]) -> tuple[int, int, int]:
    left_out = sum(mesh[name] == 1 < size for name, size in axes.items())
    sizes = [size for size in mesh.values() if size > 1]
    return left_out, len(sizes) - len(set(sizes)), math.prod(sizes)


# -- the schedule at full size ---------------------------------------------------------------------


@dataclass(frozen=True)
class Whole:
    """The schedule as written: its syntax, settings and plan for the model in full size.

    `given` is the mesh that was asked for, where one machine runs it.
    """

    tree: n.File
    settings: Settings
    plan: Plan
    given: Mapping[str, int] | None = None

    def at(self, model: nn.Module, mesh: Mapping[str, int], requires: bool = True) -> Plan:
        """The same text planned for another model on another mesh."""
        from schedlang.ir.model import ModelFacts

        facts = ModelFacts(model)
        facts.given.update(self.plan.model.replacements)  # the class made it, not the model file
        made = expand(self._tree(requires), facts, self._set(mesh)).plan
        assert made is not None
        return made

    def meshes(self, requires: bool) -> Iterator[Mapping[str, int]]:
        """Small meshes whose sizes the knobs of the file accept, the best first."""
        if self.given is not None:
            yield self.given
            return
        for mesh in small_meshes(self.plan.mesh.sizes):
            try:
                expand(self._tree(requires), None, self._set(mesh))
            except Refusal:
                continue
            yield mesh

    def _tree(self, requires: bool) -> n.File:
        items = self.tree.items
        kept = tuple(item for item in items if requires or not isinstance(item, n.Require))
        return replace(self.tree, items=kept)

    def _set(self, mesh: Mapping[str, int]) -> Settings:
        """Knobs that size axes are set by the mesh."""
        args = [a for item in self.tree.items if isinstance(item, n.Mesh) for a in item.args]
        values = [a.value for a in args if isinstance(a, n.Keyword)]
        sizing = {value.text for value in values if isinstance(value, n.Name)}
        return Settings({k: v for k, v in self.settings.knobs.items() if k not in sizing}, mesh)


def whole(tree: n.File, settings: Settings, model: nn.Module) -> Whole:
    """Plan at full size; what does not divide there is refused here.

    A mesh given from outside that one machine runs is the mesh of the reduced model, and full size
    is what the file says.
    """
    from schedlang.ir.model import ModelFacts

    asked = expand(tree, None, settings).mesh if settings.mesh else None
    small = asked is not None and asked.world <= MOST
    if small:
        settings = replace(settings, mesh={})
    plan = expand(tree, ModelFacts(model), settings).plan
    assert plan is not None
    _enough_layers(plan)
    return Whole(tree, settings, plan, dict(asked.axes) if small and asked else None)


def _enough_layers(plan: Plan) -> None:
    """Refuse a list that is cut into more stages than it has layers (S613)."""
    from schedlang.passes.partition.stages import Unit, elements, even

    for cut in plan.cuts:
        if cut.trunks:
            even([Unit(name, 1) for name in elements(plan, cut)], plan.stages(cut.axis))


def parts(plan: Plan) -> int:
    """Into how many parts a batch is cut."""
    return plan.shares * (plan.micro)


def trace(plan: Plan, batch: Batch, loss: Any) -> None:
    """Follow the shapes through the model on the meta device, as every rank would."""
    from schedlang.passes.analyze.prepare import prepare
    from schedlang.runtime.batch import split

    micro = plan.micro
    try:
        sample = split(dict(batch), plan.shares, micro)[0][0].inputs
    except Refusal:  # fewer rows than parts: shapes can be followed all the same
        sample = dict(batch)
    prepare(plan, sample, loss)


def stage_mesh(plan: Plan, mesh: Mapping[str, int]) -> dict[str, int]:
    """The mesh at full size but for the axes that hold stages."""
    cut = {axis for one in plan.cuts for axis in plan.mesh.fold(one.axis)}
    return {axis: mesh[axis] if axis in cut else size for axis, size in plan.mesh.axes}


def codes(refusals: Sequence[Refusal]) -> set[str]:
    """The codes of all their messages."""
    return {d.code for refusal in refusals for d in refusal.diagnostics}
