"""Ambient modes: active wherever the model computes, also in recomputation."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from schedlang.runtime import modes
from schedlang.runtime.modes import AmbientMode, CarryingMode, enter_modes, restore_forward_context


class Spy(AmbientMode):
    """Records the names of the functions it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen.append(getattr(func, "__name__", ""))
        return self.run(func, types, args, kwargs or {})


def _recompute(f: Any, x: Tensor) -> Tensor:
    context = lambda: (nullcontext(), restore_forward_context())  # noqa: E731
    return checkpoint(f, x, use_reentrant=False, context_fn=context)


def test_composed_functions_are_open() -> None:
    """Functions inside composed functions are seen: dropout inside multi-head attention."""
    spy = Spy()
    attention = nn.MultiheadAttention(4, 2, dropout=0.5)
    with enter_modes(spy):
        attention(*[torch.ones(1, 2, 4)] * 3)
    assert {"multi_head_attention_forward", "dropout"} <= set(spy.seen)


def test_a_class_with_rules_of_its_own_is_not_opened() -> None:
    """A tensor subclass that overrides a function still receives the call."""

    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return "mine" if func is F.softmax else super().__torch_function__(func, types, args)

    with enter_modes(Spy()):
        assert F.softmax(torch.ones(2).as_subclass(Own), 0) == "mine"


@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward outside"])
def test_recomputation_reenters_the_modes_of_forward(inside: bool) -> None:
    """Recomputation in backward is seen, even after the mode has ended."""
    spy = Spy()
    x = torch.ones(2, requires_grad=True)
    with enter_modes(spy):
        loss = _recompute(lambda v: v.sin().exp(), x).sum()
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    assert spy.seen.count("exp") >= 2
    assert modes._active.modes == ()


def test_nested_recomputation_does_not_pile_up_modes() -> None:
    """In nested checkpoints, each recomputation enters each mode once."""
    spy = Spy()
    mode_counts = []

    def inner(v: Tensor) -> Tensor:
        mode_counts.append(len(modes._active.modes))
        return v.sin()

    x = torch.ones(2, requires_grad=True)
    with enter_modes(spy):
        _recompute(lambda v: _recompute(inner, v).exp(), x).sum().backward()
    assert len(mode_counts) == 3 and set(mode_counts) == {1}


def test_factories_make_a_fresh_mode_for_each_entry() -> None:
    """A factory is called once for forward and once for the recomputation."""
    spies: list[Spy] = []

    def factory() -> Spy:
        spies.append(Spy())
        return spies[-1]

    x = torch.ones(2, requires_grad=True)
    with enter_modes(factory):
        _recompute(torch.sin, x).sum().backward()
    assert len(spies) == 2 and all("sin" in spy.seen for spy in spies)


def test_a_graph_may_be_walked_twice() -> None:
    """With retain_graph the same context is entered again, and gradients accumulate."""
    x = torch.full((2,), 0.5, requires_grad=True)
    with enter_modes(Spy()):
        loss = _recompute(lambda v: v.sin().exp(), x).sum()
        loss.backward(retain_graph=True)
        once = x.grad.clone()
        loss.backward()
    assert torch.equal(x.grad, 2 * once)


class Carried(Spy, CarryingMode):
    """A spy that a mode above may call directly."""

    carried = True


class Stacked(Carried):
    """A spy that only torch calls."""

    carried = False


def _names_seen(kind: type[Carried], many: int) -> list[list[str]]:
    """Return what each of several modes sees in forward, recomputation and afterwards."""
    spies = [kind() for _ in range(many)]
    layer = nn.Linear(2, 2)
    with enter_modes(*spies):
        output = _recompute(
            lambda x: F.dropout(layer(x).sin(), 0.5), torch.ones(1, 2).requires_grad_()
        )
        output.sum().backward()  # type: ignore[no-untyped-call]
        layer.weight.grad.mul_(2)  # type: ignore[union-attr]
    assert not torch._C._len_torch_function_stack()
    return [mode.seen for mode in spies]


@pytest.mark.parametrize("many", [2, 3])
def test_a_carried_mode_sees_what_it_would_see_on_the_stack(many: int) -> None:
    """A carried mode sees the same calls as on torch's stack, also in recomputation."""
    names_by_mode = _names_seen(Carried, many)
    assert names_by_mode == _names_seen(Stacked, many)
    assert all(names.count("sin") > 1 for names in names_by_mode)  # in the recomputation, too


def test_only_what_lies_right_beneath_is_carried() -> None:
    """Only the mode directly below is carried; an unrelated mode between is called normally."""
    lower, spy, upper = Carried(), Spy(), Carried()
    with enter_modes(lower, spy, upper):
        torch.ones(2).sin()
    assert upper.carried_mode is None
    assert lower.seen == spy.seen == upper.seen


def test_what_a_handler_computes_runs_under_the_modes_beneath() -> None:
    """Calls made by a handler are seen by the modes below it."""

    class Answering(Carried):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is not Tensor.sin:
                return self.run(func, types, args, kwargs or {})
            with self.beneath():
                return args[0].cos()

    lower = Carried()
    with enter_modes(lower, Answering()):
        torch.zeros(1).sin()
    assert lower.seen == ["zeros", "cos"]
