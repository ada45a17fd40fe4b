"""Trials for probes: a small copy of a model, a small batch, and runs of them on one process.

The copy has the model's own classes, few blocks, random values, and float64 if memory allows.
Probes compare a run of full sequences with a run by slices or shards of tokens.
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
from schedlang.ir.model import is_inside
from schedlang.runtime.batch import loss_of, named_arguments, row_count, run_model, split_rows
from schedlang.runtime.float64 import Float64
from schedlang.runtime.modes import enter_modes
from schedlang.runtime.propagation.label_flow import LabelRule
from schedlang.runtime.rng.logical_dropout import LogicalDropout, LogicalWindow, UnbatchedDraws
from schedlang.runtime.scope import Scope, current_visit, enter_scope, named_sites
from schedlang.runtime.sequence_pipelining.slices import (
    Loss,
    SliceRunner,
    Slicing,
    Weight,
    is_multi_position,
    run_slices,
    sequence_inputs,
    sequence_length,
    token_masks,
)
from schedlang.runtime.submodules import remove_hooks_after
from schedlang.runtime.tracing.meta_runs import copy_with, meta_parameter
from schedlang.runtime.training_mode import TrainingMode

MAX_FLOAT64_PARAMETERS = 100_000_000  # the most parameters that fit into memory twice in float64


@dataclass(frozen=True)
class SmallModel:
    """A small model; `representatives`: a block that was left out -> the equal block that
    represents it."""

    model: nn.Module
    representatives: Mapping[str, str]


def small_copy(
    model: nn.Module, *, short: bool = True, seed: int = 0, sites: Collection[str] = ()
) -> SmallModel:
    """Return a copy of a model with random parameters.

    short  copy only the first of equal blocks in a list
    sites  modules with rows: blocks are equal only if they have rows at the same modules inside

    The copy of a model on the meta device is on meta.  Buffers keep their values, and must have
    values.  Only the memory of the copy is allocated.
    """
    values = lambda t: t if t.is_meta else t.detach().to("cpu", copy=True)  # noqa: E731
    copied = copy_with(model, lambda name, p: meta_parameter(p), values)
    alike = _shorten(copied, sites) if short else {}
    if not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        # a model on meta is used for shapes only
        _draw_parameters(copied, torch.Generator().manual_seed(seed))
    return SmallModel(copied, alike)


def _shorten(model: nn.Module, sites: Collection[str]) -> dict[str, str]:
    """Shorten each list of blocks to the first blocks that include two blocks and every kind.

    Returns left-out block -> the equal block that represents it.
    """
    alike: dict[str, str] = {}
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.ModuleList) or len(module) < 3:
            continue
        kinds = [
            (*kind, *sorted(s.removeprefix(block_name) for s in sites if is_inside(s, block_name)))
            for block_name, kind in ((f"{name}.{k}", kind) for k, kind in enumerate(_kinds(module)))
        ]
        kept_count = max(2, *(1 + kinds.index(kind) for kind in set(kinds)))
        for index in range(kept_count, len(module)):
            alike[f"{name}.{index}"] = f"{name}.{kinds.index(kinds[index])}"
        del module[kept_count:]
    return alike


def _kinds(blocks: nn.ModuleList) -> list[tuple[str, str]]:
    """Return the kind of each block: its settings, without its own number, classes and shapes."""
    raw = [_settings(block) for block in blocks]
    numbers = {k for k in raw[0] if all(values.get(k) == i for i, values in enumerate(raw))}
    settings = [
        sorted((k, str(v)) for k, v in values.items() if k not in numbers) for values in raw
    ]
    return [(str(setting), _describe_shapes(block)) for setting, block in zip(settings, blocks)]


def _settings(block: nn.Module) -> dict[str, str | int]:
    """Return the plain attributes of a block's modules, by path; integers unchanged, else text."""
    return {
        f"{name}.{key}": value if type(value) is int else str(value)
        for name, module in block.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, (bool, str, int, float, type(None)))
    }


def _describe_shapes(block: nn.Module) -> str:
    """Return the classes of a block's modules and the shapes of its parameters, as text."""
    classes = [(name, type(module).__qualname__) for name, module in block.named_modules()]
    return str((classes, [(name, tuple(p.shape)) for name, p in block.named_parameters()]))


def _draw_parameters(model: nn.Module, generator: torch.Generator) -> None:
    """Give all parameters random values; ties stay."""
    as_float64 = sum(p.numel() for p in model.parameters()) <= MAX_FLOAT64_PARAMETERS
    drawn: dict[int, nn.Parameter] = {}

    def fresh(old: nn.Parameter) -> nn.Parameter:
        if id(old) not in drawn:
            scale = old.shape[-1] ** -0.5 if old.dim() > 1 else 0.5
            values = torch.randn(old.shape, generator=generator, device="cpu") * scale
            value = values.to(torch.float64 if as_float64 else torch.float32)
            drawn[id(old)] = nn.Parameter(value, requires_grad=old.requires_grad)
        return drawn[id(old)]

    def moved(old: Tensor) -> Tensor:
        return old.double() if as_float64 and old.is_floating_point() else old

    alive = list(model.parameters())  # so that no id is used again
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = fresh(parameter)
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = moved(buffer)
    del alive


SLICE_LENGTHS = (3, 2, 4)  # lengths of slices; all lengths and ends differ
_INTEGERS = (torch.int64, torch.int32)
IGNORED_LABEL = -100  # the default of torch's losses


@dataclass(frozen=True)
class Trial:
    """A small model and a small batch with the options of its runs.

    lengths          tokens of each part
    weight           returns the weight of a part in the mean loss
    rule             how the loss reads its labels
    random           whether the model draws random numbers
    representatives  left-out block -> the equal block that represents it (see `SmallModel`)
    along            inputs that are split along the sequence
    unbatched        random draws without a dim of samples
    """

    model: nn.Module
    batch: Mapping[str, Any]
    lengths: tuple[int, ...]
    loss: Loss | None
    weight: Weight
    rule: LabelRule | None
    random: bool
    representatives: Mapping[str, str] = field(default_factory=dict)
    along: frozenset[str] = frozenset()
    unbatched: UnbatchedDraws = field(default_factory=dict)


@dataclass
class RunResult:
    """The result of one run of the trial's model.

    draws  (part, module, turn) of each random draw -> its shape
    """

    loss: Tensor
    gradients: dict[str, Tensor]
    draws: dict[Any, tuple[int, ...]]


def make_trial(
    model: nn.Module,
    sample: Mapping[str, Any],
    count: int,
    *,
    loss: Loss | None,
    weight: Weight,
    rule: LabelRule | None,
    random: bool,
    unbatched: UnbatchedDraws | None = None,
    short: bool = True,
    sites: Collection[str] = (),
) -> Trial:
    """Return a trial of the first rows and tokens of a microbatch on a `small_copy` of a model.

    `count`: the number of parts, if the sample is too short for `SLICE_LENGTHS`, or not `short`.
    """
    total = sequence_length(sample)
    lengths = SLICE_LENGTHS if total >= sum(SLICE_LENGTHS) and short else _lengths(total, count)
    ignoring = rule is not None and not labels_are_input(model, rule, loss)
    batch = _small_batch(model, sample, sum(lengths), rule, ignoring)
    small = small_copy(model, short=short, sites=sites)
    trial = Trial(
        small.model,
        batch,
        lengths,
        loss,
        weight,
        rule,
        random,
        small.representatives,
        sequence_inputs(sample),
        unbatched or {},
    )
    if ignoring and loss is None and not _can_run(trial):  # the labels are its tokens, too
        return replace(trial, batch=_small_batch(model, sample, sum(lengths), rule, False))
    return trial


def _can_run(trial: Trial) -> bool:
    try:
        run_forward(trial, trial.model, trial.batch)
    except Exception:  # the model's own code may raise anything
        return False
    return True


def labels_are_input(model: nn.Module, rule: LabelRule, loss: Loss | None) -> bool:
    """Return whether the labels of a loss function are an input of the model."""
    return loss is not None and rule.source in (named_arguments(model) or ())


def _lengths(total: int, count: int) -> tuple[int, ...]:
    return tuple(len(rows) for rows in split_rows(total, min(count, total)))


def _small_batch(
    model: nn.Module, sample: Mapping[str, Any], total: int, rule: LabelRule | None, ignoring: bool
) -> dict[str, Any]:
    """Return two rows of `total` tokens of a sample, with labels and constant inputs drawn anew.

    Masks pad the last row.  `ignoring`: one label does not count. Without a rule, integers below
    zero are taken for labels that do not count, and one of them stands in the first row.
    """
    rows, length = row_count(sample), sequence_length(sample)
    keep, masks, labels = min(rows, 2), token_masks(sample), rule.source if rule else None
    generator = torch.Generator().manual_seed(0)
    sizes = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]

    def small(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        if is_multi_position(value, length, rows):
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
            upper = max(int(cut.max()) + 1, 2)
            if name != labels:
                upper = max(upper, min((s for s in sizes if s >= upper), default=upper))
            cut = torch.randint(0, upper, cut.shape, generator=generator).to(cut.dtype)
        if rule and ignoring and name == labels and cut.dim() == 2 and cut.shape[1] > 2:
            # so that counts of labels and of tokens differ in all layouts
            cut[0, 1] = rule.ignore_index
        is_label = rule is None and value.dtype in _INTEGERS and cut.shape == (keep, total)
        if is_label and total > 2 and bool((value < 0).any()) and not bool((cut < 0).any()):
            cut[0, 1] = value[value < 0][0]
        return cut

    def each(name: str, value: Any) -> Any:
        return pytree.tree_map(lambda leaf: small(name, leaf), value)

    return {name: each(name, value) for name, value in sample.items()}


def trials_ignoring_a_label(trial: Trial) -> Iterator[Trial]:
    """Yield a trial with one label of -100 for each input that may be labels.

    These are inputs of an integer for each token, none below zero. None where a rule finds labels.
    """
    shape = (row_count(trial.batch), sum(trial.lengths))
    known = token_masks(trial.batch) | {"position_ids"}
    for name, value in () if trial.rule else trial.batch.items():
        is_plain = isinstance(value, Tensor) and value.dtype in _INTEGERS and name not in known
        if is_plain and value.shape == shape and shape[1] > 2 and bool((value >= 0).all()):
            labels = value.clone()
            labels[0, 1] = IGNORED_LABEL
            yield replace(trial, batch={**trial.batch, name: labels})


def _constant(value: Tensor) -> bool:
    kinds = value.dtype in _INTEGERS and value.dim() == 2
    return kinds and bool((value == value[:1, :1]).all())


class _RecordingDropout(LogicalDropout):
    """Logical dropout that records the shapes of its masks by part, module and turn."""

    def __init__(
        self, shapes: dict[Any, tuple[int, ...]], within: Any, unbatched: UnbatchedDraws
    ) -> None:
        super().__init__(0, self._note, unbatched)
        self.found, self.within = shapes, within

    def _note(self, site: str, call: int, shape: tuple[int, ...]) -> LogicalWindow | None:
        part = current_visit()
        self.found[(part.index if part else None, site, call)] = shape
        window: LogicalWindow | None = self.within(site, call, shape) if self.within else None
        return window


@contextmanager
def run_context(
    trial: Trial, draws: dict[Any, tuple[int, ...]], inner: Any = None
) -> Iterator[None]:
    """Context of a run: its modes, its scope and its random state; records draws in `draws`."""
    is_float64 = next(trial.model.parameters()).dtype == torch.float64
    modes: list[Any] = [Float64()] if is_float64 else []
    modes += [_RecordingDropout(draws, inner, trial.unbatched)] if trial.random else []
    rows = tuple(range(row_count(trial.batch)))
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(enter_modes(*modes))
        stack.enter_context(enter_scope(Scope(0, 0, rows)))
        yield


def run_forward(trial: Trial, model: nn.Module, batch: Mapping[str, Any]) -> tuple[Any, Tensor]:
    """Run the trial's model on a batch; return output and loss."""
    with run_context(trial, {}):
        output = run_model(model, batch)
        value = loss_of(output, batch, trial.loss)
    assert value is not None, "the model returns no loss"
    return output, value


def run_full(trial: Trial) -> RunResult:
    """Run full sequences in training, forward and backward."""
    model = trial.model
    draws: dict[Any, tuple[int, ...]] = {}
    model.zero_grad(set_to_none=True)
    TrainingMode(model).train()
    named_sites(model)
    with run_context(trial, draws):
        value = loss_of(run_model(model, trial.batch), trial.batch, trial.loss)
        assert value is not None, "the model returns no loss"
        torch.autograd.backward(value)
    return RunResult(value.detach(), gradients_of(model), draws)


def run_by_slices(trial: Trial, slicing: Slicing) -> RunResult:
    """Run the trial by slices, forward and backward."""
    model = trial.model
    draws: dict[Any, tuple[int, ...]] = {}
    model.zero_grad(set_to_none=True)
    slices = SliceRunner(model, slicing, trial.weight, lengths=lambda total, count: trial.lengths)
    try:
        with run_context(trial, draws, slicing.windows(None) if slicing.draws else None):
            value, _ = run_slices(slices, model, trial.batch, trial.loss)
    finally:
        slices.close()
    return RunResult(value, gradients_of(model), draws)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the parameters' gradients, by name."""
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


Outputs = dict[str, dict[int | None, Tensor]]  # by module, then by part; None: full sequence


@contextmanager
def record_outputs(model: nn.Module) -> Iterator[Outputs]:
    """Context that records the first output of every module for each part, innermost first."""
    recorded: Outputs = {}

    def note(name: str, module: nn.Module, args: Any, output: Any) -> None:
        first_output = output[0] if isinstance(output, tuple) and output else output
        if isinstance(first_output, Tensor) and first_output.is_floating_point():
            part = current_visit()
            by_part = recorded.setdefault(name, {})
            by_part.setdefault(None if part is None else part.index, first_output.detach())

    submodules = [(name, module) for name, module in model.named_modules() if name]
    with remove_hooks_after(
        module.register_forward_hook(partial(note, name)) for name, module in submodules
    ):
        yield recorded


def take_tokens(batch: Mapping[str, Any], total: int, indices: Tensor) -> dict[str, Any]:
    """Return the tokens with indices `indices` of a batch of `total` tokens."""

    def part(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() < 2:
            return value
        if value.dim() == 4 and value.shape[-1] == total:
            return value[:, :, indices][..., indices]
        if value.dim() == 3 and value.shape[1] != total and value.shape[2] == total:
            return value[..., indices]
        return value[:, indices] if value.shape[1] == total else value

    return {name: part(value) for name, value in batch.items()}
