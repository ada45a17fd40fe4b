"""Where generators of random numbers, and autocast, stood before a call; to stand there again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Generator, Tensor, nn


def own_generators(module: nn.Module) -> list[Generator]:
    """The generators that a module, or one inside of it, holds as plain attributes."""
    held = (value for one in module.modules() for value in vars(one).values())
    return list({id(value): value for value in held if isinstance(value, Generator)}.values())


class Replayed(AbstractContextManager[None]):
    """Within, generators stand where they stood when this was made; afterwards, where they were."""

    def __init__(self, generators: Iterable[Generator]) -> None:
        self.first = [(one, one.get_state()) for one in generators]
        self.now: list[list[tuple[Generator, Tensor]]] = []

    def __enter__(self) -> None:
        self.now.append([(one, one.get_state()) for one, _ in self.first])
        for one, state in self.first:
            one.set_state(state)

    def __exit__(self, *error: object) -> None:
        for one, state in self.now.pop():
            one.set_state(state)


class Draws(AbstractContextManager[None]):
    """All that a call's numbers hang on besides its arguments: torch's generators, and autocast."""

    def __init__(self, module: nn.Module, tensors: Sequence[Tensor]) -> None:
        kinds = sorted({t.device.type for t in tensors} | {"cpu"} - {"meta"})
        self.casts = [_autocast(kind) for kind in kinds if kind != "meta"]
        self.replayed = Replayed([*default_generators(tensors), *own_generators(module)])
        self.stacks: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self.replayed)
            for kind, options in self.casts:
                stack.enter_context(torch.amp.autocast(kind, **options))
            self.stacks.append(stack.pop_all())

    def __exit__(self, *error: Any) -> None:
        self.stacks.pop().__exit__(*error)


def default_generators(tensors: Sequence[Tensor]) -> list[Generator]:
    """The generators that operators draw from where none is given."""
    found = [torch.default_generator]
    for device in {t.device for t in tensors if t.is_cuda}:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        place = device.index if device.index is not None else torch.cuda.current_device()
        found.append(torch.cuda.default_generators[place])
    return found


def _autocast(kind: str) -> tuple[str, dict[str, Any]]:
    options = dict(
        dtype=torch.get_autocast_dtype(kind),
        enabled=torch.is_autocast_enabled(kind),
        cache_enabled=torch.is_autocast_cache_enabled(),
    )
    return kind, options
