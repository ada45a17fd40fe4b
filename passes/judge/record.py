"""Facts that ranks of a judged program record besides their observations."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from schedlang.passes.judge.discrete_choices import Moment, RecordedChoices
from schedlang.passes.judge.dropout_masks import RankDropoutSites
from schedlang.passes.judge.layouts import RankLayouts
from schedlang.passes.judge.regions import RankCopy

if TYPE_CHECKING:
    from schedlang.passes.judge.state_loading import LoadErrors


@dataclass
class RunRecord:
    """Facts that ranks record besides their observation, to explain a mistake later."""

    # gradients of the first step, by (whether the condition clips, name of the parameter)
    copies: dict[tuple[bool, str], list[RankCopy]] = field(default_factory=dict)
    initial: MutableMapping[str, Any] | None = None  # full parameters at the start
    # differences of ranks' copies then
    start_errors: dict[str, float] = field(default_factory=dict)
    reduce_dtype: str | None = None  # as the program claims
    # by parameter: reductions in fewer bits that give its gradient
    reductions: dict[str, set[str]] = field(default_factory=dict)
    optimizer: bytes | None = None  # the program's own optimizer, pickled for the original
    simulation: bytes | None = None  # the program's `original`, pickled
    holdings: RankLayouts | None = None
    # buffers that no rank has under a known name
    lost_buffers: set[str] = field(default_factory=set)
    offers: set[str] = field(default_factory=set)  # optional parts that the program offers
    losses: list[float] = field(default_factory=list)  # the ranks' losses of the first step
    saved: Mapping[str, Any] | None = None  # full tensors of the saved state
    dropout_sites: RankDropoutSites = field(default_factory=RankDropoutSites)
    compiled: bool = False  # whether some module of the program is compiled
    # modules whose dropout calls differ by step
    irregular_modules: set[str] = field(default_factory=set)
    evaluated: set[str] = field(default_factory=set)  # modules that would drop in evaluation
    masks: dict[str, str] = field(default_factory=dict)  # modules with wrong own masks, and why
    low_dtypes: set[str] = field(default_factory=set)  # low dtypes that float64 replaces
    strided: set[tuple[str, str]] = field(default_factory=set)  # see `CallMonitor.strided`
    # by condition: the generators that this rank's first step draws from, and their end states
    drawn: dict[str, Mapping[str, frozenset[object]]] = field(default_factory=dict)
    seeds: Mapping[str, bytes] = field(default_factory=dict)  # generators as `program` leaves them
    other_seeds: list[str] = field(default_factory=list)  # generators that differ by rank then
    # generators that ranks draw from less or more often than the original -> ranks
    unequal_draws: dict[str, list[int]] = field(default_factory=dict)
    unwaited: dict[tuple[str, str], list[int]] = field(default_factory=dict)  # call -> ranks
    # parameters that the step itself changes
    changed_by_step: set[str] = field(default_factory=set)
    # parameters that the step of the program's `original` changes
    changed_by_simulation: set[str] = field(default_factory=set)
    stepped: set[str] = field(default_factory=set)  # kinds of optimizers that the step itself steps
    replaced_by_step: set[str] = field(default_factory=set)  # parameters that the step replaces
    loaded: LoadErrors | None = None  # None: `load` is not offered
    # by all ranks
    choices: Mapping[Moment, Sequence[RecordedChoices]] = field(default_factory=dict)
    folder: str | None = None  # of files in which ranks exchange large tensors

    def gradient_copies(self, condition: str, name: str) -> list[RankCopy]:
        """Return the ranks' gradients of a parameter in the first step under a condition."""
        return self.copies.get(("clipped" in condition, name), [])

    def examines_reductions(self, condition: str, step: int) -> bool:
        """Whether the dtype of reductions is examined in a step: the first without clipping."""
        return self.reduce_dtype is not None and step == 0 and "clipped" not in condition
