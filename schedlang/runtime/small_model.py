"""A small stand-in of a model, of its own classes: few blocks, random values, float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from schedlang.runtime.meta import copy_with, hollow_parameter

WIDE = 100_000_000  # parameters that still fit into memory twice in float64


def small_copy(model: nn.Module, *, short: bool = True, seed: int = 0) -> nn.Module:
    """A copy with drawn parameters; `short`: of alike blocks in a list only the first ones.

    Buffers keep their values, and must have some. Nothing of the model is copied that the copy
    does not keep.
    """
    values = lambda t: t if t.is_meta else t.detach().to("cpu", copy=True)  # noqa: E731
    copied = copy_with(model, lambda name, p: hollow_parameter(p), values)
    if short:
        _shorten(copied)
    _draw(copied, torch.Generator().manual_seed(seed))
    return copied


def _shorten(model: nn.Module) -> None:
    """Keep of each list of blocks the shortest beginning that has two blocks and every kind."""
    for module in list(model.modules()):
        if not isinstance(module, nn.ModuleList) or len(module) < 3:
            continue
        kinds = [_kind(block, place) for place, block in enumerate(module)]
        need = max(1 + kinds.index(kind) for kind in set(kinds))
        if max(need, 2) < len(module):
            del module[max(need, 2) :]


def _kind(block: nn.Module, place: int) -> tuple[Any, ...]:
    """What a block is: classes, shapes, and settings that are not merely its number."""
    found: list[Any] = []
    for name, module in block.named_modules():
        plain = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, (bool, str, int, float, type(None))) and value != place
        }
        shapes = [(n, p.shape) for n, p in module.named_parameters(recurse=False)]
        found.append((name, type(module), str(sorted(plain.items(), key=str)), str(shapes)))
    return tuple(found)


def _draw(model: nn.Module, generator: torch.Generator) -> None:
    """Values for all parameters; what was tied stays tied."""
    wide = sum(p.numel() for p in model.parameters()) <= WIDE
    done: dict[int, nn.Parameter] = {}

    def fresh(old: nn.Parameter) -> nn.Parameter:
        if id(old) not in done:
            scale = old.shape[-1] ** -0.5 if old.dim() > 1 else 0.5
            drawn = torch.randn(old.shape, generator=generator, device="cpu") * scale
            value = drawn.to(torch.float64 if wide else torch.float32)
            done[id(old)] = nn.Parameter(value, requires_grad=old.requires_grad)
        return done[id(old)]

    def moved(old: Tensor) -> Tensor:
        return old.double() if wide and old.is_floating_point() else old

    kept = list(model.parameters())  # alive, so that their ids stay theirs
    for module in model.modules():
        for name, held in list(module._parameters.items()):
            if held is not None:
                module._parameters[name] = fresh(held)
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = moved(buffer)
    del kept
