"""A small trial of a model: whole and by slices, on one process, with what each pass showed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.runtime import nests as pytree
from schedlang.runtime.drawing.random import LogicalDropout, Window
from schedlang.runtime.float64 import Float64
from schedlang.runtime.following.trace import LabelRule
from schedlang.runtime.given import called
from schedlang.runtime.modes import ambient
from schedlang.runtime.parts import rows_of, shares
from schedlang.runtime.recording.record import loss_of
from schedlang.runtime.scope import Scope, entered, named_sites, visit
from schedlang.runtime.slicing.sliced import Loss, Slices, run, windows
from schedlang.runtime.slicing.slices import Slicing, Weight, along, length_of, masks_of, sections
from schedlang.runtime.slicing.small_model import small_copy
from schedlang.runtime.training import Training

TOKENS = (3, 2, 4)  # of the slices: lengths and ends all differ


@dataclass(frozen=True)
class Trial:
    """A small model, a small batch, and how the parts of it are weighed."""

    model: nn.Module
    batch: Mapping[str, Any]
    lengths: tuple[int, ...]
    loss: Loss | None
    weight: Weight
    rule: LabelRule | None
    random: bool
    alike: Mapping[str, str] = field(default_factory=dict)  # see small_model.Small
    along: frozenset[str] = frozenset()  # inputs that run along the sequence


@dataclass
class Seen:
    """What one pass over the trial's model showed."""

    loss: Tensor
    gradients: dict[str, Tensor]
    draws: dict[Any, tuple[int, ...]]


def trial_of(
    model: nn.Module,
    sample: Mapping[str, Any],
    count: int,
    *,
    loss: Loss | None,
    weight: Weight,
    rule: LabelRule | None,
    random: bool,
    short: bool = True,
) -> Trial:
    """A trial from a microbatch: its first rows and tokens, on a short model."""
    total = length_of(sample)
    lengths = TOKENS if total >= sum(TOKENS) and short else _lengths(total, count)
    batch = _small(model, sample, sum(lengths), rule)
    small = small_copy(model, short=short)
    return Trial(
        small.model, batch, lengths, loss, weight, rule, random, small.alike, along(sample)
    )


def _lengths(total: int, count: int) -> tuple[int, ...]:
    return tuple(len(run) for run in shares(total, min(count, total)))


def _small(
    model: nn.Module, sample: Mapping[str, Any], total: int, rule: LabelRule | None
) -> dict[str, Any]:
    """Two rows of `total` tokens; what is constant there is drawn, masks pad the last row."""
    rows, length = rows_of(sample), length_of(sample)
    keep, masks, labels = min(rows, 2), masks_of(sample), rule.source if rule else None
    generator = torch.Generator().manual_seed(0)
    sizes = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]

    def small(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        if sections(value, length, rows):
            return value[:, :keep, :total].detach().to("cpu", copy=True)
        cut = value[:keep] if value.shape[0] == rows else value
        if cut.dim() > 1 and cut.shape[1] == length:
            cut = cut[:, :total]
        if cut.dim() == 4 and cut.shape[-1] == length:
            cut = cut[:, :, :total, :total]
        cut = cut.detach().to("cpu", copy=True)
        if name in masks:
            cut[:] = 1
            cut[-1, total - 2 :] = 0
        elif name == labels or _constant(cut):
            high = max(int(cut.max()) + 1, 2)
            if name != labels:
                high = max(high, min((s for s in sizes if s >= high), default=high))
            cut = torch.randint(0, high, cut.shape, generator=generator).to(cut.dtype)
        return cut

    def each(name: str, value: Any) -> Any:
        return pytree.tree_map(lambda leaf: small(name, leaf), value)

    return {name: each(name, value) for name, value in sample.items()}


def _constant(value: Tensor) -> bool:
    kinds = value.dtype in (torch.int64, torch.int32) and value.dim() == 2
    return kinds and bool((value == value[:1, :1]).all())


class _Noting(LogicalDropout):
    """Logical masks that note their shapes, by slice, module and turn."""

    def __init__(self, found: dict[Any, tuple[int, ...]], within: Any) -> None:
        super().__init__(0, self._note)
        self.found, self.within = found, within

    def _note(self, site: str, call: int, shape: tuple[int, ...]) -> Window | None:
        part = visit()
        self.found[(part.index if part else None, site, call)] = shape
        window: Window | None = self.within(site, call, shape) if self.within else None
        return window


@contextmanager
def running(trial: Trial, draws: dict[Any, tuple[int, ...]], inner: Any = None) -> Iterator[None]:
    """The modes, the scope and the state of random numbers of a pass."""
    wide = next(trial.model.parameters()).dtype == torch.float64
    modes: list[Any] = [Float64()] if wide else []
    modes += [_Noting(draws, inner)] if trial.random else []
    rows = tuple(range(rows_of(trial.batch)))
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(ambient(*modes))
        stack.enter_context(entered(Scope(0, 0, rows)))
        yield


def forward(trial: Trial, model: nn.Module, batch: Mapping[str, Any]) -> tuple[Any, Tensor]:
    """The whole model on a batch: output and loss."""
    with running(trial, {}):
        output = called(model, batch)
        value = loss_of(output, batch, trial.loss)
    assert value is not None, "the model returns no loss"
    return output, value


def watched(trial: Trial) -> Seen:
    """A pass over the whole sequence, in training."""
    model = trial.model
    draws: dict[Any, tuple[int, ...]] = {}
    model.zero_grad(set_to_none=True)
    Training(model).on()
    named_sites(model)
    with running(trial, draws):
        value = loss_of(called(model, trial.batch), trial.batch, trial.loss)
        assert value is not None, "the model returns no loss"
        torch.autograd.backward(value)
    return Seen(value.detach(), gradients_of(model), draws)


def sliced(trial: Trial, slicing: Slicing) -> Seen:
    """A pass by slices."""
    model = trial.model
    draws: dict[Any, tuple[int, ...]] = {}
    model.zero_grad(set_to_none=True)
    slices = Slices(model, slicing, trial.weight, lengths=lambda total, count: trial.lengths)
    try:
        with running(trial, draws, windows(slicing, None) if slicing.draws else None):
            value, _ = run(slices, model, trial.batch, trial.loss)
    finally:
        slices.close()
    return Seen(value, gradients_of(model), draws)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """The gradients that a backward has left."""
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
