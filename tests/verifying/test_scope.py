"""Tests of scope: where in the run we are."""

from contextlib import suppress

import pytest
import torch
from torch import nn

from schedlang.runtime import scope
from schedlang.runtime.scope import Scope, current, enter_scope, named_sites


class Noted(nn.Module):
    """Note the site in which it runs, and raise if told."""

    def __init__(self, seen: list[tuple[str, int]], fail: bool = False) -> None:
        super().__init__()
        self.seen, self.fail = seen, fail

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append((scope.current_site(), scope.count_call(scope.current_site())))
        if self.fail:
            raise ValueError("as told")
        return x


class Caught(nn.Module):
    """Call a child that may raise, and go on."""

    def __init__(self, child: nn.Module, seen: list[tuple[str, int]]) -> None:
        super().__init__()
        self.child, self.after = child, Noted(seen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with suppress(ValueError):
            self.child(x)
        return self.after(x)


def test_scope_is_restored_after_nesting_and_errors() -> None:
    """Leaving a scope, by return or by exception, brings back the one around it."""
    one, two = Scope(0, 0, (0,)), Scope(0, 1, (1, 2))
    with enter_scope(one):
        with pytest.raises(ValueError), enter_scope(two):
            assert current() == two
            raise ValueError
        assert current() == one
    assert current() is None


def test_sites_are_paths_and_calls_count_within_one_pass() -> None:
    """A module called twice in a pass counts 0, 1, and again 0, 1 in the next pass."""
    seen: list[tuple[str, int]] = []
    shared = Noted(seen)
    model = nn.Sequential(shared, nn.Sequential(shared), Noted(seen))
    named_sites(model)
    for _ in range(2):
        model(torch.ones(1))
    assert seen == [("0", 0), ("0", 1), ("2", 0)] * 2
    assert scope.current_site() == ""


@pytest.mark.parametrize("deep", [1, 3])
def test_sites_survive_exceptions(deep: int) -> None:
    """An exception through any number of modules leaves the site of the module that catches it."""
    seen: list[tuple[str, int]] = []
    child: nn.Module = Noted(seen, fail=True)
    for _ in range(deep):
        child = nn.Sequential(child)
    model = Caught(child, seen)
    named_sites(model)
    model(torch.ones(1))
    assert seen[1] == ("after", 0)
    assert scope.current_site() == ""


def test_a_scope_forgets_what_an_operation_left_behind() -> None:
    """Even an exit that skips the hooks (no Exception) leaves nothing for the next operation."""

    class Abrupt(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyboardInterrupt

    model = nn.Sequential(Abrupt())
    named_sites(model)
    with pytest.raises(KeyboardInterrupt), enter_scope(Scope(0, 0, (0,))):
        model(torch.ones(1))
    with enter_scope(Scope(0, 1, (0,))):
        assert scope.current_site() == ""


def test_an_earlier_hook_that_raises_does_not_pop_the_parent() -> None:
    """The leave hook runs even if the enter hook did not; the parent's entry stays."""
    seen: list[tuple[str, int]] = []
    child = Noted(seen)
    model = Caught(child, seen)
    named_sites(model)

    def refuse(*_: object) -> None:
        raise ValueError

    child.register_forward_pre_hook(refuse, prepend=True)
    model(torch.ones(1))
    assert seen == [("after", 0)]


def test_capture_restores_place_and_counts() -> None:
    """A captured place brings scope, site and counts back, each time the same."""
    kept = []

    class Captures(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scope.count_call(scope.current_site())
            kept.append(scope.capture_scope())
            return x

    model = nn.Sequential(Captures())
    named_sites(model)
    here = Scope(3, 1, (5,))
    with enter_scope(here):
        model(torch.ones(1))
    for _ in range(2):
        with kept[0]():
            assert (current(), scope.current_site(), scope.count_call("0")) == (here, "0", 1)
    assert current() is None
