"""The scope of a run: step, microbatch, site and call counts, also after errors."""

from contextlib import suppress

import pytest
import torch
from torch import nn

from schedlang.runtime import scope
from schedlang.runtime.scope import Scope, current, enter_scope, named_sites


class SiteRecorder(nn.Module):
    """Records the site in which it runs; raises if `fail`."""

    def __init__(self, sites: list[tuple[str, int]], fail: bool = False) -> None:
        super().__init__()
        self.seen, self.fail = sites, fail

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append((scope.current_site(), scope.count_call(scope.current_site())))
        if self.fail:
            raise ValueError("as told")
        return x


class CatchingParent(nn.Module):
    """Calls a child that may raise, and continues."""

    def __init__(self, child: nn.Module, sites: list[tuple[str, int]]) -> None:
        super().__init__()
        self.child, self.after = child, SiteRecorder(sites)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with suppress(ValueError):
            self.child(x)
        return self.after(x)


def test_scope_is_restored_after_nesting_and_errors() -> None:
    """Leaving a scope, also by an exception, restores the outer one."""
    outer, inner = Scope(0, 0, (0,)), Scope(0, 1, (1, 2))
    with enter_scope(outer):
        with pytest.raises(ValueError), enter_scope(inner):
            assert current() == inner
            raise ValueError
        assert current() == outer
    assert current() is None


def test_sites_are_paths_and_calls_count_within_one_pass() -> None:
    """Calls of a module are counted from 0 in each pass."""
    sites: list[tuple[str, int]] = []
    shared = SiteRecorder(sites)
    model = nn.Sequential(shared, nn.Sequential(shared), SiteRecorder(sites))
    named_sites(model)
    for _ in range(2):
        model(torch.ones(1))
    assert sites == [("0", 0), ("0", 1), ("2", 0)] * 2
    assert scope.current_site() == ""


@pytest.mark.parametrize("deep", [1, 3])
def test_sites_survive_exceptions(deep: int) -> None:
    """After an exception through several modules the site is that of the catching module."""
    sites: list[tuple[str, int]] = []
    child: nn.Module = SiteRecorder(sites, fail=True)
    for _ in range(deep):
        child = nn.Sequential(child)
    model = CatchingParent(child, sites)
    named_sites(model)
    model(torch.ones(1))
    assert sites[1] == ("after", 0)
    assert scope.current_site() == ""


def test_a_scope_forgets_what_an_operation_left_behind() -> None:
    """Even a KeyboardInterrupt, which skips hooks, leaves nothing for the next operation."""

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
    """The exit hook runs even if the entry hook did not; the parent's entry stays."""
    sites: list[tuple[str, int]] = []
    child = SiteRecorder(sites)
    model = CatchingParent(child, sites)
    named_sites(model)

    def refuse(*_: object) -> None:
        raise ValueError

    child.register_forward_pre_hook(refuse, prepend=True)
    model(torch.ones(1))
    assert sites == [("after", 0)]


def test_capture_restores_place_and_counts() -> None:
    """A captured scope restores scope, site and counts, every time."""
    captured = []

    class Captures(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scope.count_call(scope.current_site())
            captured.append(scope.capture_scope())
            return x

    model = nn.Sequential(Captures())
    named_sites(model)
    expected = Scope(3, 1, (5,))
    with enter_scope(expected):
        model(torch.ones(1))
    for _ in range(2):
        with captured[0]():
            assert (current(), scope.current_site(), scope.count_call("0")) == (expected, "0", 1)
    assert current() is None
