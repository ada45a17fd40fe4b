"""Tests of modes: an ambient mode is on wherever the model computes."""

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
    """Note the names of the functions seen."""

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
    """Dropout inside multi-head attention is seen, not only the attention."""
    spy = Spy()
    attention = nn.MultiheadAttention(4, 2, dropout=0.5)
    with enter_modes(spy):
        attention(*[torch.ones(1, 2, 4)] * 3)
    assert {"multi_head_attention_forward", "dropout"} <= set(spy.seen)


def test_a_class_with_rules_of_its_own_is_not_opened() -> None:
    """A tensor class that overrides a function gets the function."""

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
    """What is recomputed in backward is seen again, even if the mode has been left by then."""
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
    """However deep checkpoints nest, each recomputation holds each mode once."""
    spy = Spy()
    held = []

    def inner(v: Tensor) -> Tensor:
        held.append(len(modes._active.modes))
        return v.sin()

    x = torch.ones(2, requires_grad=True)
    with enter_modes(spy):
        _recompute(lambda v: _recompute(inner, v).exp(), x).sum().backward()
    assert len(held) == 3 and set(held) == {1}


def test_factories_make_a_fresh_mode_for_each_entry() -> None:
    """A factory is called once for forward and once for the recomputation."""
    made: list[Spy] = []

    def factory() -> Spy:
        made.append(Spy())
        return made[-1]

    x = torch.ones(2, requires_grad=True)
    with enter_modes(factory):
        _recompute(torch.sin, x).sum().backward()
    assert len(made) == 2 and all("sin" in spy.seen for spy in made)


def test_a_graph_may_be_walked_twice() -> None:
    """With retain_graph the same context is entered again, and the gradients add up."""
    x = torch.full((2,), 0.5, requires_grad=True)
    with enter_modes(Spy()):
        loss = _recompute(lambda v: v.sin().exp(), x).sum()
        loss.backward(retain_graph=True)
        once = x.grad.clone()
        loss.backward()
    assert torch.equal(x.grad, 2 * once)


class Carried(Spy, CarryingMode):
    """Notes what it sees; a mode above may ask it itself."""

    carried = True


class Stacked(Carried):
    """The same, never asked but by torch."""

    carried = False


def _seen(kind: type[Carried], many: int) -> list[list[str]]:
    """What each of several modes sees of a forward, a recomputation and what comes after."""
    found = [kind() for _ in range(many)]
    layer = nn.Linear(2, 2)
    with enter_modes(*found):
        out = _recompute(
            lambda x: F.dropout(layer(x).sin(), 0.5), torch.ones(1, 2).requires_grad_()
        )
        out.sum().backward()  # type: ignore[no-untyped-call]
        layer.weight.grad.mul_(2)  # type: ignore[union-attr]
    assert not torch._C._len_torch_function_stack()
    return [mode.seen for mode in found]


@pytest.mark.parametrize("many", [2, 3])
def test_a_carried_mode_sees_what_it_would_see_on_the_stack(many: int) -> None:
    """In forward, in a recomputation, where modes are entered once more, and afterwards."""
    found = _seen(Carried, many)
    assert found == _seen(Stacked, many)
    assert all(names.count("sin") > 1 for names in found)  # in the recomputation, too


def test_only_what_lies_right_beneath_is_carried() -> None:
    """A mode between them, which knows of neither, is asked in its place."""
    lower, spy, upper = Carried(), Spy(), Carried()
    with enter_modes(lower, spy, upper):
        torch.ones(2).sin()
    assert upper.carried_mode is None
    assert lower.seen == spy.seen == upper.seen


def test_what_a_handler_computes_runs_under_the_modes_beneath() -> None:
    """A mode that answers a call by others leaves these to those beneath."""

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
