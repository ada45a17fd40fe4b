"""How operations look in every picture: colours, words, shades and labels."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from schedlang.timeline.table import Kind, Timeline

# Okabe and Ito's palette; F, B, I and W are apart in lightness or hue for every kind of sight
FILL = {
    Kind.F: "#56b4e9",
    Kind.B: "#e69f00",
    Kind.I: "#f5d565",
    Kind.W: "#009e73",
    Kind.RECOMPUTE: "#cc79a7",
    Kind.EVICT: "#d55e00",
    Kind.LOAD: "#0072b2",
    Kind.OFFLOAD: "#d55e00",
    Kind.RELOAD: "#0072b2",
    Kind.STEP: "#f0f0f0",
}
OTHER = "#a0a0a0"
WORD = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input gradient",
    Kind.W: "weight gradient",
    Kind.RECOMPUTE: "forward again",
    Kind.EVICT: "activations leave",
    Kind.HOLD: "partner's activations",
    Kind.GIVE: "partner's activations go home",
    Kind.LOAD: "activations come home",
    Kind.OFFLOAD: "activations to the host",
    Kind.RELOAD: "activations from the host",
    Kind.STEP: "update",
    Kind.BARRIER: "barrier",
}
FAINTEST = 0.5  # how much of its colour the last stage of a rank has; the rest is white


def fill(kind: Kind) -> str:
    """The colour of a kind."""
    return FILL.get(kind, OTHER)


def word(kind: Kind) -> str:
    """A kind in words."""
    return WORD.get(kind, kind.name.lower())


def levels(timeline: Timeline) -> NDArray[np.int64]:
    """For each row the place of its stage among the stages that its rank runs of its replica."""
    t = timeline
    level = np.zeros((max(1, t.replicas), max(1, t.stages)), dtype=np.int64)
    for replica, row in enumerate(t.homes):
        seen: dict[int, int] = {}
        for stage, rank in enumerate(row.tolist()):
            level[replica, stage] = seen.get(rank, 0)
            seen[rank] = seen.get(rank, 0) + 1
    found: NDArray[np.int64] = level[t.replica, t.stage]
    return found


def shaded(kind: Kind, level: int, most: int) -> str:
    """The colour of a block: the first stage of a rank is full, later ones are fainter.

    Mixed with white in the dark as well: what is written on it is dark on either ground.
    """
    part = 1.0 - (1.0 - FAINTEST) * level / most if most else 1.0
    full = (int(fill(kind)[k : k + 2], 16) for k in (1, 3, 5))
    return "#" + "".join(f"{round(255 - (255 - one) * part):02x}" for one in full)


def label(microbatch: int, part: int, slices: int) -> str:
    """What stands on a block: the microbatch, and the slice where it has several."""
    return f"{microbatch}.{part}" if slices > 1 else str(microbatch)


def named(timeline: Timeline, kind: int, stage: int, replica: int, microbatch: int, part: int,
          version: int) -> str:  # fmt: skip
    """An operation in words, as little as tells it from others."""
    if Kind(kind) in (Kind.STEP, Kind.BARRIER):
        text = f"{word(Kind(kind))}, stage {stage}"
    else:
        text = f"{word(Kind(kind))}, stage {stage}, microbatch {microbatch}"
    text += f", slice {part}" if timeline.slices > 1 else ""
    text += f", replica {replica}" if timeline.replicas > 1 else ""
    return text + (f", version {version}" if version else "")
