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
        text = "saved optimizer state (`load` takes no `optimizer`, and leaves it empty)"
        return (Gap(text, "momentum that is lost"),)


def with_other_values(original: nn.Module, seed: int) -> nn.Module:
    """Copy the original with other weights, and with other persistent float buffers."""
    changed = randomise(original, seed + 1)
    saved = changed.state_dict()
    for name, buffer in changed.named_buffers():
        if name in saved and buffer.is_floating_point():
            buffer.mul_(_BUFFER_FACTOR)
    return changed


def check_loading(old: ProgramSubject, *, step: bool = True) -> LoadErrors | None:
    """Save, load into a second program on these ranks, compare, and train both on.

    Two more steps are trained: the rate of the first is part of an optimizer's state, and a
    scheduler gives that of the second. Only one, if the optimizer's state is not loaded. Returns
    None if the program offers no `load`. All ranks must call this together.
    """
    state = _copy_state(old.save())
    if old.program.load is None:
        return None
    other_model, batch = with_other_values(old.original, 0), old.condition.batches[0]
    fresh = ProgramSubject(old.make, other_model, old.condition, old.record, old.begin, old)
    built = {name: _sum(value) for name, value in fresh.local_state().items()}
    fresh.load(_first_state(state))
    want, got = old.local_state(), fresh.local_state()
    with_optimizer = takes_optimizer(old.program.load) or any(map(_is_optimizer_state, got))
    with_optimizer = _any_rank(with_optimizer) or not _any_rank(any(map(_is_optimizer_state, want)))
    if not with_optimizer:
        want, got = (
            {k: v for k, v in one.items() if not _is_optimizer_state(k)} for one in (want, got)
        )
    state_errors = {name: _load_error(name, want, got, built) for name in {**want, **got}}
    load_errors = LoadErrors(_worst_errors(state_errors), optimizer=with_optimizer)
    if not step:
        return load_errors
    pairs: dict[str, tuple[float, str]] = {}
    for _ in range(1 + with_optimizer):
        errors = {"loss": ratio(*_distance(*(one.train_step(batch) for one in (old, fresh))))}
        errors |= _relative_errors(old.local_gradients(), fresh.local_gradients())
        if with_optimizer:
            errors |= _relative_errors(old.local_state(), fresh.local_state())
        if all(error <= RTOL for error, _ in pairs.values()):  # else what is wrong before it
            pairs = {name: (error, "") for name, error in errors.items()}
    return LoadErrors(
        load_errors.state,
        {name: error for name, (error, _) in _worst_errors(pairs).items()},
        with_optimizer,
    )


def _any_rank(value: bool) -> bool:
    return any(world.all_gather_object(value))


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
    nonempty = world.all_gather_object(not empty)
    if all(nonempty) or not any(nonempty):
        return state
    first_rank = nonempty.index(True)
    shared = world.all_gather_object(state if world.rank() == first_rank else None)[first_rank]
    return shared if empty else state


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


def _worst_errors(errors: Mapping[str, tuple[float, str]]) -> dict[str, tuple[float, str]]:
    """Return the largest error over all ranks, for each name."""
    worst: dict[str, tuple[float, str]] = {}
    for rank_errors in world.all_gather_object(errors):
        for name, pair in rank_errors.items():
            worst[name] = max(worst.get(name, pair), pair, key=lambda p: (p[1] != "", p[0]))
    return worst
