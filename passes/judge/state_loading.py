"""Check that a program loads what it saved: a second program loads the state, and both train on.

The second program is made from other weights and statistics, so that whatever is not loaded shows.
Each rank compares its own tensors; ranks exchange only the errors.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.ir import pytree
from schedlang.passes.judge.program import takes_optimizer
from schedlang.passes.judge.subject import ProgramSubject
from schedlang.passes.verify.compare import RTOL, ratio
from schedlang.passes.verify.observe import Condition
from schedlang.passes.verify.original import randomise
from schedlang.report import Gap, Row
from schedlang.runtime.comm import world

NOT_LOADED = "not loaded: it is as it was built"
OTHER, LOST, EXTRA = "not what was saved", "lost", "it was not there when the state was saved"
_BUFFER_FACTOR = 1.5  # of the second program's persistent buffers

LOADED_STATE, STEP_AFTER_LOADING = "loaded state", "step after loading"  # kinds of rows


@dataclass(frozen=True)
class LoadErrors:
    """Errors of ranks' loaded state, by name: the relative error, and a description."""

    state: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    step: Mapping[str, float] = field(default_factory=dict)
    optimizer: bool = True  # whether its state is loaded, if there is any

    def rows(self, condition: Condition) -> Iterator[Row]:
        """Yield a row for each loaded tensor, and for each tensor of the next step."""
        last = len(condition.batches) - 1
        for name, (error, note) in self.state.items():
            yield Row(condition.name, LOADED_STATE, name, error, 0.0, not note, last, note)
        for name, error in self.step.items():
            ok = error <= RTOL
            yield Row(condition.name, STEP_AFTER_LOADING, name, error, RTOL, ok, last + 1)

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """List what is not compared."""
        if self.optimizer:
            return ()
        said = "saved optimizer state (`load` takes no `optimizer`, and leaves it empty)"
        return (Gap(said, "momentum that is lost"),)


def with_other_values(original: nn.Module, seed: int) -> nn.Module:
    """Copy the original with other weights, and with other persistent float buffers."""
    other = randomise(original, seed + 1)
    saved = other.state_dict()
    for name, buffer in other.named_buffers():
        if name in saved and buffer.is_floating_point():
            buffer.mul_(_BUFFER_FACTOR)
    return other


def check_loading(old: ProgramSubject, *, step: bool = True) -> LoadErrors | None:
    """Save, load into a second program on these ranks, compare, and train both for one more step.

    Returns None if the program offers no `load`. All ranks must call this together.
    """
    state = _copy_state(old.save())
    if old.program.load is None:
        return None
    other, batch = with_other_values(old.original, 0), old.condition.batches[0]
    fresh = ProgramSubject(old.make, other, old.condition, old.record, old.begin, old)
    built = {name: _sum(value) for name, value in fresh.local_state().items()}
    fresh.load(_first_state(state))
    want, got = old.local_state(), fresh.local_state()
    with_optimizer = takes_optimizer(old.program.load) or any(map(_is_optimizer_state, got))
    with_optimizer = _any_rank(with_optimizer) or not _any_rank(any(map(_is_optimizer_state, want)))
    if not with_optimizer:
        want, got = (
            {k: v for k, v in one.items() if not _is_optimizer_state(k)} for one in (want, got)
        )
    found = {name: _load_error(name, want, got, built) for name in {**want, **got}}
    seen = LoadErrors(_worst_errors(found), optimizer=with_optimizer)
    if not step:
        return seen
    errors = {"loss": ratio(*_distance(*(one.train_step(batch) for one in (old, fresh))))}
    errors |= _relative_errors(old.local_gradients(), fresh.local_gradients())
    if with_optimizer:
        errors |= _relative_errors(old.local_state(), fresh.local_state())
    pairs = {name: (error, "") for name, error in errors.items()}
    return LoadErrors(
        seen.state,
        {name: error for name, (error, _) in _worst_errors(pairs).items()},
        with_optimizer,
    )


def _any_rank(mine: bool) -> bool:
    return any(world.all_gather_object(mine))


def _is_optimizer_state(name: str) -> bool:
    return " of " in name


def _copy_state(state: Any) -> Any:
    """Copy a saved state, as writing and reading a file would."""
    return pytree.tree_map(
        lambda v: v.detach().clone() if isinstance(v, Tensor) else copy.deepcopy(v), state
    )


def _first_state(state: Any) -> Any:
    """Return this rank's state; if it is empty, the state of the first rank that has one."""
    empty = state is None or (isinstance(state, (Mapping, list, tuple)) and not state)
    has = world.all_gather_object(not empty)
    if all(has) or not any(has):
        return state
    first = has.index(True)
    given = world.all_gather_object(state if world.rank() == first else None)[first]
    return given if empty else state


def _sum(value: Any) -> float:
    return float(value.double().sum()) if isinstance(value, Tensor) and value.numel() else 0.0


def _load_error(
    name: str, want: Mapping[str, Any], got: Mapping[str, Any], built: Mapping[str, float]
) -> tuple[float, str]:
    """Return the error of one loaded value and its description; (0, "") if it is right."""
    if name not in got:
        return math.inf, LOST
    if name not in want:
        return math.inf, EXTRA
    gap, size = _distance(got[name], want[name])
    if gap == 0:
        return 0.0, ""
    return ratio(gap, size), NOT_LOADED if _sum(got[name]) == built.get(name) else OTHER


def _distance(a: Any, b: Any) -> tuple[float, float]:
    """Return the distance of two values, and the norm of the second."""
    if not isinstance(a, (Tensor, int, float)) or not isinstance(b, (Tensor, int, float)):
        return (0.0 if a == b else math.inf), 1.0
    a, b = torch.as_tensor(a), torch.as_tensor(b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return math.inf, 1.0
    if torch.equal(a, b):
        return 0.0, 1.0
    return float((a.double() - b.double()).norm()), float(b.double().norm())


def _relative_errors(want: Mapping[str, Any], got: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: ratio(*_distance(got[name], want[name])) if name in got and name in want else math.inf
        for name in {**want, **got}
    }


def _worst_errors(mine: Mapping[str, tuple[float, str]]) -> dict[str, tuple[float, str]]:
    """Return the largest error over all ranks, for each name."""
    found: dict[str, tuple[float, str]] = {}
    for one in world.all_gather_object(mine):
        for name, pair in one.items():
            found[name] = max(found.get(name, pair), pair, key=lambda p: (p[1] != "", p[0]))
    return found
