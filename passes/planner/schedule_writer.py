"""A setting of the planner written as a schedule, which can be proven like any other schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from typing import TYPE_CHECKING

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import NOWHERE
from schedlang.language import lift
from schedlang.language import nodes as n
from schedlang.passes.autoshard.propose import FORWARD, TRAIN, headline, proof_steps
from schedlang.passes.complete.proposed_rows import (
    make_call,
    make_schedule_file,
    make_step,
    precision_step,
    wrap_comment,
)
from schedlang.passes.elaborate.rows import selector_path
from schedlang.passes.planner.even_stages import split_evenly

if TYPE_CHECKING:
    from schedlang.passes.planner.profile import Profiles
    from schedlang.passes.planner.values import Chain, Setting


def write_schedule(profiles: Profiles, setting: Setting, remarks: Sequence[str] = ()) -> n.File:
    """Write the schedule of a setting; `remarks` become its comments.

    Raises Refusal for what has no rows, ValueError for stages that do not fit the model.
    """
    chain = profiles(setting.placement)
    if isinstance(chain, Refusal):
        raise chain
    blocks = profiles.trial.full_blocks
    steps: list[n.Step] = []
    rows = profiles.rows(setting.placement)
    if profiles.dtype:
        steps.append(precision_step(profiles.dtype, blocks, FORWARD))
    steps += proof_steps(rows, blocks)
    cuts = stage_units(chain, setting)
    checkpoint_rows = list(_recomputed(profiles.names, cuts, setting))
    if checkpoint_rows:
        steps.append(make_step("memory", checkpoint_rows, FORWARD))
    last = [
        *_offloaded(profiles.names, chain, setting),
        *_training_rows(profiles.names, cuts, setting),
    ]
    if last:
        steps.append(make_step("training", last, TRAIN, profiles.relax(setting.dp, setting.passes)))
    comments = [line for remark in remarks for line in wrap_comment(remark)]
    header = (f"# {headline(blocks)}", "", *comments, *[""] * bool(comments))
    mesh = lift.mesh(_mesh(setting), None, NOWHERE, *header)
    return make_schedule_file("search", blocks.facts.class_name, mesh, steps)


def stage_units(chain: Chain, setting: Setting) -> tuple[int, ...]:
    """Return the units of each stage; by default stages split as evenly as possible by operations.

    Raises ValueError for numbers that the chain does not have.
    """
    stages = setting.pp * setting.chunks
    flops = [
        sum(op.flops * op.count for op in run.unit.forward.operators) + 1.0 for run in chain.runs
    ]
    cuts = setting.cuts or split_evenly(chain, stages, tuple(flops))
    if len(cuts) != stages or sum(cuts) != chain.length or min(cuts) < 1:
        raise ValueError(f"{cuts} does not cut {chain.length} units into {stages} stages")
    return cuts


def _mesh(setting: Setting) -> dict[str, int]:
    """Axes of several ranks, slowest first; experts are along some of the replicas."""
    p = setting.placement
    sizes = {"dp": setting.dp // p.ep, "ep": p.ep, "pp": setting.pp, "cp": p.cp, "tp": p.tp}
    order = [name for axis in setting.axes for name in ((axis, "ep") if axis == "dp" else (axis,))]
    return {axis: sizes[axis] for axis in order if sizes[axis] > 1} or {"dp": 1}


def _recomputed(names: Sequence[str], cuts: Sequence[int], setting: Setting) -> Iterator[n.Stmt]:
    """Rows that recompute the first units of each stage; a unit that is no module is not
    recomputed."""
    if not any(setting.again):
        return
    firsts = [0, *accumulate(cuts)]
    recomputed = {
        names[start + k]
        for start, count, limit in zip(firsts, cuts, setting.again)
        for k in range(min(count, limit))
        if names[start + k] in names[1:-1]
    }
    for _parent, group in groupby(names[1:-1], lambda name: name.rpartition(".")[0]):
        siblings = list(group)
        selected = [name for name in siblings if name in recomputed]
        for run in _runs(selected, siblings):
            yield lift.row([_path(run, siblings)], make_call("checkpoint"))


def _offloaded(names: Sequence[str], chain: Chain, setting: Setting) -> Iterator[n.Stmt]:
    """Rows that offload activations of modules, and the optimizer's state."""
    units = [run.unit for run in chain.runs for _ in range(run.count)]
    named_units = (
        list(zip(names, units, strict=True))[1:-1] if setting.placement.offloads_activations else []
    )
    for _parent, group in groupby(named_units, lambda pair: pair[0].rpartition(".")[0]):
        siblings = list(group)
        selected_names = [name for name, unit in siblings if name and unit.input < unit.kept]
        for run in _runs(selected_names, [name for name, _ in siblings]):
            selected = _path(run, [name for name, _ in siblings])
            yield lift.row([selected], make_call("offload", "activations"))
    if setting.placement.offloads_optimizer:
        yield lift.row((), make_call("offload", "optimizer"))


def _path(run: Sequence[str], siblings: Sequence[str]) -> n.Path:
    """Build the path of modules of one parent."""
    path = selector_path(run, siblings)
    assert path is not None
    return path


def _runs(selected: Sequence[str], siblings: Sequence[str]) -> Iterator[list[str]]:
    """Group names that follow one another."""
    runs: list[list[str]] = []
    for k, name in enumerate(siblings):
        if name in selected:
            joins = k > 0 and runs and runs[-1][-1] == siblings[k - 1]
            if joins:
                runs[-1].append(name)
            else:
                runs.append([name])
    yield from runs


def _training_rows(names: Sequence[str], cuts: Sequence[int], setting: Setting) -> Iterator[n.Stmt]:
    """The rows of the pipeline and of the replicas."""
    starts = [names[index] for index in accumulate(cuts[:-1])]
    if any(not name for name in starts):
        raise ValueError("a stage would start where no module does")
    if starts:
        runs = groupby(starts, lambda name: name.rpartition(".")[0])
        yield lift.row(
            [_path(list(run), ()) for _, run in runs], make_call("pipeline_split", over="pp")
        )
    if setting.dp > 1:
        data = ("dp",) * (setting.dp > setting.placement.ep) + ("ep",) * (setting.placement.ep > 1)
        axes = data[0] if len(data) == 1 else data
        divisor = math.gcd(*setting.rows)
        rows = {"rows": [share // divisor for share in setting.rows]} if setting.rows else {}
        yield lift.row((), make_call("zero", stage=setting.zero, over=axes, **rows))
    if setting.pp > 1 or setting.micro > 1:
        parts = {"chunks": setting.chunks, "slices": setting.placement.slices}
        options = {name: count for name, count in parts.items() if count > 1}
        order = n.Lit(f'"{setting.order}"')
        yield lift.row((), make_call("pipeline", order=order, micro=setting.micro, **options))
