"""grid: split weights and activations over a grid or a cube of ranks (2-D, 2.5-D and 3-D)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Literal

from schedlang.ir.annotations import Boundary
from schedlang.ir.model import ParameterFact, Site
from schedlang.ir.placement import Layout, R, Replicate, S, block_sizes_of
from schedlang.ir.plan import Plan
from schedlang.ir.primitive import Facet, Primitive, refuse
from schedlang.language.kinds import Axes
from schedlang.primitives.shard import KINDS, is_plain

AXES_OF_STYLE = {"summa": 2, "cube": 3}
LAST = (S(-1), S("hidden"), S("out"))
MAX_SIDE = 16  # ranks along one side of the grids that a refusal names


class grid(Primitive):  # noqa: N801
    """Shard a module's weight and its activations over several axes (2-D, 2.5-D or 3-D).

    before   y = f(x)                 each rank holds the full f, and full activations
    after    y_part = f_part(x_part)  weights and activations are both sharded

    Along the first axis ranks have different rows of the batch (`zero(stage=0, over=...)` must name
    it, too); the other axes split the hidden dim of all activations:
      summa  over=(r, c): each weight has r x c shards, inputs down the rows and outputs along the
             columns; panels are broadcast, products summed (Optimus, 2-D)
      cube   over=(x, y, z): the hidden dim of inputs is split over (z, y), that of outputs over
             (y, z), so that the next layer needs `over=(x, z, y)` (3-D)
    With one more data axis, `zero(stage=0, over=(d, r))`, the grid has replicas (Tesseract, 2.5-D).

    It supports linear layers, embeddings, and modules whose parameters all run along the hidden
    dim: norms, whose statistics are all-reduced.  `output=S(vocab)` on the last layer
    keeps the logits sharded for the loss, `output=R` gathers them; `blocks` is as in `shard`.

    Xu et al. 2021 (Optimus), Wang et al. 2022 (Tesseract), Bian et al. 2021 (3-D).
    """

    style: Literal["summa", "cube"]
    over: Axes = field(kw_only=True)
    blocks: int | tuple[int, ...] = field(default=1, kw_only=True)
    output: S | Replicate | None = field(default=None, kw_only=True)

    example = "mlp.up  grid(summa, over=(r, c))"
    reads = frozenset({"structure", "shape", "dtype"})
    writes = frozenset({"placement"})
    gives_up = frozenset({"rounding"})

    def agree(self, axes: Collection[str]) -> None:
        """Refuse a number of axes that differs from the grid's number of sides."""
        count = AXES_OF_STYLE[self.style]
        if len(self.over) != count or len(set(self.over)) != count:
            example = {"summa": "over=(r, c)", "cube": "over=(x, y, z)"}[self.style]
            refuse(
                "S304",
                f"`{self.style}` needs {count} axes, not {len(self.over)}",
                helps=(f"name them all: `{example}`",),
            )

    def check(self, site: Site, plan: Plan) -> None:
        """Refuse modules that a grid cannot shard, and sizes that are not divisible."""
        self._check_axes(plan)
        kind = self._kind(site)
        if kind == "norm":
            self._check_norm(site, plan)
        else:
            _check_plain(site, kind, plan)
        self._check_output(site, kind, plan)
        if sum(self._blocks(site)) != self._outer_size(site):
            refuse(
                "S406",
                f"blocks of {self.blocks} do not add up to {self._outer_size(site)}",
                f"of `{site}`",
            )
        sides = GridSides(*(plan.mesh.size(axis) for axis in self.over))
        for size, divisor in self._required_divisions(site, plan, sides):
            if size % divisor:
                self._refuse_size(site, plan, size, divisor)
        for name, layout in self._layouts(site, plan).items():
            current = plan.layout(name)
            if current.splits and current != layout:
                refuse(
                    "S504",
                    f"`{name}` is sharded already, in another way than by this row",
                    helps=("drop one of the two rows",),
                )

    def transform(self, site: Site, plan: Plan) -> Plan:
        """Add the layouts of parameters, and the boundaries of the module on each axis."""
        kind, axes = self._kind(site), tuple(map(str, self.over))
        for name, layout in self._layouts(site, plan).items():
            spread = axes[0] in layout.axes
            plan = (
                plan.with_batch_split_layout(name, layout)
                if spread
                else plan.with_layout(name, layout)
            )
        output = self.output or S(-1)
        if kind == "norm":
            plan = plan.with_kind(site.fqn, kind)
            return plan.with_boundary(site.fqn, Boundary(self._hidden, S(-1), output))
        plan = plan.with_kind(site.fqn, f"{self.style} {kind}")
        for boundary in self._boundaries(kind, output):
            plan = plan.with_boundary(site.fqn, boundary)
        return plan

    # -- what the arguments mean at a site ---------------------------------------------------------

    @property
    def _hidden(self) -> str:
        """Return the axes that split the hidden dim of the input, the slowest first."""
        return str(self.over[1]) if self.style == "summa" else f"{self.over[2]}.{self.over[1]}"

    def _kind(self, site: Site) -> str:
        return next((k for k in KINDS if site.is_a(k)), "norm")

    def _boundaries(self, kind: str, output: S | Replicate) -> Iterator[Boundary]:
        """Yield the boundaries of a product, in the order that passes expect."""
        first, *others = map(str, self.over)
        yield Boundary(first, None, None)
        entry = None if kind == "Embedding" else S(-1)
        if self.style == "summa":
            yield Boundary(others[0], entry, output)
            return
        yield from (Boundary(axis, None, None) for axis in others)
        if kind == "Embedding":
            yield Boundary(self._hidden, None, output)
        else:
            yield Boundary(self._hidden, S(-1), None)
            yield Boundary(f"{others[0]}.{others[1]}", None, output)

    def _weight_dims(self, site: Site) -> tuple[ParameterFact, int, int]:
        """Return the weight, its dim that is multiplied with the input, and its other dim.

        For an embedding these are `hidden` and `vocab`.
        """
        names = site.dims["weight"]
        pair = ("hidden", "vocab") if "vocab" in names else ("in", "out")
        return site.parameters["weight"], names.index(pair[0]), names.index(pair[1])

    def _outer_size(self, site: Site) -> int:
        if self._kind(site) == "norm":
            return 1
        fact, _, outer = self._weight_dims(site)
        return fact.shape[outer]

    def _blocks(self, site: Site) -> tuple[int, ...]:
        """Return the sizes of blocks side by side in the outer dim."""
        return block_sizes_of(self.blocks, self._outer_size(site))

    def _layouts(self, site: Site, plan: Plan) -> dict[str, Layout]:
        """Return the layout of each parameter of the site."""
        first, *others = map(str, self.over)
        hidden = self._hidden.split(".")
        if self._kind(site) == "norm":
            facts = {f.name: _unsplit(plan.layout(f.name)) for f in site.parameters.values()}
            return {name: _split_over(layout, hidden, 0) for name, layout in facts.items()}
        fact, inner, outer = self._weight_dims(site)
        blocks = self._blocks(site)
        weight = _split_over(_unsplit(plan.layout(fact.name)), [*others[1:], first], inner)
        layouts = {fact.name: weight.split(others[0], outer, blocks)}
        if "bias" in site.parameters:
            name = site.parameters["bias"].name
            layouts[name] = _split_over(_unsplit(plan.layout(name)), others, 0, blocks)
        return layouts

    def _required_divisions(
        self, site: Site, plan: Plan, sides: GridSides
    ) -> Iterator[tuple[int, int]]:
        """Yield (size, number of equal shards) that must be divisible."""
        if self._kind(site) == "norm":
            yield from ((f.shape[0], sides.hidden) for f in site.parameters.values())
            return
        fact, inner, outer = self._weight_dims(site)
        padded = plan.layout(fact.name).padded
        yield padded[inner], sides.inner
        sizes = self._blocks(site) if padded == fact.shape else (padded[outer],)
        divisor = sides.along if self._kind(site) == "Embedding" else sides.hidden
        yield from ((size, divisor) for size in sizes)

    # -- refusals ----------------------------------------------------------------------------------

    def _check_axes(self, plan: Plan) -> None:
        view = next((a for a in self.over if a not in plan.mesh.sizes), None)
        if view is not None:
            names = ", ".join(f"`{axis}`" for axis in plan.mesh.sizes)
            refuse(
                "S304",
                f"`{view}` is a view of several axes: a grid needs axes of the mesh",
                helps=(f"choose from {names}",),
            )

    def _check_norm(self, site: Site, plan: Plan) -> None:
        """Refuse modules whose parameters do not all run along the hidden dim (S401, S404)."""
        shapes = {fact.shape for fact in site.parameters.values()}
        if site.children or len(shapes) > 1 or any(len(shape) != 1 for shape in shapes):
            refuse(
                "S401",
                f"`{site}` is a `{site.class_name}`, which `grid` cannot shard",
                helps=("select the linear layers, embeddings and norms inside it",),
            )
        if any(site.fqn in action.sites for action in plan.rows_changing(Facet.STRUCTURE)):
            refuse(
                "S404",
                f"`{site}` is computed by a kernel, which `grid` cannot shard",
                helps=("leave out one of the two rows",),
            )

    def _check_output(self, site: Site, kind: str, plan: Plan) -> None:
        if self.output == S("vocab"):
            if kind not in ("Linear", "Conv1D") or self.blocks != 1:
                refuse(
                    "S306",
                    f"only logits may be sharded over classes, and `{site}` does not return logits",
                    helps=("leave out `output=`",),
                )
        elif self.output not in (None, R, *LAST):
            refuse(
                "S307",
                f"a grid shards the hidden dim: its output cannot be {self.output}",
                helps=("use `output=R`, or leave it out",),
            )
        elif kind in ("Linear", "Conv1D"):
            layout = plan.layout(site.parameters["weight"].name)
            if layout.padded != layout.shape:
                refuse(
                    "S306",
                    f"`{site}` is padded: its output would include the padding",
                    helps=("use `output=S(vocab)`: padding is cut off logits",),
                )

    def _refuse_size(self, site: Site, plan: Plan, size: int, divisor: int) -> None:
        fits = [
            side
            for side in range(2, MAX_SIDE + 1)
            if all(
                length % n == 0
                for length, n in self._required_divisions(
                    site, plan, GridSides(*(side,) * len(self.over))
                )
            )
        ]
        names = " and ".join(f"`{axis}`" for axis in self.over)
        helps = (
            [f"{names} may each be {' or '.join(map(str, fits))}"]
            if fits
            else ["no grid with equal sides divides it: keep it replicated"]
        )
        is_embedding = self._kind(site) == "Embedding"
        if size == self._outer_size(site) and (is_embedding or self.output == S("vocab")):
            dim = "vocab" if is_embedding else "out"
            helps.append(f"or pad it first: `{site} pad({dim}, multiple=128)`")
        mesh = ", ".join(f"{axis}={plan.mesh.size(axis)}" for axis in self.over)
        refuse(
            "S402",
            f"cannot split {size} evenly {divisor} ways",
            f"of `{site}`, over {mesh}",
            helps=helps,
        )


@dataclass(frozen=True)
class GridSides:
    """The sizes of a grid's or a cube's axes, and the numbers of shards of each dim."""

    rows: int
    along: int
    deep: int = 1

    @property
    def hidden(self) -> int:
        """Return the number of shards of an activation's hidden dim."""
        return self.along * self.deep

    @property
    def inner(self) -> int:
        """Return the number that must divide the weight's dim that is multiplied with the input."""
        return math.lcm(self.rows * self.deep, self.hidden)


def _unsplit(layout: Layout) -> Layout:
    """Return the layout without splits."""
    return Layout(layout.shape, layout.padded)


def _split_over(layout: Layout, axes: list[str], dim: int, blocks: tuple[int, ...] = ()) -> Layout:
    for axis in axes:
        layout = layout.split(axis, dim, blocks)
    return layout


def _check_plain(site: Site, kind: str, plan: Plan) -> None:
    """Refuse (S404) subclasses that compute something else, and special embeddings."""
    extra = sorted(site.parameters.keys() - {"weight", "bias"})
    if extra:
        refuse(
            "S404",
            f"`{site}` computes with `{extra[0]}` too, which `grid` cannot shard",
            helps=("leave out one of the two rows", "or use `shard(col, ...)`, `shard(row, ...)`"),
        )
    module = plan.model.model.get_submodule(site.fqn)
    unsupported = [
        n for n in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(module, n, None)
    ]
    if unsupported or not is_plain(site, kind, plan):
        reason = f"with `{unsupported[0]}`" if unsupported else "that computes something else"
        refuse(
            "S404",
            f"`{site}` is a `{kind}` {reason}",
            helps=("select the modules inside it, or keep it replicated",),
        )
