"""compress: sum gradients over replicas, or keep activations, in fewer bytes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import field, replace
from typing import Literal

from schedlang.ir.annotations import ActivationCoding, Codec, Compression
from schedlang.ir.features import check_called
from schedlang.ir.mesh import offer_row
from schedlang.ir.model import Site
from schedlang.ir.plan import Plan
from schedlang.ir.primitive import Facet, Primitive, refuse, refuse_inside
from schedlang.language.kinds import Axes

ACTIVATION_BITS = {"int8": 8, "int4": 4, "int2": 2}
LEAST, MOST = 2.0, 8.0  # bounds of `bits`
GRADIENT_CODES = ("powersgd", "int8", "onebit")
# facets of `compress(activations)`
READS = frozenset({Facet.STRUCTURE, Facet.PLACEMENT, Facet.RECOMPUTE})
WRITES = frozenset({Facet.RESIDENCE})


class compress(Primitive):  # noqa: N801
    """Compress the all-reduce of gradients, or the tensors that are saved for backward.

    `compress(gradients, ..., over=dp)`, for the full model: the all-reduce over these data axes

    powersgd   an n x m matrix as a product of rank `rank`: rank (n + m) numbers are summed
               instead of n m; the power iteration starts from the result of the last step
    int8       integers with a scale for each `block` elements, stochastically rounded
    onebit     one bit for each element, and for each `block` the means above and below zero

    `error_feedback` adds the compression error of a rank to its gradient of the next step, so that
    the compressed sum over all steps follows the exact sum. Vectors, and matrices that would not
    get smaller, are summed uncompressed. Over the other data axes gradients are all-reduced first,
    exactly.

    Compression errors and the results of the last step are part of a checkpoint: the same layout
    continues exactly. On another number of ranks, the sum of all errors is divided equally, and the
    iteration of a matrix starts anew if the matrix is split differently. A program without this row
    ignores them. Orders with stale weights, which sum several times a step, are refused.

    `compress(activations, ...)`, for selected modules: tensors saved between forward and backward

    int8, int4, int2   integers of 8, 4 or 2 bits, with a least value and a step for each `block`
                       elements, stochastically rounded: the gradient of a linear layer is unbiased.
                       Weights, masks, indices and tiny tensors are not compressed. Ranks that split
                       a tensor round their shards. Cast tensors are rounded after the cast, and
                       `offload` moves the integers. Inputs and results that `checkpoint` saves for
                       these modules, or inside them, are rounded, too. Tensors saved by experts
                       that are spread over ranks are not compressed.
    adaptive           each tensor in 2, 4 or 8 bits, with a mean of `bits=4` per element: tensors
                       to which the gradient is more sensitive get more bits. Before training, each
                       tensor is rounded alone in two passes of the model, in this process.

    Results are those of a single process that compresses the same shards in the same way:
    `relax(lossy)`. They equal the original's if the rank is full, or if integers represent the
    saved values exactly.

    PowerSGD (Vogels et al. 2019), QSGD (Alistarh et al. 2017), 1-bit SGD (Seide et al. 2014); ActNN
    (Chen et al. 2021), Mesa (Pan et al. 2021), GACT (Liu et al. 2022).
    """

    what: Literal["gradients", "activations"]
    how: Literal["powersgd", "int8", "onebit", "int4", "int2", "adaptive"]
    over: Axes | None = field(default=None, kw_only=True)
    rank: int = field(default=4, kw_only=True)
    block: int = field(default=256, kw_only=True)
    error_feedback: bool = field(default=True, kw_only=True)
    bits: float = field(default=4.0, kw_only=True)

    example = "compress(gradients, powersgd, over=dp)"
    reads = frozenset({"state"})
    writes = frozenset({"order"})
    gives_up = frozenset({"rounding", "lossy"})

    def __post_init__(self) -> None:
        """Set the facets of a row about activations; the class has those about gradients."""
        if self.what == "activations":
            object.__setattr__(self, "reads", READS)
            object.__setattr__(self, "writes", WRITES)

    def agree(self, axes: Collection[str]) -> None:
        """Refuse unknown codes, and arguments of the other kind of row."""
        sums = self.what == "gradients"
        if self.how not in (GRADIENT_CODES if sums else (*ACTIVATION_BITS, "adaptive")):
            choices = ", ".join(GRADIENT_CODES if sums else (*ACTIVATION_BITS, "adaptive"))
            refuse(
                "S856",
                f"{self.what} cannot be compressed as `{self.how}`",
                helps=(f"choose one of {choices}",),
            )
        if self.rank < 1 or self.block < 8 or self.block % 8:
            refuse(
                "S304",
                "`rank` must be 1 or more, `block` a multiple of 8 elements",
                helps=("leave them out: `rank=4`, `block=256`",),
            )
        self._check_budget()
        if sums and self.over is None:
            row = offer_row(f"compress(gradients, {self.how}, over={{}})", axes, "replicas")
            refuse(
                "S856",
                "`compress(gradients)` needs the axes over which gradients are summed",
                "`over` is missing",
                helps=(f"name them: {row}",),
            )
        if not sums and (self.over is not None or self.rank != 4 or not self.error_feedback):
            refuse(
                "S856",
                "`over`, `rank` and `error_feedback` are for gradients only",
                helps=(f"leave them out: `compress(activations, {self.how})`",),
            )

    def check(self, site: Site, plan: Plan) -> None:
        """Refuse reductions that do not exist, and activations without a selected module."""
        if self.what == "gradients":
            self._check_sums(site, plan)
        elif not site.fqn:
            row = f"layers.*  compress(activations, {self.how})"
            refuse(
                "S856",
                "activations are saved by modules, and this row selects none",
                helps=(f"select modules: `{row}`",),
            )
        else:
            check_called(self, site, plan)

    def _check_budget(self) -> None:
        """Refuse `bits` for fixed codes (S856), and values out of range (S304)."""
        if self.bits != 4.0 and self.how != "adaptive":
            refuse(
                "S856",
                f"`{self.how}` takes no `bits`: it has a fixed number",
                helps=(
                    "leave `bits` out",
                    f"or `compress(activations, adaptive, bits={self.bits:g})`",
                ),
            )
        if not LEAST <= self.bits <= MOST:
            refuse(
                "S304",
                f"`bits` must be {LEAST:g} to {MOST:g}, not {self.bits:g}",
                "each tensor is compressed to 2, 4 or 8 bits",
                helps=("write `compress(activations, adaptive, bits=4)`",),
            )

    def _check_sums(self, site: Site, plan: Plan) -> None:
        """Refuse a row inside a module, a second row, a loss scale, and axes without all-reduce."""
        refuse_inside("compress(gradients)", site.fqn)
        if plan.compression is not None:
            refuse("S509", "gradients are compressed already", helps=("drop one of the two rows",))
        if plan.loss_scaling is not None:
            refuse(
                "S894",
                "gradients of a scaled loss cannot be compressed",
                notes=(
                    "the error feedback kept for the next step would have a different loss"
                    " scale, and an infinite gradient would stay in it",
                ),
                helps=("use `cast(bf16)`, which needs no loss scale", "or drop this row"),
            )
        reduced = {name for r in plan.replicas if r.stage == 0 for name in plan.mesh.fold(r.axes)}
        for axis in plan.mesh.fold(self.over or ()):
            if axis not in reduced:
                help_ = f"replicate over it, in a row above: `zero(stage=0, over={axis})`"
                refuse(
                    "S417",
                    f"no all-reduce of gradients over `{axis}` to compress",
                    notes=("with `zero(stage=1)` to `3` each rank sums a shard only",),
                    helps=(help_,),
                )

    def transform(self, site: Site, plan: Plan) -> Plan:
        """Add the compression to the plan."""
        if self.what == "activations":
            return replace(
                plan,
                activation_codings=(
                    *plan.activation_codings,
                    self._compression_of(site.fqn, plan.next_row),
                ),
            )
        axes = tuple(map(str, self.over or ()))
        codec = Codec(self.how, self.rank, self.block, self.error_feedback)
        return replace(plan, compression=Compression(axes, codec, row=plan.next_row))

    def _compression_of(self, fqn: str, row: int) -> ActivationCoding:
        """Return the compression of a module's saved activations.

        With a budget, its bits are the largest that fit; the table of bits replaces them.
        """
        if self.how != "adaptive":
            return ActivationCoding(fqn, ACTIVATION_BITS[self.how], self.block, row=row)
        largest = max(bits for bits in ACTIVATION_BITS.values() if bits <= self.bits)
        return ActivationCoding(fqn, largest, self.block, self.bits, row=row)
