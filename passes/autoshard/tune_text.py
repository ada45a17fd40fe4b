"""What was tried, as a table: the quickest first, then what is too large, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.tables import GAP, fitted, size, table, widths
from schedlang.language.value import shown
from schedlang.passes.autoshard.tune import Job, Tried, ranked

if TYPE_CHECKING:
    from schedlang.passes.simulate.step_time import Cluster

HEADS = ("step", "computing", "sending", "idle", "peak")
BOUND = (
    "times are bounds from data sheets, not measurements: every operator at its roofline, messages "
    "at full bandwidth"
)


def text(
    job: Job, found: Sequence[Tried], top: int | None, title: str = "", width: int | None = None
) -> str:
    """The table of those that fit, `top` of them; then what does not, in a line for each reason."""
    memory = job.cluster.memory
    best = ranked(found, memory)
    below = [*_too_large(found, memory), *_refused(found), BOUND]
    if best and top is not None and len(best) > top:
        below.insert(0, f"{len(best) - top} more fit: --top {len(best)}")
    parts = [fitted(title + _head(job, found, len(best)), width)]
    parts += ["", *_table(best[:top], width), ""] if best else []
    return "\n".join([*parts, fitted("\n".join(below), width)])


def to_json(job: Job, found: Sequence[Tried]) -> dict[str, Any]:
    """As plain values; seconds and bytes."""
    memory = job.cluster.memory
    best = ranked(found, memory)
    return {
        "cluster": asdict(job.cluster),
        "ranks": job.ranks,
        "fit": [_one(one) for one in best],
        "too_large": [_one(one) for one in found if one.refusal is None and not one.fits(memory)],
        "refused": [
            {**_one(one), "refusal": one.refusal.to_json()} for one in found if one.refusal
        ],
    }


def setting(given: Mapping[str, Any]) -> str:
    """tp = 2, pp = 4"""
    return ", ".join(f"{name} = {_value(value)}" for name, value in given.items())


def _one(one: Tried) -> dict[str, Any]:
    time = None if one.time is None else asdict(one.time)
    return {"given": dict(one.given), "mesh": dict(one.mesh), "peak": one.peak, "time": time}


def _head(job: Job, found: Sequence[Tried], fit: int) -> str:
    refused = sum(one.refusal is not None for one in found)
    over = len(found) - refused - fit
    parts = [f"{fit} fit"]
    parts += [f"{over} need more memory"] if over else []
    parts += [f"{refused} refused"] if refused else []
    return f"{job.ranks} ranks of {_cluster(job.cluster)} · {len(found)} tried: {', '.join(parts)}"


def _cluster(one: Cluster) -> str:
    near = f"{one.link / 1e9:g} GB/s in a node of {one.node}"
    far = f"{one.network / 1e9:g} GB/s between nodes"
    return f"{one.name}, {size(one.memory)}, {one.speed / 1e12:g} TFLOP/s, {near}, {far}"


def _table(best: Sequence[Tried], width: int | None) -> Iterator[str]:
    knobs, axes = list(best[0].given), list(dict.fromkeys(a for one in best for a in one.mesh))
    beside = [axis for axis in axes if axis not in knobs]
    names = [*knobs, *beside] if set(knobs) - set(axes) or not set(knobs) else axes
    rows = [["", *names, *HEADS]]
    rows += [[str(place), *_cells(one, names)] for place, one in enumerate(best, 1)]
    wide = widths(rows)
    right = [[cell.rjust(w) for cell, w in zip(row, wide)] for row in rows]
    room = None if width is None else width + len(GAP)
    yield from (line.removeprefix(GAP) for line in table(right, room))


def _cells(one: Tried, names: Sequence[str]) -> list[str]:
    told = {**{axis: size for axis, size in one.mesh.items()}, **one.given}
    assert one.time is not None
    time = one.time
    shares = (part / time.seconds for part in (time.computing, time.sending, time.idle))
    return [
        *(_value(told.get(name, "-")) for name in names),
        _seconds(time.seconds),
        *(f"{share:.0%}" for share in shares),
        size(one.peak),
    ]


def _value(value: object) -> str:
    return value if isinstance(value, str) else shown(value).strip("`")


def _seconds(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.4g} {unit}"
    return f"{seconds * 1e6:.4g} us"


def _too_large(found: Sequence[Tried], memory: int) -> Iterator[str]:
    over = [one for one in found if one.refusal is None and not one.fits(memory)]
    if over:
        least = min(over, key=lambda one: one.peak)
        state = "state alone " if least.time is None else ""
        said = setting(least.given or least.mesh)
        yield f"{len(over)} need more than {size(memory)}; least, {state}{size(least.peak)}: {said}"


def _refused(found: Sequence[Tried]) -> Iterator[str]:
    """A line for each code, with the first that was refused."""
    reasons: dict[str, list[Tried]] = {}
    for one in found:
        if one.refusal is not None:
            reasons.setdefault(one.refusal.code, []).append(one)
    for code, those in reasons.items():
        assert those[0].refusal is not None
        told = [setting(those[0].given or those[0].mesh), those[0].refusal.title]
        yield ": ".join([f"{len(those)} refused, {code}", *filter(None, told)])
