"""A small trial of a model: whole and by slices, on one process, with what each pass showed.

* A small stand-in of a model, of its own classes: few blocks, random values, float64.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.ir import pytree
from schedlang.ir.model import inside
from schedlang.runtime.batch import called, loss_of, named_arguments, rows_of, shares
from schedlang.runtime.float64 import Float64
from schedlang.runtime.inside import hooked
from schedlang.runtime.modes import ambient
from schedlang.runtime.propagation.trace import LabelRule
from schedlang.runtime.rng.logical_dropout import LogicalDropout, Unbatched, Window
from schedlang.runtime.scope import Scope, entered, named_sites, visit
from schedlang.runtime.sequence_pipelining.slices import (
    Loss,
    Slices,
    Slicing,
    Weight,
    along,
    length_of,
    masks_of,
    run,
    sections,
)
from schedlang.runtime.tracing.meta import copy_with, meta_parameter
from schedlang.runtime.training import Training

WIDE = 100_000_000  # parameters that still fit into memory twice in float64


@dataclass(frozen=True)
class Small:
    """A small model; `alike`: a block that was left out -> one of its kind that stands for it."""

    model: nn.Module
    alike: Mapping[str, str]


def small_copy(
    model: nn.Module, *, short: bool = True, seed: int = 0, sites: Collection[str] = ()
) -> Small:
    """A copy with drawn parameters; `short`: of alike blocks in a list only the first ones.

    One of a model on the meta device lies there, too.

    Blocks are alike if rows of the schedule stand at the same modules inside, too: at `sites`.

    Buffers keep their values, and must have some. Nothing of the model is copied that the copy
    does not keep.
    """
    values = lambda t: t if t.is_meta else t.detach().to("cpu", copy=True)  # noqa: E731
    copied = copy_with(model, lambda name, p: meta_parameter(p), values)
    alike = _shorten(copied, sites) if short else {}
    if not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        _draw(copied, torch.Generator().manual_seed(seed))  # else it is asked for shapes alone
    return Small(copied, alike)


def _shorten(model: nn.Module, sites: Collection[str]) -> dict[str, str]:
    """Keep of each list of blocks the shortest beginning that has two blocks and every kind."""
    alike: dict[str, str] = {}
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.ModuleList) or len(module) < 3:
            continue
        kinds = [
            (*kind, *sorted(s.removeprefix(at) for s in sites if inside(s, at)))
            for at, kind in ((f"{name}.{k}", kind) for k, kind in enumerate(_kinds(module)))
        ]
        need = max(2, *(1 + kinds.index(kind) for kind in set(kinds)))
        for place in range(need, len(module)):
            alike[f"{name}.{place}"] = f"{name}.{kinds.index(kinds[place])}"
        del module[need:]
    return alike


def _kinds(blocks: nn.ModuleList) -> list[tuple[str, str]]:
    """Return the kind of each block: classes, shapes, and settings that are not merely its
    number."""
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
    unbatched: Unbatched = field(default_factory=dict)  # draws that have no dim of samples


@dataclass
class Seen:
    """The results of one pass over the trial's model."""

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
    unbatched: Unbatched | None = None,
    short: bool = True,
    sites: Collection[str] = (),
) -> Trial:
    """A trial from a microbatch: its first rows and tokens, on a short model (`small_copy`)."""
    total = length_of(sample)
    lengths = TOKENS if total >= sum(TOKENS) and short else _lengths(total, count)
    ignoring = rule is not None and not labels_are_input(model, rule, loss)
    batch = _small(model, sample, sum(lengths), rule, ignoring)
    small = small_copy(model, short=short, sites=sites)
    trial = Trial(
        small.model,
        batch,
        lengths,
        loss,
        weight,
        rule,
        random,
        small.alike,
        along(sample),
        unbatched or {},
    )
    if ignoring and loss is None and not _runs(trial):  # labels are its tokens as well
        return replace(trial, batch=_small(model, sample, sum(lengths), rule, False))
    return trial


def _runs(trial: Trial) -> bool:
    try:
        forward(trial, trial.model, trial.batch)
    except Exception:  # whatever the model raises
        return False
    return True


def labels_are_input(model: nn.Module, rule: LabelRule, loss: Loss | None) -> bool:
    """Return whether a loss function takes as labels what the model itself takes."""
    return loss is not None and rule.source in (named_arguments(model) or ())


def _lengths(total: int, count: int) -> tuple[int, ...]:
    return tuple(len(run) for run in shares(total, min(count, total)))


def _small(
    model: nn.Module,
    sample: Mapping[str, Any],
    total: int,
    rule: LabelRule | None,
    ignoring: bool,
) -> dict[str, Any]:
    """Two rows of `total` tokens; what is constant there is drawn, masks pad the last row.

    `ignoring`: one label does not count.
    """
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
        if rule and ignoring and name == labels and cut.dim() == 2 and cut.shape[1] > 2:
            cut[0, 1] = rule.ignore_index  # so no layout has parts with as many labels as tokens
        return cut

    def each(name: str, value: Any) -> Any:
        return pytree.tree_map(lambda leaf: small(name, leaf), value)

    return {name: each(name, value) for name, value in sample.items()}


def _constant(value: Tensor) -> bool:
    kinds = value.dtype in (torch.int64, torch.int32) and value.dim() == 2
    return kinds and bool((value == value[:1, :1]).all())


class _Noting(LogicalDropout):
    """Logical masks that note their shapes, by slice, module and turn."""

    def __init__(
        self, found: dict[Any, tuple[int, ...]], within: Any, unbatched: Unbatched
    ) -> None:
        super().__init__(0, self._note, unbatched)
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
    modes += [_Noting(draws, inner, trial.unbatched)] if trial.random else []
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
        with running(trial, draws, slicing.windows(None) if slicing.draws else None):
            value, _ = run(slices, model, trial.batch, trial.loss)
    finally:
        slices.close()
    return Seen(value, gradients_of(model), draws)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """The gradients that a backward has left."""
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


Outputs = dict[str, dict[int | None, Tensor]]  # by module, then by part; None: the whole sequence


@contextmanager
def noted(model: nn.Module) -> Iterator[Outputs]:
    """Note the first output of every module in a block, innermost first, of each part that runs."""
    found: Outputs = {}

    def note(name: str, module: nn.Module, args: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        if isinstance(first, Tensor) and first.is_floating_point():
            part = visit()
            held = found.setdefault(name, {})
            held.setdefault(None if part is None else part.index, first.detach())

    named = [(name, module) for name, module in model.named_modules() if name]
    with hooked(module.register_forward_hook(partial(note, name)) for name, module in named):
        yield found


def tokens_of(batch: Mapping[str, Any], total: int, held: Tensor) -> dict[str, Any]:
    """Some tokens of a batch of `total`, as one would take them by hand."""

    def part(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() < 2:
            return value
        if value.dim() == 4 and value.shape[-1] == total:
            return value[:, :, held][..., held]
        if value.dim() == 3 and value.shape[1] != total and value.shape[2] == total:
            return value[..., held]
        return value[:, held] if value.shape[1] == total else value

    return {name: part(value) for name, value in batch.items()}
