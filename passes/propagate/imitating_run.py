"""A run of the sharded copy in which two units of each kind run, and the others are imitated."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from schedlang.ir.plan import Plan
from schedlang.passes.propagate.original_forward import Recording
from schedlang.passes.propagate.sharded_run import Choice, Loss, ShardedRun

if TYPE_CHECKING:
    from torch import nn

    from schedlang.runtime.propagation.dry_run import ShardedLeaf
    from schedlang.runtime.propagation.trace import Mismatch
    from schedlang.runtime.tracing.equal_units import EqualUnits


class ImitatingRun(ShardedRun):
    """A run of the sharded copy in which two units of each kind run."""

    units: EqualUnits | None = None

    def attempt(self) -> Mismatch | None:
        """Run the forward; return the first mismatch with the original, or None."""
        with ExitStack() as self._exit:
            return super().attempt()

    def _copy(self) -> nn.Module:
        from schedlang.runtime.propagation.imitated_units import EqualLayouts
        from schedlang.runtime.tracing.equal_units import EqualUnits

        model, equal = super()._copy(), self.recording.original.equal_units
        narrowed = self.parts, self.argument_splits
        observer = EqualLayouts(self.follower, self.edges, self.layouts, *narrowed)
        self.units = EqualUnits(model, equal, observer=observer)
        self._exit.enter_context(self.units.using())
        return model


def attempt_imitating_run(
    plan: Plan,
    batch: Mapping[str, Any],
    loss: Loss | None,
    leaves: Mapping[str, ShardedLeaf],
    recording: Recording,
    divided: frozenset[Choice],
) -> tuple[ShardedRun, Mismatch | None]:
    """Run the sharded copy of a model with equal units; return the run, and its first mismatch
    with the original, or None.

    A run with imitated units counts only if it agrees with the original, or fails before the first
    of these.
    """
    from schedlang.runtime.propagation.trace import Hoist

    run = ImitatingRun(plan, batch, loss, leaves, recording, divided)
    try:
        failure = run.attempt()
    except Hoist:
        raise
    except Exception:
        if not _is_imitated(run):
            raise
    else:
        if failure is None and not (run.units and run.units.different):
            return run, None
        if not _is_imitated(run):
            return run, failure
    full_run = ShardedRun(plan, batch, loss, leaves, recording, divided)
    return full_run, full_run.attempt()


def _is_imitated(run: ImitatingRun) -> bool:
    """Return whether a unit of a run was imitated, or could not be."""
    return run.units is not None and bool(run.units.imitated or run.units.different)
