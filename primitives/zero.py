"""zero: split the batch over axes, and with it optimizer state, gradients or parameters."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import field

from schedlang.ir.annotations import Replicas
from schedlang.ir.features import Slicing
from schedlang.ir.model import Site
from schedlang.ir.plan import Plan
from schedlang.ir.primitive import refuse, refuse_inside
from schedlang.language.kinds import Axes
from schedlang.language.value import Bytes


class zero(Slicing):  # noqa: N801
    """Split the batch over the ranks of `over`; stages 1 to 3 also slice the state over them.

    stage 0   nothing is sliced: plain data parallelism
    stage 1   optimizer state is sliced; gradients are reduced once a step
    stage 2   gradients too: reduced after every microbatch
    stage 3   parameters too: gathered for each block's forward and backward, then freed

    A parameter is sliced along its first dim.  If that has fewer rows than there are ranks (a few
    experts in one tensor), it is sliced along the first dim that the ranks divide evenly, if there
    is one; otherwise some ranks hold one row, and the others hold nothing.

    In a pipeline, stage 3 gathers a pipeline stage once for a run of its forwards or backwards, if
    a rank has several stages and its order runs each of them in consecutive runs (`BFS`). Its
    gradients are then reduced once a run; a rank holds one gathered stage at a time, and its full
    gradients.

    A tuple folds axes: `zero(stage=3, over=(a, b))` slices over both.  To slice within a group and
    replicate across groups, write two rows: `zero(stage=3, over=a)` and `zero(stage=0, over=b)`.
    Parameters are then gathered along `a` only, and gradients reduced over `a` are summed over `b`
    once a step (MiCS, HSDP).

    `prefetch` gathers this number of units ahead, in forward and in backward (0: torch's default:
    none in forward, one in backward).  `reshard=false` leaves parameters gathered from a unit's
    forward to its backward: one gather less, and as much memory as stage 2.

    `bucket=25MiB` all-reduces full gradients (stage 0) in buckets of at most this size, the last
    layers first if `overlap(gradients)` starts them in the backward (DDP, Li et al. 2020; the
    fusion buffer of Horovod, Sergeev and Del Balso 2018).  Default: 25 MiB.

    `rows=[3, 1]` splits rows unevenly, for ranks of different speed (Whale, Jia et al. 2022): of
    four rows the first rank along `over` gets three.  The loss stays the mean over all rows.

    ZeRO (Rajbhandari et al. 2020), MiCS (Zhang et al. 2022), by torch's fully_shard.
    """

    stage: int = field(kw_only=True)
    over: Axes = field(kw_only=True)
    prefetch: int = field(default=0, kw_only=True)
    reshard: bool = field(default=True, kw_only=True)
    bucket: Bytes | None = field(default=None, kw_only=True)
    rows: tuple[int, ...] = field(default=(), kw_only=True)

    example = "zero(stage=1, over=dp)"
    reads = frozenset({"structure", "shape", "dtype", "placement", "stage"})
    writes = frozenset({"state"})
    takes = "model"
    gives_up = frozenset({"rounding"})

    def agree(self, axes: Collection[str]) -> None:
        """Refuse unknown stages, and arguments that a stage does not use."""
        if self.stage not in (0, 1, 2, 3):
            refuse(
                "S303", f"there is no ZeRO stage {self.stage}", helps=("choose one of 0, 1, 2, 3",)
            )
        if self.stage < 3 and (self.prefetch or not self.reshard):
            refuse(
                "S306",
                f"ZeRO stage {self.stage} gathers no parameters",
                helps=("leave out `prefetch` and `reshard`, or use `stage=3`",),
            )
        if self.stage and self.bucket is not None:
            refuse(
                "S306",
                f"ZeRO stage {self.stage} sums shards module by module, not in buckets",
                helps=("leave out `bucket`, or use `stage=0`",),
            )
        if self.bucket is not None and self.bucket < 1:
            refuse(
                "S304",
                "`bucket` must be above 0",
                helps=("for example `bucket=25MiB`, the default of DDP",),
            )
        if any(count < 1 for count in self.rows):
            refuse(
                "S304",
                f"`rows` must be 1 or more for each rank, not {list(self.rows)}",
                helps=("a rank without rows has nothing to do: make the axis shorter",),
            )
        if self.prefetch < 0:
            refuse(
                "S304",
                f"`prefetch` must be 0 or more, not {self.prefetch}",
                helps=("use 0 for torch's own order, 1 to gather one module ahead",),
            )

    def check(self, site: Site, plan: Plan) -> None:
        """Refuse axes with another use, and `rows` without exactly one number per rank."""
        refuse_inside("zero", site.fqn)
        own_axes = set(plan.mesh.fold(self.over))
        if self.rows and len(self.rows) != (size := plan.mesh.size(self.over)):
            refuse(
                "S304",
                f"`rows` has {len(self.rows)} number{'s' * (len(self.rows) > 1)}, but"
                f" `{', '.join(map(str, self.over))}` has {size} ranks",
                helps=(f"give one for each: `rows={[*self.rows, *[1] * size][:size]}`",),
            )
        for other in plan.replicas:
            for axis in sorted(own_axes & set(plan.mesh.fold(other.axes))):
                refuse(
                    "S508",
                    f"`{axis}` already has a `zero` row",
                    notes=(f"that row has stage {other.stage}",),
                    helps=("write one `zero` row for each axis",),
                )
            if self.stage and other.stage:
                refuse(
                    "S508",
                    "two `zero` rows shard the optimizer state",
                    helps=(
                        "name both axes in one row: `over=(a, b)`",
                        "or replicate over one of them: `stage=0`",
                    ),
                )
        split = {
            a
            for parameter, layout in plan.layouts.items()
            if parameter not in plan.batch_split_parameters
            for name in layout.axes
            for a in plan.mesh.fold(name)
        }
        stage_axes = {a for cut in plan.cuts for a in plan.mesh.fold(cut.axis)}
        for axis in sorted(own_axes & (split | stage_axes)):
            purpose = "splits parameters" if axis in split else "holds pipeline stages"
            refuse(
                "S508",
                f"`{axis}` cannot split the batch: it already {purpose}",
                helps=("name another axis of the mesh",),
            )

    def transform(self, site: Site, plan: Plan) -> Plan:
        """Add the replicas along these axes, and the stage of slicing."""
        from dataclasses import replace

        bucket = None if self.bucket is None else int(self.bucket)
        axes, row = tuple(map(str, self.over)), plan.next_row
        replicas = Replicas(
            axes, self.stage, self.prefetch, self.reshard, bucket, self.rows, row=row
        )
        return replace(plan, replicas=(*plan.replicas, replicas))

    @property
    def slices(self) -> bool:
        """Whether optimizer state is sliced: from stage 1 on."""
        return self.stage > 0

    @property
    def each_microbatch(self) -> bool:
        """Whether gradients are reduced after each microbatch: from stage 2 on."""
        return self.stage > 1

    def unsliced(self) -> zero:
        """Return the row at stage 0; its other arguments are about slices."""
        return zero(stage=0, over=self.over, rows=self.rows)
