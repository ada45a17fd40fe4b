"""Facts that ranks of a judged program record besides their observations."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from schedlang.passes.judge.choices import Moment, Noted
from schedlang.passes.judge.copies import Copy
from schedlang.passes.judge.layouts import Holdings
from schedlang.passes.judge.masks import Met

if TYPE_CHECKING:
    from schedlang.passes.judge.loaded import Loaded


@dataclass
class Kept:
    """Facts that ranks record besides their observation, to explain a mistake later."""

    # gradients of the first step, by (whether the condition clips, name of the parameter)
    copies: dict[tuple[bool, str], list[Copy]] = field(default_factory=dict)
    initial: MutableMapping[str, Any] | None = None  # full parameters at the start
    unlike: dict[str, float] = field(default_factory=dict)  # differences of ranks' copies then
    optimizer: bytes | None = None  # the program's own optimizer, pickled for the original
    holdings: Holdings | None = None
    lost: set[str] = field(default_factory=set)  # buffers that no rank has under a known name
    offers: set[str] = field(default_factory=set)  # optional parts that the program offers
    losses: list[float] = field(default_factory=list)  # the ranks' losses of the first step
    saved: Mapping[str, Any] | None = None  # full tensors of the saved state
    met: Met = field(default_factory=Met)
    compiled: bool = False  # whether some module of the program is compiled
    stray: set[str] = field(default_factory=set)  # modules whose dropout calls differ by step
    masks: dict[str, str] = field(default_factory=dict)  # modules with wrong own masks, and why
    low: set[str] = field(default_factory=set)  # low dtypes that float64 replaces
    strided: set[tuple[str, str]] = field(default_factory=set)  # see `waits.Heard.strided`
    unwaited: dict[tuple[str, str], list[int]] = field(default_factory=dict)  # call -> ranks
    stepped: set[str] = field(default_factory=set)  # parameters that the step itself changes
    replaced: set[str] = field(default_factory=set)  # parameters that the step replaces
    loaded: Loaded | None = None  # None: `load` is not offered
    chosen: Mapping[Moment, Sequence[Noted]] = field(default_factory=dict)  # by all ranks
    folder: str | None = None  # of files in which ranks exchange large tensors

    def of(self, condition: str, name: str) -> list[Copy]:
        """Return the ranks' gradients of a parameter in the first step under a condition."""
        return self.copies.get(("clipped" in condition, name), [])
