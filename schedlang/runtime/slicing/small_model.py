"""A small stand-in of a model, of its own classes: few blocks, random values, float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from schedlang.runtime.recording.meta import copy_with, hollow_parameter

WIDE = 100_000_000  # parameters that still fit into memory twice in float64


@dataclass(frozen=True)
class Small:
    """A small model; `alike`: a block that was left out -> one of its kind that stands for it."""

    model: nn.Module
    alike: Mapping[str, str]


def small_copy(model: nn.Module, *, short: bool = True, seed: int = 0) -> Small:
    """A copy with drawn parameters; `short`: of alike blocks in a list only the first ones.

    Buffers keep their values, and must have some. Nothing of the model is copied that the copy
    does not keep.
    """
    values = lambda t: t if t.is_meta else t.detach().to("cpu", copy=True)  # noqa: E731
    copied = copy_with(model, lambda name, p: hollow_parameter(p), values)
    alike = _shorten(copied) if short else {}
    _draw(copied, torch.Generator().manual_seed(seed))
    return Small(copied, alike)


def _shorten(model: nn.Module) -> dict[str, str]:
    """Keep of each list of blocks the shortest beginning that has two blocks and every kind."""
    alike: dict[str, str] = {}
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.ModuleList) or len(module) < 3:
            continue
        kinds = _kinds(module)
        need = max(2, *(1 + kinds.index(kind) for kind in set(kinds)))
        for place in range(need, len(module)):
            alike[f"{name}.{place}"] = f"{name}.{kinds.index(kinds[place])}"
        del module[need:]
    return alike


def _kinds(blocks: nn.ModuleList) -> list[tuple[str, str]]:
    """What each block is: classes, shapes, and settings that are not merely its number."""
    plain = [_settings(block) for block in blocks]
    numbers = {k for k in plain[0] if all(one.get(k) == at for at, one in enumerate(plain))}
    settings = [sorted((k, str(v)) for k, v in one.items() if k not in numbers) for one in plain]
    return [(str(known), _shape(block)) for known, block in zip(settings, blocks)]


def _settings(block: nn.Module) -> dict[str, str | int]:
    """Plain values that its modules hold, by path; numbers as they are."""
    return {
        f"{name}.{key}": value if type(value) is int else str(value)
        for name, module in block.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, (bool, str, int, float, type(None)))
    }


def _shape(block: nn.Module) -> str:
    """Classes of its modules and shapes of its parameters."""
    classes = [(name, type(module).__qualname__) for name, module in block.named_modules()]
    return str((classes, [(name, tuple(p.shape)) for name, p in block.named_parameters()]))


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
