"""shard: split a module's parameters, or the activations at its edges, over one mesh axis."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import field
from fractions import Fraction
from typing import Any, Literal

from schedlang.diagnostics.diagnostic import Facts
from schedlang.ir.annotations import Boundary
from schedlang.ir.features import SplittingHeads, Uniform, check_called
from schedlang.ir.model import ParameterFact, Site
from schedlang.ir.placement import (
    EVEN,
    P,
    Placement,
    R,
    Replicate,
    S,
    SplitDim,
    block_sizes_of,
    find_remedies,
    first_remedy,
    format_numbers,
    suggest_blocks,
)
from schedlang.ir.plan import Plan
from schedlang.ir.primitive import refuse
from schedlang.language.kinds import Axis, Rest

STYLES = {"col": "out", "row": "in", "vocab": "vocab"}
TABLE_STYLES = {
    "col": "hidden",
    "row": "vocab",
    "vocab": "vocab",
}  # a lookup multiplies by one-hots
CONVOLUTIONS = ("Conv1d", "Conv2d", "Conv3d")
TABLE_CLASSES = ("Embedding", "EmbeddingBag")
KINDS = ("Linear", "Conv1D", *TABLE_CLASSES, *CONVOLUTIONS)


class shard(SplittingHeads, Uniform):  # noqa: N801
    """Shard a module over one axis, and set the placements of its input and output.

    before   y = f(x)                          every rank holds the full f
    after    y = leave(f_part(enter(x)))       each rank holds one shard of f's parameters

    A style sets the placements of parameters, input and output:
      col    splits the outputs (`weight=S(out), bias=S(out), input=R, output=S(-1)`)
      row    splits the inputs and sums the results (`weight=S(in), input=S(-1), output=R`)
      vocab  splits the rows of an embedding, or the classes of an output layer, whose loss is then
             computed without gathering the logits
    For an embedding or an embedding bag `row` means `vocab`, and `col` splits the embedding dim.
    `output=S(seq)` with `row` reduce-scatters the sum along the sequence (sequence parallelism);
    `output=R` with `col` all-gathers.  `blocks` describes a fused weight: 3 for q, k and v of one
    size, `[4096, 1024, 1024]` for different sizes.  Placements of parameters may replace a style:
    `shard(weight=S(out), bias=S(out), over=tp)`.  For a module of any class, `input` and `output`
    may be given alone; `input=S(2)` for a tensor with `S(1)` is one all-to-all (Zhao et al.: DSP,
    2024).  With `input=R` a module of one's own may compute with split parameters beside full
    tensors; with `output=R` the partial sums that it computes are summed.  Sizes in attributes of
    modules (heads, widths) are found by tracing, and divided.

    All shards have one size.  Where the ranks do not divide a dim, `uneven=pad` adds zeros, which
    change no result, gradient, norm or state dict.  `heads` is the number of pieces of a dim that
    must not be split: `heads=6, uneven=pad` pads 6 heads to 8 on 4 ranks (all four projections of
    an attention need the same arguments).  `heads=2, uneven=replicate` stores each of 2 key-value
    heads on 2 of 4 ranks; the gradients of the copies are summed.

    Megatron-LM (Shoeybi et al. 2019; Korthikanti et al. 2022).
    """

    style: Literal["col", "row", "vocab"] | None = None
    over: Axis = field(kw_only=True)
    blocks: int | tuple[int, ...] = field(default=1, kw_only=True)
    input: S | Replicate | None = field(default=None, kw_only=True)
    output: S | Replicate | P | None = field(default=None, kw_only=True)
    heads: int | None = field(default=None, kw_only=True)
    uneven: Literal["pad", "replicate"] | None = field(default=None, kw_only=True)
    tensors: Rest[S | Replicate] = field(default=(), kw_only=True)

    example = "mlp.up  shard(col, over=tp)"
    reads = frozenset({"structure", "shape", "dtype"})
    writes = frozenset({"placement"})
    gives_up = frozenset({"rounding"})
    looks_at = ("max_norm", "groups")

    def agree(self, axes: Collection[str]) -> None:
        """Refuse a style together with placements, a row without either, and wrong `blocks`."""
        if self.style is not None and self.tensors:
            refuse(
                "S306",
                "a style already defines how each parameter is sharded",
                helps=("leave out the style, or the placements of parameters",),
            )
        if (self.style, self.input, self.output) == (None,) * 3 and not self.tensors:
            over = f"over={self.over}"
            refuse(
                "S305",
                "`shard` needs a style or a placement",
                "neither is given",
                helps=(
                    f"for projections: `shard(col, {over})` shards outputs, `shard(row, {over})`"
                    " inputs",
                    f"for embeddings and output layers: `shard(vocab, {over})`",
                    f"for parameters by name, or activations: `shard(weight=S(0), {over})`,"
                    f" `shard(input=S(1), {over})`",
                ),
            )
        sizes = (self.blocks,) if isinstance(self.blocks, int) else self.blocks
        if not sizes or min(sizes) < 1:
            refuse(
                "S304",
                "`blocks` must be the number of blocks, or a list of their sizes",
                f"this is {self.blocks}",
                helps=("`blocks=3`", "`blocks=[8, 4, 4]`"),
            )

    def check(self, site: Site, plan: Plan) -> None:
        """Refuse modules and sizes that cannot be split so; the help names legal sizes."""
        if self.style is not None and self._dim(site) is None:
            self._refuse_class(site)
        placements = self._placements(site)
        if not placements:
            check_called(self, site, plan)
        kind = next((k for k in KINDS if site.is_a(k)), None)
        if kind is not None and placements and not is_plain(site, kind, plan):
            refuse(
                "S404",
                f"`{site}` is a `{kind}` whose forward does not compute a plain `{kind}`",
                notes=("a copy was tried: its shards gave a different result",),
                helps=("select the modules inside it, or keep it replicated",),
            )
        if kind in CONVOLUTIONS and (self.heads or self.uneven):
            refuse(
                "S401",
                f"`{site}` is a `{site.class_name}`: its channels are sharded evenly",
                helps=("leave out `heads=` and `uneven=`",),
            )
        module = plan.model.model.get_submodule(site.fqn)
        if getattr(module, "max_norm", None) is not None and placements:
            refuse(
                "S404",
                f"`{site}` changes its weight during lookup (`max_norm`)",
                helps=("keep it replicated", "or build it without `max_norm`"),
            )
        stays_split = self.style == "vocab" and self.output is None and self._dim(site) == "out"
        if stays_split and (module._backward_hooks or module._backward_pre_hooks):
            refuse(
                "S404",
                f"`{site}` has a hook on gradients, and split logits never have any",
                helps=("`shard(col, output=R)` gathers them", "or remove the hook"),
            )
        if placements and (kind is None or kind in TABLE_CLASSES):
            self._check_table(site, module)
        for name, fact, dim in self._splits(site):
            self._check_split(site, plan, name, fact, dim)
        if kind is not None:
            self._check_consistent(site)
        if kind in CONVOLUTIONS:
            self._check_groups(site, plan)

    def transform(self, site: Site, plan: Plan) -> Plan:
        """Add the layouts of split parameters, and the boundary of the module."""
        axis = str(self.over)
        one_head = self.heads == 1 and self.uneven == "replicate"
        if one_head and plan.mesh.size(self.over) > 1:  # each rank holds the full parameters
            return plan.with_boundary(
                site.fqn, Boundary(axis, self.input or R, R, replicated_output=True)
            )
        for _, fact, dim in self._splits(site):
            layout = plan.layout(fact.name)
            if axis not in layout.axes:  # a tied name may have split it already
                sizes = block_sizes_of(self.blocks, layout.shape[dim])
                cut = SplitDim(sizes, self.heads, self.uneven)
                uneven = (
                    cut.uneven_rule(plan.mesh.size(axis)) if layout.padded == layout.shape else None
                )
                split = layout.split(axis, dim, cut.blocks, uneven or EVEN)
                plan = plan.with_layout(fact.name, split)
        entry, output = self._edges(site)
        return plan.with_boundary(site.fqn, Boundary(axis, entry, output))

    # -- what the arguments mean at a site ---------------------------------------------------------

    def _dim(self, site: Site) -> str | None:
        """Return the name of the weight's dim that the style splits; None if there is none."""
        names = site.dims.get("weight", ())
        if self.style is None:
            return None
        dim = (TABLE_STYLES if "vocab" in names else STYLES)[self.style]
        if self.style == "vocab" and "out" in names:
            return "out"
        return dim if dim in names else None

    def _placements(self, site: Site) -> dict[str, Placement]:
        """Return the placements of the site's parameters."""
        if self.style is None:
            return {name: value for name, value in self.tensors}
        dim = self._dim(site)
        dims = ((name, names) for name, names in site.dims.items() if name in site.parameters)
        return {name: S(dim or 0) if dim in names else R for name, names in dims}

    def _splits(self, site: Site) -> Iterator[tuple[str, ParameterFact, int]]:
        """Yield (name, parameter, dim) of each split parameter."""
        for name, placement in self._placements(site).items():
            fact, names = site.parameters.get(name), site.dims.get(name, ())
            if fact is None:
                choices = ", ".join(f"`{n}`" for n in site.parameters) or "none"
                refuse("S305", f"`{site}` has no parameter `{name}`", helps=(f"it has {choices}",))
            if not isinstance(placement, S):
                continue
            dim, legal = placement.dim, f"its shape is {list(fact.shape)}"
            if isinstance(dim, str):
                choices = ", ".join(f"`{n}`" for n in names) or "only numbered dims"
                dim_text, legal, exists = f"`{dim}`", f"it has {choices}", dim in names
            else:
                dim_text, exists = str(dim), -len(fact.shape) <= dim < len(fact.shape)
            if not exists:
                refuse("S307", f"`{site}.{name}` has no dim {dim_text}", helps=(legal,))
            yield name, fact, names.index(dim) if isinstance(dim, str) else dim % len(fact.shape)

    def _edges(self, site: Site) -> tuple[Placement | None, Placement | None]:
        """Return the placements of the module's input and output."""
        splits = {site.dims.get(name, ())[dim] for name, _, dim in self._splits(site) if site.dims}
        entry: Placement | None = self.input
        output: Placement | None = self.output
        if any(site.is_a(kind) for kind in CONVOLUTIONS):
            return self._convolution_edges(splits)
        if "out" in splits:
            head = S("vocab") if self.style == "vocab" else S(-1)
            return entry or R, output or head
        if "in" in splits:
            return entry or S(-1), output or R
        if "vocab" in splits:
            return entry, output or R
        return entry, output

    def _convolution_edges(self, splits: set[str]) -> tuple[Placement | None, Placement | None]:
        """Return the placements of a convolution's input and output, whose channels are dim 1."""
        if "out" in splits:  # groups read their own channels: any placement of the input
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
        helps = (
            [f"choose one of {', '.join(f'`{option}`' for option in legal)}"]
            if legal
            else ["select the projections inside it, or give only `input=` and `output=`"]
        )
        refuse(
            "S401",
            f"`{site}` is a `{site.class_name}`, which the style `{self.style}` does not fit",
            helps=helps,
        )

    def _check_table(self, site: Site, module: Any) -> None:
        """Refuse tables whose shard computes something else than the full table (S404)."""
        if getattr(module, "scale_grad_by_freq", False):
            refuse(
                "S404",
                f"`{site}` scales gradients by row counts (`scale_grad_by_freq`)",
                helps=("keep it replicated", "or build it without `scale_grad_by_freq`"),
            )
        rows = any(site.dims.get(n, ())[d : d + 1] == ("vocab",) for n, _, d in self._splits(site))
        if rows and getattr(module, "mode", "") == "max" and site.is_a("EmbeddingBag"):
            hint = f"shard the embedding dim instead: `{site} shard(col, over={self.over})`"
            refuse(
                "S404",
                f"`{site}` takes the max of each bag, and a shard has only some of its rows",
                helps=(hint,),
            )

    def _check_consistent(self, site: Site) -> None:
        """Refuse parameters with another layout than the weight, and classes in several blocks."""
        splits = {(name, site.dims[name][dim]) for name, _, dim in self._splits(site)}
        if "weight" not in site.parameters and (splits or self.style is not None):
            refuse(
                "S407",
                f"`{site}` computes its weight, and has no parameter `weight` to shard",
                "its bias alone would be sharded" if splits else "nothing would be sharded",
                helps=(
                    f"leave `{site}` out, and the row that it feeds",
                    "or make it a parameter before: `remove_parametrizations`,"
                    " `remove_weight_norm` or `remove_spectral_norm` of torch",
                ),
            )
        for name, names in site.dims.items():
            for dim in ("out", "in") if name in site.parameters and name != "weight" else ():
                if dim in names and (("weight", dim) in splits) != ((name, dim) in splits):
                    refuse(
                        "S407",
                        f"only one of weight and {name} of `{site}` is sharded along `{dim}`",
                        f"shard both along `{dim}`, or neither",
                        helps=("use a style: it shards both",),
                    )
        in_blocks = self.blocks != 1 and ("weight", "out") in splits
        if in_blocks and self._edges(site)[1] == S("vocab"):
            refuse(
                "S406",
                f"the classes of `{site}` cannot be split into blocks",
                helps=("leave out `blocks=`", "or use the style `col`"),
            )

    def _check_groups(self, site: Site, plan: Plan) -> None:
        """Refuse groups of channels that would be split over ranks (S402)."""
        groups, ranks = plan.model.model.get_submodule(site.fqn).groups, plan.mesh.size(self.over)
        splits = {site.dims[name][dim] for name, _, dim in self._splits(site)}
        assert isinstance(groups, int)
        if groups > 1 and "in" in splits:
            hint = f"shard its outputs: `{site} shard(col, over={self.over})`"
            refuse(
                "S402",
                f"`{site}` has {groups} groups: each reads only its own inputs",
                helps=(hint,),
            )
        if groups > 1 and splits and groups % ranks:
            legal = [n for n in range(2, groups + 1) if groups % n == 0]
            refuse(
                "S402",
                f"cannot split {groups} groups evenly {ranks} ways",
                f"`{self.over}` has {ranks} ranks",
                helps=(f"`{self.over}` may be {format_numbers(legal)}",),
            )

    def _check_split(
        self, site: Site, plan: Plan, name: str, fact: ParameterFact, dim: int
    ) -> None:
        layout, ranks = plan.layout(fact.name), plan.mesh.size(self.over)
        size = layout.shape[dim]
        cut = SplitDim(block_sizes_of(self.blocks, size), self.heads, self.uneven)
        if sum(cut.blocks) != size:
            refuse(
                "S406",
                f"blocks [{format_numbers(cut.blocks)}] add up to {sum(cut.blocks)}, not to {size}",
                notes=(f"`{site}.{name}` is {_shape(fact)}",),
                helps=suggest_blocks(self.blocks, size),
            )
        odd = [block for block in cut.blocks if self.heads and block % self.heads]
        if odd or (self.heads is not None and self.heads < 1):
            divide = [n for n in range(1, (odd or [size])[0] + 1) if (odd or [size])[0] % n == 0]
            refuse(
                "S406",
                f"{(odd or [size])[0]} cannot be divided into {self.heads} equal heads",
                notes=(f"`{site}.{name}` is {_shape(fact)}",),
                helps=(f"`heads` may be {format_numbers(divide)}",),
            )
        if self.uneven == "replicate":
            self._check_replicate(site, plan, name, dim, cut)
        padded = Fraction(layout.padded[dim], size)
        padded_units = [unit * padded for unit in cut.units]
        if padded == 1:
            divides = cut.uneven_rule(ranks) is not None
        else:
            divides = all(unit.denominator == 1 and unit % ranks == 0 for unit in padded_units)
        if not divides:
            misfits = (
                b for b, n in zip(cut.blocks, padded_units) if n.denominator > 1 or n % ranks
            )
            self._refuse_size(site, name, dim, cut, next(misfits, size) * padded, ranks)

    def _refuse_size(
        self, site: Site, name: str, dim: int, cut: SplitDim, bad: Fraction, ranks: int
    ) -> None:
        fact, names = site.parameters[name], site.dims.get(name, ())
        dim_text = f"dim `{names[dim]}`" if names else f"dim {dim}"
        legal = cut.fitting_rank_counts()
        helps = [f"`{self.over}` may be {format_numbers(legal)}"] if legal else []
        facts: Facts = ()
        if names[dim : dim + 1] in (("vocab",), ("out",)) and self.style == "vocab":
            helps.append(f"or pad it first: `{site} pad({names[dim]}, multiple=128)`")
        elif self.uneven is None:
            out = names[dim : dim + 1] == ("out",)
            helps += find_remedies(f"{site} {self._call}", self.heads, ranks, out)
            facts = first_remedy(self.heads, ranks, out)
        style = f"`{self.style}`" if self.style else "this"
        count = f"{len(cut.blocks)} blocks of {bad}" if len(cut.blocks) > 1 else f"{bad}"
        if self.heads:
            count = f"{self.heads} heads"
        refuse(
            "S402",
            f"cannot split {count} evenly {ranks} ways",
            f"`{self.over}` has {ranks} ranks",
            notes=(
                f"`{site}.{name}` is {_shape(fact)}; {style} splits {dim_text} = {fact.shape[dim]}",
            ),
            helps=helps,
            facts=facts,
        )

    @property
    def settles_heads(self) -> bool:
        """Whether `uneven` settles how heads are split."""
        return self.uneven is not None

    def remedies(
        self, site: str, heads: int, ranks: int, blocks: bool
    ) -> tuple[Sequence[str], Facts]:
        """Return calls with arguments for heads, or with blocks, and the first one's facts."""
        remedies = find_remedies(f"{site} {self._call}", heads, ranks, self.style == "col")
        facts = first_remedy(heads, ranks, self.style == "col")
        if blocks and self.blocks == 1:
            remedies.append(
                f"if these are not heads, but {heads} blocks side by side (q, k and v):"
                f" `{site} {self._call}, blocks={heads})`"
            )
            facts = facts or (("blocks", str(heads)),)
        return remedies, facts

    @property
    def _call(self) -> str:
        """Return the text of the call up to its axis and blocks, without `)`."""
        args = [self.style] if self.style else [f"{k}={v}" for k, v in self.tensors]
        blocks = self.blocks if isinstance(self.blocks, int) else list(self.blocks)
        extra = [] if blocks == 1 else [f"blocks={blocks}"]
        return f"shard({', '.join([*args, f'over={self.over}', *extra])}"

    def _check_replicate(self, site: Site, plan: Plan, name: str, dim: int, cut: SplitDim) -> None:
        """Refuse shards held by several ranks where they would be summed several times (S402)."""
        ranks, names = plan.mesh.size(self.over), site.dims.get(name, ())
        if cut.divides_evenly(ranks):
            return
        if self.heads is None:
            refuse(
                "S402",
                "`uneven=replicate` needs the number of heads",
                notes=(f"dim {dim} of `{site}.{name}` is {sum(cut.blocks)}",),
                helps=("give it: `heads=2`",),
            )
        if names[dim : dim + 1] != ("out",):
            refuse(
                "S402",
                f"the shards of `{site}.{name}` that several ranks hold would be summed twice",
                helps=(
                    "replicate outputs only, for example key/value heads",
                    "or pad: `uneven=pad`",
                ),
            )
        if ranks % self.heads:
            refuse(
                "S402",
                f"{ranks} ranks cannot share {self.heads} heads evenly",
                f"`{self.over}` has {ranks} ranks",
                helps=(
                    f"`{self.over}` may be a multiple or a divisor of {self.heads}",
                    "or pad: `uneven=pad`, on all rows of the attention",
                ),
            )
        if str(self.over) not in plan.mesh.sizes and self.heads > 1:
            refuse(
                "S402",
                f"`{self.over}` is a view: its ranks cannot share heads",
                helps=("use an axis of the mesh", "or pad: `uneven=pad`"),
            )


def is_plain(site: Site, kind: str, plan: Plan) -> bool:
    """Return whether a module computes what its class computes; cached for equal modules."""
    if plan.model.computes_as(site.fqn, kind) or site.is_a("AdaptedProjection"):
        return True
    from schedlang.kernels.probe import module_key

    module = plan.model.model.get_submodule(site.fqn)
    key = ("plain", kind, module_key(module))
    if key not in plan.model.cache:
        from schedlang.runtime.propagation.subclass_probe import computes_like

        plan.model.cache[key] = computes_like(module, kind)
    return bool(plan.model.cache[key])


def _shape(fact: ParameterFact) -> str:
    return " x ".join(map(str, fact.shape))
