"""adapt: a low-rank adapter beside a projection, and nothing else trained."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import field, replace
from functools import lru_cache
from typing import Literal

from schedlang.ir.features import Settled
from schedlang.ir.mesh import Mesh
from schedlang.ir.model import Site, is_inside, matches
from schedlang.ir.placement import Layout
from schedlang.ir.plan import Plan
from schedlang.ir.primitive import refuse

KINDS = ("Linear", "Conv1D")
BLOCK = 64  # elements of a weight that share a scale


class adapt(Settled):  # noqa: N801
    """Freeze the weight of a projection and train a low-rank adapter beside it (LoRA or DoRA).

    before   y = x W + b
    lora     y = x W + b + (alpha / rank) dropout(x) A B     A is random, B begins with zeros
    dora     y = m / |W'| (x W + (alpha / rank) dropout(x) A B) + b     W' = W + (alpha / rank) A B;
             m begins as |W|, the norm of the weights of each output, and is trained; |W'| is a
             constant in backward

    The first such row freezes all parameters of the model; `keep` excepts some, as in `freeze`:
    `keep="score.*"` also trains a new head.  A `shard` row below splits the adapter with its
    projection: B and m along split outputs, A along split inputs, and one all-reduce sums both
    results.  The gradient of a replicated parameter of the adapter is summed over ranks.

    The projection keeps its name and its parameters, and gets `lora_A` [rank, in], `lora_B` [out,
    rank] and `lora_magnitude` [out], in the dtype of its weight; their initial values depend on
    `seed` and their names.  `program.export` merges them into the weights.

    Results are those of training the original with the same adapters: `relax(model)`.

    `base` quantizes the frozen weight on each rank, with a scale for each `block` elements along
    its inputs (a full row, if that is shorter): the largest absolute value.  The weight is decoded
    in forward and again in backward, and is not stored in between.  Each rank holds the codes of
    its shard, also if `zero` slices the trained parameters.

    int8, int4   127 or 7 equal steps on each side of zero
    nf4          16 levels, the quantiles of a normal distribution

    The comparison trains the original with the decoded values.  Exported weights are made of these
    values, too.

    LoRA (Hu et al. 2021) and DoRA (Liu et al. 2024), as PEFT computes them; LLM.int8 (Dettmers et
    al. 2022), QLoRA (Dettmers et al. 2023).
    """

    kind: Literal["lora", "dora"]
    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    keep: str | tuple[str, ...] = field(default=(), kw_only=True)
    seed: int = field(default=0, kw_only=True)
    base: Literal["int8", "int4", "nf4"] | None = field(default=None, kw_only=True)
    block: int = field(default=BLOCK, kw_only=True)

    example = "layers.*.mlp.up  adapt(lora, rank=4)"
    reads = frozenset({"structure"})
    writes = frozenset({"trained"})
    foremost = True
    takes = "selection"
    gives_up = frozenset({"model"})

    def agree(self, axes: Collection[str]) -> None:
        """Refuse values out of range."""
        if self.rank < 1:
            refuse("S304", f"`rank` must be 1 or more, not {self.rank}", helps=("`rank=8`",))
        if not self.alpha > 0:
            refuse(
                "S304",
                f"`alpha` must be more than 0, not {self.alpha}",
                notes=("the adapter's result is multiplied by alpha / rank",),
                helps=("`alpha=16`",),
            )
        if not 0 <= self.dropout < 1:
            refuse(
                "S304",
                f"`dropout` is a probability below 1, not {self.dropout}",
                helps=("`dropout=0.1`",),
            )
        if self.block < 1 or self.base is None and self.block != BLOCK:
            reason = (
                "a scale is for one element or more" if self.block < 1 else "no base is quantised"
            )
            refuse(
                "S304",
                f"`block={self.block}`, but {reason}",
                helps=(
                    "leave it out",
                    f"or quantise the base: `adapt({self.kind}, base=int8, block=64)`",
                ),
            )

    def check(self, sites: tuple[Site, ...], plan: Plan) -> None:
        """Refuse modules that are no projections, have an adapter, or share their weight."""
        for site in sites:
            self._check_kind(site, plan)
            weight = site.parameters["weight"]
            if len(weight.names) > 1:
                other = next(n for n in weight.names if n != f"{site}.weight")
                refuse(
                    "S418",
                    f"the weight of `{site}` is `{other}` as well",
                    notes=("merged, the adapter would change both",),
                    helps=(
                        f"give it a weight of its own first: `{site}  untie(weight)`",
                        "or leave it out",
                    ),
                )
            if self.rank > min(weight.shape):
                refuse(
                    "S304",
                    f"`rank` is {self.rank}, and `{site}` has a rank of {min(weight.shape)} itself",
                    notes=(f"its weight is {' x '.join(map(str, weight.shape))}",),
                    helps=(f"use {min(weight.shape)} or less; 4 to 64 are usual",),
                )
        self._check_coded(sites, plan)
        for pattern in self._keep_patterns:
            if not any(matches(name, pattern) for name in plan.model.parameters):
                examples = ", ".join(f"`{name}`" for name in list(plan.model.parameters)[-3:])
                refuse(
                    "S305",
                    f"the model has no parameter `{pattern}`",
                    helps=(f"it has {examples}, ...",),
                )

    def transform(self, sites: tuple[Site, ...], plan: Plan) -> Plan:
        """Return the plan of a copy of the model, on the same storage, with the adapters."""
        from schedlang.runtime.low_rank_adapters import Adapt
        from schedlang.runtime.storage.codebook import Codebook

        facts = plan.model
        first = not any(isinstance(change, Adapt) for change in facts.changes)
        trained = {
            fact.name
            for name, fact in (facts if first else facts.base).parameters.items()
            if fact.requires_grad and any(matches(name, pattern) for pattern in self._keep_patterns)
        }
        if not first:  # with those of the rows above
            trained |= {
                name for name, fact in facts.unique_parameters.items() if fact.requires_grad
            }
        adapters = Adapt(
            self.kind,
            tuple(site.fqn for site in sites),
            frozenset(site.fqn for site in sites if site.dims["weight"] == ("in", "out")),
            self.rank,
            self.alpha,
            self.dropout,
            frozenset(trained),
            self.seed,
            None if self.base is None else Codebook(self.base, self.block),
        )
        return replace(plan, model=facts.with_change(adapters))

    def settled(self, sites: tuple[Site, ...], plan: Plan, traced: object) -> None:
        """Refuse splits that cut through a block, and codes that would lie off the device."""
        for site in sites if self.base is not None else ():
            self._check_blocks(site, plan)

    def _check_blocks(self, site: Site, plan: Plan) -> None:
        name = plan.model.parameters[f"{site}.weight"].name
        coding = plan.model.coding_of(name)
        if coding is None:
            return
        away = next(
            (s for s in plan.stores if s.what == "parameters" and is_inside(site.fqn, s.fqn)), None
        )
        if away is not None:
            refuse(
                "S414",
                f"the weight of `{site}` is quantised, and cannot be offloaded",
                notes=("it is decoded on the device, twice for each microbatch",),
                helps=("offload other modules", "or leave `base` out"),
            )
        layout, dim = plan.effective_layout(name), coding.input_dim
        block = min(self.block, layout.shape[dim])
        edge = _split_block(layout, dim, self.block, plan.mesh)
        if edge is None:
            return
        divisor = math.gcd(layout.shape[dim], edge)
        end = (f"use blocks that end there: `block={divisor}`",) if divisor > 1 else ()
        refuse(
            "S414",
            f"a block of {block} inputs of `{site}` would be on two ranks",
            notes=(
                f"its {layout.shape[dim]} inputs are split at {edge}, and a block has one scale",
            ),
            helps=(*end, "or split its outputs instead: `shard(col, ...)`"),
        )

    def _check_coded(self, sites: tuple[Site, ...], plan: Plan) -> None:
        """Refuse (S414) to train a weight that this row, or a row above, quantizes."""
        facts = plan.model
        weights = [f"{site}.weight" for site in sites if self.base is not None]
        for name in (
            *weights,
            *(name for name in facts.unique_parameters if facts.coding_of(name) is not None),
        ):
            for pattern in self._keep_patterns:
                if matches(name, pattern):
                    refuse(
                        "S414",
                        f'`keep="{pattern}"` would train `{name}`, which is quantised',
                        notes=("most updates are smaller than a step between two of its values",),
                        helps=("name other parameters", "or leave `base` out"),
                    )

    def _check_kind(self, site: Site, plan: Plan) -> None:
        """Refuse modules that may not multiply by their weight, or that have an adapter."""
        kind = next((candidate for candidate in KINDS if site.is_a(candidate)), None)
        if "lora_A" in site.parameters:
            refuse(
                "S418",
                f"`{site}` has an adapter already",
                helps=("drop one of the two rows", "or use one of a higher rank"),
            )
        if kind is None:
            inside = (s for n, s in plan.model.sites.items() if n.startswith(f"{site.fqn}."))
            inner = [
                candidate for candidate in inside if any(candidate.is_a(kind) for kind in KINDS)
            ]
            advice = (
                f"select the projections in it: `{inner[0]}  adapt({self.kind}, rank={self.rank})`"
                if inner
                else ""
            )
            refuse(
                "S401",
                f"`{site}` is a `{site.class_name}`, not a projection",
                helps=(advice or "select linear layers: `layers.*.mlp.up  adapt(lora)`",),
            )
        if site.is_a("NonDynamicallyQuantizableLinear"):
            refuse(
                "S401",
                f"`{site}` is never called: its attention reads the weight, and multiplies itself",
                helps=("select other projections",),
            )
        if not plan.model.computes_as(site.fqn, kind):
            note, hint = "an adapter would stand beside something that is not x W", ""
            if not plan.model.model.get_parameter(f"{site.fqn}.weight").is_floating_point():
                note = "its weight is quantised: an adapter could not be merged into it"
                hint = ", or adapt the layer as it was before it was quantised"
            refuse(
                "S404",
                f"`{site}` is a `{site.class_name}` with a forward of its own",
                notes=(note,),
                helps=(f"select other projections{hint}",),
            )

    @property
    def _keep_patterns(self) -> tuple[str, ...]:
        return (self.keep,) if isinstance(self.keep, str) else self.keep


@lru_cache(maxsize=1 << 8)
def _split_block(layout: Layout, dim: int, block: int, mesh: Mesh) -> int | None:
    """Return the first index of a dim where a rank's shard begins or ends inside a block."""
    size = layout.shape[dim]
    block = min(block, size)
    if all(split.dim != dim for split in layout.splits):
        return None
    for rank in range(mesh.world):
        offset = 0
        for segment in layout.segments(mesh, mesh.coordinates(rank))[dim]:
            end = segment.start + segment.length
            if segment.start < size and (segment.start % block or offset % block):
                return segment.start
            if end < size and end % block:
                return end
            offset += segment.length
    return None
