"""shard: split a module's parameters, or the activations at its edges, over one mesh axis."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import TYPE_CHECKING, Any, Literal

from schedlang.kinds import Axis, Rest
from schedlang.placement import P, Placement, R, Replicate, S
from schedlang.plan import Boundary, Plan
from schedlang.primitive import Primitive, refuse

if TYPE_CHECKING:
    from schedlang.model import ParameterFact, Site

STYLES = {"col": "out", "row": "in", "vocab": "vocab"}
CONVOLUTIONS = ("Conv1d", "Conv2d", "Conv3d")
KINDS = ("Linear", "Conv1D", "Embedding", *CONVOLUTIONS)
MOST_SHOWN = 8


class shard(Primitive):  # noqa: N801
    """Give each rank of one axis a part of a module, and say how activations enter and leave it.

    before   y = f(x)                          every rank holds f whole
    after    y = leave(f_part(enter(x)))       every rank holds one part of f's parameters

    Styles state both ends:
      col    splits the outputs (`weight=S(out), bias=S(out), input=R, output=S(-1)`)
      row    splits the inputs and sums the results (`weight=S(in), input=S(-1), output=R`)
      vocab  splits the rows of an embedding, or the classes of an output layer, whose loss is then
             computed without ever gathering the logits
    `output=S(seq)` after `row` leaves the sum split along the sequence (sequence parallelism);
    `output=R` after `col` gathers.  `blocks` says what lies side by side in a fused weight: 3 for
    q, k, v of one size, `[4096, 1024, 1024]` for sizes that differ.  Parameters can be named
    instead of a style: `shard(weight=S(out), bias=S(out), over=tp)`.  A module of any class can
    be given `input` and `output` alone.  Sizes that a module counts by (heads, widths) are found by
    tracing.

    Megatron-LM (Shoeybi et al. 2019; Korthikanti et al. 2022).
    """

    style: Literal["col", "row", "vocab"] | None = None
    over: Axis = field(kw_only=True)
    blocks: int | tuple[int, ...] = field(default=1, kw_only=True)
    input: S | Replicate | None = field(default=None, kw_only=True)
    output: S | Replicate | P | None = field(default=None, kw_only=True)
    tensors: Rest[S | Replicate] = field(default=(), kw_only=True)

    example = "mlp.up  shard(col, over=tp)"
    reads = frozenset({"structure", "shape", "dtype"})
    writes = frozenset({"placement"})
    gives_up = frozenset({"rounding"})

    def check(self, site: Site, plan: Plan) -> None:
        """Refuse what cannot be split so, with the sizes that can."""
        if self.style is not None and self.tensors:
            refuse("S306", "a style already says how each parameter is split",
                   helps=("leave out the style, or the parameters",))  # fmt: skip
        if self.style is not None and self._dim(site) is None:
            self._refuse_class(site)
        kind = next((k for k in KINDS if site.is_a(k)), None)
        if kind is not None and self._named(site) and not self._plain(site, kind, plan):
            refuse(
                "S404",
                f"`{site}` is a `{kind}` that computes something else",
                notes=("a copy of it was tried, and its parts would be computed as a plain one",),
                helps=("shard the modules inside it, or leave it whole",),
            )
        for name, fact, dim in self._splits(site):
            self._check_split(site, plan, name, fact, dim)
        if kind is not None:
            self._check_together(site)
        if kind in CONVOLUTIONS:
            self._check_groups(site, plan)

    def effect(self, site: Site, plan: Plan) -> Plan:
        """Split the parameters and note the boundary."""
        axis = str(self.over)
        for _, fact, dim in self._splits(site):
            layout = plan.layout(fact.name)
            if axis not in layout.axes:  # a tied name may have split it already
                sizes = self._blocks(layout.padded[dim])
                plan = plan.with_layout(fact.name, layout.split(axis, dim, sizes))
        entry, leave = self._edges(site)
        return plan.with_boundary(site.fqn, Boundary(axis, entry, leave))

    def apply(self, site: Site, build: Any) -> None:
        """Nothing of its own: `build` puts all crossings in place once the whole plan is traced."""

    # -- what the arguments mean at a site ---------------------------------------------------------

    def _dim(self, site: Site) -> str | None:
        """The name of the weight's dim that the style splits; None if the class has none."""
        names = site.dims.get("weight", ())
        if self.style is None:
            return None
        wanted = STYLES[self.style]
        if self.style == "vocab" and "out" in names:
            return "out"
        return wanted if wanted in names else None

    def _plain(self, site: Site, kind: str, plan: Plan) -> bool:
        """Does the module compute what its class says?  Tried once for each kind of module."""
        if plan.model.computes_as(site.fqn, kind):
            return True
        key = ("plain", kind, site.kind)
        if key not in plan.model.cache:
            from schedlang.runtime.likeness import computes_like

            module = plan.model.model.get_submodule(site.fqn)
            plan.model.cache[key] = computes_like(module, kind)
        return bool(plan.model.cache[key])

    def _named(self, site: Site) -> dict[str, Placement]:
        """Each parameter of the site that is given a placement."""
        if self.style is None:
            return {name: value for name, value in self.tensors}
        dim = self._dim(site)
        given: dict[str, Placement] = {"weight": S(dim or 0)}
        if "bias" in site.parameters:
            given["bias"] = S("out") if dim == "out" else R
        return given

    def _splits(self, site: Site) -> Iterator[tuple[str, ParameterFact, int]]:
        for name, placement in self._named(site).items():
            fact = site.parameters.get(name)
            if fact is None:
                known = ", ".join(f"`{n}`" for n in site.parameters) or "none"
                refuse("S305", f"`{site}` has no parameter `{name}`", helps=(f"it has {known}",))
            if isinstance(placement, S):
                yield name, fact, self._number(site, name, fact, placement)

    def _number(self, site: Site, name: str, fact: ParameterFact, placement: S) -> int:
        names = site.dims.get(name, ())
        if isinstance(placement.dim, str):
            if placement.dim in names:
                return names.index(placement.dim)
            known = ", ".join(f"`{n}`" for n in names) or "only numbers"
            refuse(
                "S307", f"`{site}.{name}` has no dim `{placement.dim}`", helps=(f"it has {known}",)
            )
        if not -len(fact.shape) <= placement.dim < len(fact.shape):
            refuse("S307", f"`{site}.{name}` has no dim {placement.dim}",
                   helps=(f"its shape is {list(fact.shape)}",))  # fmt: skip
        return placement.dim % len(fact.shape)

    def _blocks(self, size: int) -> tuple[int, ...]:
        if isinstance(self.blocks, int):
            return (size // self.blocks,) * self.blocks
        return tuple(self.blocks)

    def _edges(self, site: Site) -> tuple[Placement | None, Placement | None]:
        """The placements that the module wants and hands on."""
        splits = {site.dims.get(name, ())[dim] for name, _, dim in self._splits(site) if site.dims}
        entry: Placement | None = self.input
        leave: Placement | None = self.output
        if any(site.is_a(kind) for kind in CONVOLUTIONS):
            return self._channels(site, splits)
        if "out" in splits:
            head = S("vocab") if self.style == "vocab" else S(-1)
            return entry or R, leave or head
        if "in" in splits:
            return entry or S(-1), leave or R
        if "vocab" in splits:
            return entry, leave or R
        return entry, leave

    def _channels(self, site: Site, splits: set[str]) -> tuple[Placement | None, Placement | None]:
        """The same of a convolution, whose channels are dim 1."""
        if "out" in splits:  # groups see their own channels: as they come
            return self.input, self.output or S(1)
        if "in" in splits:
            return self.input or S(1), self.output or R
        return self.input, self.output

    # -- refusals ----------------------------------------------------------------------------------

    def _refuse_class(self, site: Site) -> None:
        dims = site.dims.get("weight", ())
        legal = [
            style
            for style, dim in STYLES.items()
            if dim in dims or (style == "vocab" and "out" in dims)
        ]
        helps = [f"choose one of {', '.join(f'`{s}`' for s in legal)}"] if legal else [
            "name the projections inside it, or give it `input=` and `output=` alone"
        ]  # fmt: skip
        refuse(
            "S401",
            f"`{site}` is a `{site.class_name}`, which the style `{self.style}` does not fit",
            helps=helps,
        )

    def _check_together(self, site: Site) -> None:
        """Refuse a bias that does not lie as the outputs do, and classes in several blocks."""
        splits = {(name, site.dims[name][dim]) for name, _, dim in self._splits(site)}
        if "bias" in site.parameters and (("weight", "out") in splits) != (
            ("bias", "out") in splits
        ):
            refuse("S407", f"the weight and the bias of `{site}` are split unlike each other",
                   "both or neither along `out`",
                   helps=("use a style: it says how both are split",))  # fmt: skip
        head = isinstance(self._edges(site)[1], S) and self._edges(site)[1] == S("vocab")
        if head and ("weight", "out") in splits and self.blocks != 1:
            refuse("S406", f"the classes of `{site}` are one block",
                   helps=("leave out `blocks=`", "or use the style `col`"))  # fmt: skip

    def _check_groups(self, site: Site, plan: Plan) -> None:
        """Refuse groups of channels that ranks would cut."""
        groups, ranks = plan.model.model.get_submodule(site.fqn).groups, plan.mesh.size(self.over)
        splits = {site.dims[name][dim] for name, _, dim in self._splits(site)}
        assert isinstance(groups, int)
        if groups > 1 and "in" in splits:
            better = f"split its outputs: `{site} shard(col, over={self.over})`"
            refuse("S402", f"`{site}` has {groups} groups, which see their own inputs only",
                   helps=(better,))  # fmt: skip
        if groups > 1 and splits and groups % ranks:
            legal = [n for n in range(2, groups + 1) if groups % n == 0]
            refuse("S402", f"cannot split {groups} groups evenly {ranks} ways",
                   f"`{self.over}` has {ranks} ranks",
                   helps=(f"`{self.over}` may be {_some(legal)}",))  # fmt: skip

    def _check_split(
        self, site: Site, plan: Plan, name: str, fact: ParameterFact, dim: int
    ) -> None:
        size, ranks = plan.layout(fact.name).padded[dim], plan.mesh.size(self.over)
        blocks = self._blocks(size)
        if sum(blocks) != size:
            refuse("S406", f"blocks of {list(blocks)} do not make up {size}",
                   notes=(f"`{site}.{name}` is {_shape(fact)}",))  # fmt: skip
        bad = next((block for block in blocks if block % ranks), None)
        if bad is None:
            return
        names = site.dims.get(name, ())
        what = f"dim `{names[dim]}`" if names else f"dim {dim}"
        legal = [n for n in range(2, 1025) if all(block % n == 0 for block in blocks)]
        helps = [f"`{self.over}` may be {_some(legal)}"] if legal else []
        vocab = names[dim : dim + 1] in (("vocab",), ("out",)) and self.style == "vocab"
        if vocab:
            helps.append(f"or pad it first: `{site} pad({names[dim]}, multiple=128)`")
        style = f"`{self.style}`" if self.style else "this"
        count = f"{len(blocks)} blocks of {bad}" if len(blocks) > 1 else f"{bad}"
        refuse("S402", f"cannot split {count} evenly {ranks} ways",
               f"`{self.over}` has {ranks} ranks",
               notes=(f"`{site}.{name}` is {_shape(fact)}; {style} splits {what} = {size}",),
               helps=helps)  # fmt: skip


def _shape(fact: ParameterFact) -> str:
    return " x ".join(map(str, fact.shape))


def _some(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:MOST_SHOWN]))
    return shown if len(numbers) <= MOST_SHOWN else f"{shown}, ..."
