"""Gains of rows that save kernels, counted with a batch; S888 refuses a row without any gain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from schedlang.diagnostics.diagnostic import Label, Refusal
from schedlang.ir.features import Count, Gain, Gaining
from schedlang.ir.plan import Action, Plan


@dataclass(frozen=True)
class RowGain:
    """The gain of one row at equal modules, counted at the first of them, unsharded, on one
    microbatch."""

    row: int
    what: str  # the row's call
    sites: tuple[str, ...]
    gain: Gain

    def __str__(self) -> str:
        before, after = self.gain.before, self.gain.after
        rest_text = f" and {len(self.sites) - 1} more" if len(self.sites) > 1 else ""
        return (
            f"`{self.what}` at `{self.sites[0]}`{rest_text}: {before.forward} kernels forward and"
            f" {before.backward} backward become {after.forward} and {after.backward},"
            f" {before.bytes} bytes {after.bytes}"
        )

    def to_json(self) -> dict[str, object]:
        """Return plain values."""
        return {
            "row": self.row,
            "what": self.what,
            "sites": list(self.sites),
            "before": _json(self.gain.before),
            "after": _json(self.gain.after),
            "sources": list(self.gain.sources),
        }


def _json(count: Count) -> dict[str, int]:
    return {"forward": count.forward, "backward": count.backward, "bytes": count.bytes}


def count_gains(plan: Plan, batch: Mapping[str, Any]) -> tuple[RowGain, ...]:
    """Count gains of each row and kind of module; refuse (S888) a row that gains nothing."""
    groups: dict[tuple[int, Any], tuple[Action, list[str]]] = {}
    rows = {action.row: row for action, row in plan.rows_with(Gaining)}
    for action, _ in plan.rows_with(Gaining):
        for fqn in action.sites:
            kind = plan.model.sites[fqn].kind
            groups.setdefault((action.row, kind), (action, []))[1].append(fqn)
    calls = _calls(plan, batch, {sites[0] for _, sites in groups.values()}) if groups else {}
    gains = []
    for action, sites in groups.values():
        if sites[0] not in calls:
            continue  # a module that this batch does not reach
        gain = rows[action.row].gain(plan.model.sites[sites[0]], plan, calls[sites[0]])
        if gain is not None:
            gains.append(RowGain(action.row, str(action.primitive), tuple(sites), gain))
            if not gain.any:
                raise _nothing(action, sites[0], gain)
    return tuple(gains)


def count_step_gains(plan: Plan, batch: Mapping[str, Any]) -> tuple[RowGain, ...]:
    """Count gains for a batch of a full step, where they can be counted; raises Refusal S888."""
    from schedlang.runtime.batch import split_batch

    if not plan.rows_with(Gaining):
        return ()
    try:
        return count_gains(plan, split_batch(batch, plan.share_weights, plan.micro)[0][0].inputs)
    except Refusal as refusal:
        if refusal.diagnostic.code == "S888":
            raise
        return ()  # building the program will report other refusals
    except Exception:  # a model that reads values can still be built and trained
        return ()


def _nothing(action: Action, site: str, gain: Gain) -> Refusal:
    before, after = gain.before, gain.after
    note = (
        f"{before.kernels} kernels and {before.bytes} bytes become {after.kernels} kernels and "
        f"{after.bytes} bytes, forward and backward"
    )
    label = Label(action.span) if action.span else Label()
    return Refusal.of(
        "S888",
        f"`{action.primitive}` gains nothing at `{site}`",
        label,
        notes=(note,),
        helps=("drop the row", "or select a larger module"),
    )


def _calls(plan: Plan, batch: Mapping[str, Any], sites: set[str]) -> dict[str, Any]:
    """Record the arguments of one call of each module, without values."""
    import torch

    from schedlang.runtime.batch import run_model
    from schedlang.runtime.global_state import restore_global_state
    from schedlang.runtime.submodules import record_first_calls
    from schedlang.runtime.tracing.meta_runs import meta_batch, meta_model, on_meta

    model, inputs = meta_model(plan.model.model, {}), meta_batch(dict(batch))
    restored, recorded = restore_global_state(plan.model.model), record_first_calls(model, sites)
    meta = torch.device("meta")
    with restored, torch.no_grad(), meta, on_meta(dict(batch), inputs), recorded as calls:
        run_model(model, inputs)
    return calls
