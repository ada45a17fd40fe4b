"""Models that hold functions over their own modules: lambdas, hooks, wrapped forwards."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schedlang.ir.module_copies import copy_module
from schedlang.runtime.tracing.meta_runs import meta_model
from tests.engine import Threads
from tests.zoo_models.written import Written, hand_text, judge


def _points(rows: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draw = functools.partial(torch.randn, generator=generator)
    return {"x": draw(rows, 4), "y": draw(rows)}


class Base(nn.Module):
    """Two layers, and a head that reads both through what a function keeps or calls."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU())
        self.head = nn.Linear(16, 1)
        self.kept: dict[str, Tensor] = {}

    def features(self, x: Tensor) -> Tensor:
        """Return what the head reads."""
        out = self.body(x)
        return torch.cat([self.kept.get("a", out), self.kept.get("b", out)], -1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return ((self.head(self.features(x))[..., 0] - y) ** 2).mean()


class Hooked(Base):
    """Features by hooks that write into a dict of the model (a closure over `self`)."""

    def __init__(self) -> None:
        super().__init__()

        def keep(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Tensor) -> None:
                self.kept[name] = output

            return hook

        for name, index in (("a", 0), ("b", 2)):
            self.body[index].register_forward_hook(keep(name))


class Lambda(Base):
    """minGPT's way: a lambda over the modules that it calls."""

    def __init__(self) -> None:
        super().__init__()
        body = self.body
        self.features = lambda x: torch.cat([body(x), body(x).sin()], -1)  # type: ignore[method-assign]


class Defaults(Base):
    """The same with defaults, in a list of functions, through a partial."""

    def __init__(self) -> None:
        super().__init__()
        run = lambda x, module=self.body, *, last=self.body[2]: module(x) + last.bias  # noqa: E731
        self.calls = [functools.partial(run, module=self.body)]

    def features(self, x: Tensor) -> Tensor:
        """Return what the head reads."""
        return torch.cat([self.calls[0](x), self.calls[0](x).cos()], -1)


class Wrapped(Base):
    """A forward that was replaced by a wrapper around the old one, as libraries do."""

    def __init__(self) -> None:
        super().__init__()
        old_forward = self.body.forward

        @functools.wraps(old_forward)
        def forward(*args: Any, **kwargs: Any) -> Tensor:
            return old_forward(*args, **kwargs) * 2.0

        self.body.forward = forward  # type: ignore[method-assign]


WAYS = (Hooked, Lambda, Defaults, Wrapped)
ZERO, CUT = "  zero(stage={}, over=dp)", "  body.2  pipeline_split(over=pp)\n  pipeline(micro=2)"
ROWS = (
    f"dp=2\n{ZERO.format(1)}",
    f"dp=2\n{ZERO.format(3)}",
    "tp=2\n  body.0  shard(col, output=R, over=tp)",
)


@pytest.mark.parametrize("way", WAYS)
def test_functions_over_modules_train_the_copy(threads: Threads, way: type[Base]) -> None:
    """Such models train as in a plain loop: no function computes with the original's modules."""
    written = Written(way, _points)
    for text in ROWS:
        assert judge(written, hand_text(text), threads) == "", text


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_holds_nothing_of_the_original(way: type[Base]) -> None:
    """With the original's parameters at NaN, its copy and a copy of this copy still compute."""
    torch.manual_seed(0)
    model, batch = way(), _points(3, 0)
    expected = model(**batch)
    model.kept.clear()
    twin = copy_module(copy_module(model))
    for parameter in model.parameters():
        nn.init.constant_(parameter, torch.nan)
    assert torch.equal(twin(**batch), expected) and not model.kept
    bare = meta_model(twin, {})
    assert bare(**{name: value.to("meta") for name, value in batch.items()}).is_meta


def test_what_no_module_holds_stays_shared() -> None:
    """A log outside of the model that a hook writes to is the same for a copy."""
    log: list[str] = []
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_forward_hook(lambda module, args, output: log.append("called"))
    copy_module(model)(torch.zeros(1, 2))
    model(torch.zeros(1, 2))
    assert log == ["called", "called"]


def test_a_model_that_ran_before_is_built(threads: Threads) -> None:
    """Tensors of an earlier run that a hook left in a dict are copied by value, and not read."""

    class Used(Hooked):
        def __init__(self) -> None:
            super().__init__()
            super().forward(**_points(6, 5))

    text = hand_text(f"dp=2\n{ZERO.format(1)}")
    assert judge(Written(Used, _points), text, threads) == ""
