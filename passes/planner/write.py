"""A setting as the text of a schedule, which is proven like any other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from typing import TYPE_CHECKING

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import Source
from schedlang.language import printer
from schedlang.language.syntax import parse
from schedlang.passes.autoshard.propose import STEPS, headline
from schedlang.passes.complete.proposal import Row, call, mesh_text, quoted, rows_text, wrapped
from schedlang.passes.elaborate.rows import pattern
from schedlang.passes.planner.even import even

if TYPE_CHECKING:
    from schedlang.passes.planner.profile import Profiles
    from schedlang.passes.planner.values import Chain, Setting


def written(profiles: Profiles, setting: Setting, remarks: Sequence[str] = ()) -> str:
    """The canonical text of the schedule that a setting stands for; `remarks` are its comments.

    Raises Refusal for what has no rows, ValueError for cuts that are not those of the model.
    """
    chain = profiles(setting.placement)
    if isinstance(chain, Refusal):
        raise chain
    blocks = profiles.trial.all
    steps = [f"schedule 1 for {blocks.facts.class_name}\n\n# {headline(blocks)}\n"]
    steps.append("".join(map(wrapped, remarks)))
    steps.append(f"{mesh_text(_mesh(setting))}\n")
    rows = profiles.rows(setting.placement)
    if profiles.dtype:
        cast = call("cast", profiles.dtype, params=True)
        steps.append(_step("precision", [str(Row((), cast))], "forward, backward", "dtype"))
    for role, name in STEPS.items():
        if rows.get(role):
            # experts are legal only beside the row that splits the batch, which stands below
            proof = "" if role == "experts" else "forward, backward"
            steps.append(_step(name, [rows_text(rows[role], blocks)], proof))
    cuts = cuts_of(chain, setting)
    again = list(_again(profiles.names, cuts, setting))
    if again:
        steps.append(_step("memory", again, "forward, backward"))
    last = [*_offloaded(profiles.names, chain, setting), *_last(profiles.names, cuts, setting)]
    if last:
        parted = setting.dp > 1 or setting.passes > 1
        relax = profiles.relax if parted else ""
        steps.append(_step("training", last, "train, steps=3", relax))
    return printer.to_text(parse(Source("written", "\n".join(steps))))


def cuts_of(chain: Chain, setting: Setting) -> tuple[int, ...]:
    """The units of each stage; where a setting leaves them open, of operations as even as can be.

    Raises ValueError for others than the chain has.
    """
    stages = setting.pp * setting.chunks
    work = [
        sum(op.flops * op.count for op in run.unit.forward.operators) + 1.0 for run in chain.runs
    ]
    cuts = setting.cuts or even(chain, stages, tuple(work))
    if len(cuts) != stages or sum(cuts) != chain.length or min(cuts) < 1:
        raise ValueError(f"{cuts} does not cut {chain.length} units into {stages} stages")
    return cuts


def _mesh(setting: Setting) -> dict[str, int]:
    """Axes of several ranks, slowest first; experts lie along some of the replicas."""
    at = setting.placement
    sizes = {"dp": setting.dp // at.ep, "ep": at.ep, "pp": setting.pp, "cp": at.cp, "tp": at.tp}
    order = [one for axis in setting.axes for one in ((axis, "ep") if axis == "dp" else (axis,))]
    return {axis: sizes[axis] for axis in order if sizes[axis] > 1} or {"dp": 1}


def _step(name: str, lines: Sequence[str], proof: str, relax: str = "") -> str:
    word = f"relax({relax}) " if relax else ""
    check = [f"verify({proof})"] if proof else []
    return f'step "{name}" {word}{{\n' + "\n".join([*lines, *check]) + "\n}\n"


def _again(names: Sequence[str], cuts: Sequence[int], setting: Setting) -> Iterator[str]:
    """Rows that recompute the first units of each stage; a unit that is no module stays."""
    if not any(setting.again):
        return
    firsts = [0, *accumulate(cuts)]
    chosen = {
        names[first + k]
        for first, count, many in zip(firsts, cuts, setting.again)
        for k in range(min(count, many))
        if names[first + k] in names[1:-1]
    }
    for _parent, group in groupby(names[1:-1], lambda name: name.rpartition(".")[0]):
        everyone = list(group)
        mine = [name for name in everyone if name in chosen]
        for run in _runs(mine, everyone):
            yield f"{quoted(pattern(run, everyone))}  checkpoint()"


def _offloaded(names: Sequence[str], chain: Chain, setting: Setting) -> Iterator[str]:
    """Rows of what lies on the host: activations of modules, the optimizer's state."""
    units = [run.unit for run in chain.runs for _ in range(run.count)]
    named = list(zip(names, units, strict=True))[1:-1] if setting.placement.parked else []
    for _parent, group in groupby(named, lambda pair: pair[0].rpartition(".")[0]):
        every = list(group)
        mine = [name for name, unit in every if name and unit.input < unit.kept]
        for run in _runs(mine, [name for name, _ in every]):
            selected = quoted(pattern(run, [name for name, _ in every]))
            yield f"{selected}  offload(activations)"
    if setting.placement.hosted:
        yield "offload(optimizer)"


def _runs(mine: Sequence[str], everyone: Sequence[str]) -> Iterator[list[str]]:
    """Names that follow one another, together."""
    runs: list[list[str]] = []
    for k, name in enumerate(everyone):
        if name in mine:
            joins = k > 0 and runs and runs[-1][-1] == everyone[k - 1]
            if joins:
                runs[-1].append(name)
            else:
                runs.append([name])
    yield from runs


def _last(names: Sequence[str], cuts: Sequence[int], setting: Setting) -> Iterator[str]:
    """The rows of the pipeline and of the replicas."""
    starts = [names[at] for at in accumulate(cuts[:-1])]
    if any(not name for name in starts):
        raise ValueError("a stage would start where no module does")
    if starts:
        found = []
        for _, group in groupby(starts, lambda name: name.rpartition(".")[0]):
            run = list(group)
            found.append(quoted(pattern(run, ())))
        yield f"{', '.join(found)}  {printer.expr(call('pipeline_split', over='pp'))}"
    if setting.dp > 1:
        data = ("dp",) * (setting.dp > setting.placement.ep) + ("ep",) * (setting.placement.ep > 1)
        over = data[0] if len(data) == 1 else data
        least = math.gcd(*setting.rows)
        rows = {"rows": [one // least for one in setting.rows]} if setting.rows else {}
        yield str(Row((), call("zero", stage=setting.zero, over=over, **rows)))
    if setting.pp > 1 or setting.micro > 1:
        parts = {"chunks": setting.chunks, "slices": setting.placement.slices}
        more = "".join(f", {name}={count}" for name, count in parts.items() if count > 1)
        yield f'pipeline(order="{setting.order}", micro={setting.micro}{more})'
