"""Run of the model alone on some tokens of its sequences: is a fault the model's, or schedlang's?

Its attentions return the results that were recorded for the full sequence.  No code of schedlang
exchanges keys, splits batches or shifts labels here, so errors of that code are not blamed on the
model.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from schedlang.runtime.batch import loss_of, run_model
from schedlang.runtime.context_parallel.attention_products import PRODUCTS, ProductLines
from schedlang.runtime.modes import enter_modes
from schedlang.runtime.rng.logical_dropout import ConstantDraws, SourceMode
from schedlang.runtime.sequence_pipelining.probe import find_lines
from schedlang.runtime.sequence_pipelining.slices import sequence_length
from schedlang.runtime.sequence_pipelining.trial import Trial, take_tokens

Outputs = dict[str, Tensor]


def is_model_fault(trial: Trial, sites: Sequence[str]) -> bool:
    """Return whether the model alone computes some tokens differently than in the full sequence.

    Attentions inside of the modules `sites` see the keys of all tokens, others only those of their
    chunk.  True if this is not known, e.g. for a model that does not run on some tokens.
    """
    products = bool(find_lines(trial, ProductLines))

    def same(*options: Any) -> bool:
        try:
            return _same_on_chunks(trial, sites, products, *options)
        except Exception:  # the model's own code may raise anything
            return False

    options = itertools.product((True, False), (0, 1), (True, False))
    return not any(same(*option) for option in options)


def can_run(trial: Trial) -> bool:
    """Return whether the model alone accepts the trial's batch, and one with one token less."""
    total = sum(trial.lengths)
    try:
        for length in (total, total - 1):
            _run(trial, take_tokens(trial.batch, total, torch.arange(length)), _Model())
    except Exception:  # the model's own code may raise anything
        return False
    return True


def _same_on_chunks(
    trial: Trial, sites: Sequence[str], products: bool, counts: bool, extra: int, labels: bool
) -> bool:
    """Return whether all modules, and the weighted losses, agree with the full sequence on chunks.

    counted  positions that are counted from shapes are replaced with those of the chunk's tokens
    more     tokens by which chunks overlap, for a model that shifts its labels
    labels   weight the losses by the labels that count, instead of the trial's weights
    """
    total = sum(trial.lengths)
    stops = list(itertools.accumulate(trial.lengths))
    source = _AttentionReplay(products, total)
    full, full_loss = _run(trial, trial.batch, source, sites)
    weights, losses = [], []
    for a, b in zip([0, *stops], stops):
        tokens = torch.arange(a, min(b + extra, total))
        part = take_tokens(trial.batch, total, tokens)
        if "position_ids" in inspect.signature(trial.model.forward).parameters:
            part.setdefault("position_ids", tokens.unsqueeze(0))
        tables = [*trial.model.parameters(), *trial.model.buffers()] if counts else []
        weights.append(_count_labels(trial, part, extra) if labels else trial.weight(part))
        if not weights[-1]:
            losses.append(full_loss * 0)
            continue
        replay = _AttentionReplay(products, total, source.noted, tokens, tables if counts else None)
        actual, loss = _run(trial, part, replay, sites)
        losses.append(loss)
        by_token = {k: v[:, tokens] for k, v in full.items() if v.dim() > 1 and v.shape[1] == total}
        if any(
            name not in actual or not _is_close(actual[name], by_token[name]) for name in by_token
        ):
            return False
    shares = [loss * (weight / (sum(weights) or 1.0)) for loss, weight in zip(losses, weights)]
    return _is_close(torch.stack(shares).sum(), full_loss)


def _count_labels(trial: Trial, part: Mapping[str, Any], extra: int) -> float:
    """Return how many labels of a chunk count; its tokens if there are no labels."""
    if trial.rule is None:
        return float(sequence_length(part))
    labels: Tensor = part[trial.rule.source][:, extra:]
    return float((labels != trial.rule.ignore_index).sum())


def _is_close(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors differ by no more than a few roundings to float32."""
    if a.shape != b.shape:
        return False
    gate = 1e-5 if b.dtype == torch.float64 else 1e-3
    return bool((a - b).norm() <= gate * b.norm() + 1e-12)


class _Model(SourceMode):
    """Mode in which the model runs alone; `inside` counts the enclosing modules of `sites`."""

    def __init__(self) -> None:
        super().__init__(ConstantDraws())
        self.inside = 0


def _run(
    trial: Trial, batch: Mapping[str, Any], mode: _Model, sites: Sequence[str] = ()
) -> tuple[Outputs, Tensor]:
    """Run a copy in training mode; return the last output of every module, and the loss."""
    outputs: Outputs = {}
    model = copy.deepcopy(trial.model).train()

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            main_output = output[0] if isinstance(output, tuple) and output else output
            if isinstance(main_output, Tensor) and main_output.is_floating_point():
                outputs[name] = main_output.detach()

        return hook

    def enter(*call: Any) -> None:
        mode.inside += 1

    def leave(*call: Any) -> None:
        mode.inside -= 1

    for name, module in model.named_modules():
        module.register_forward_hook(note(name))
        if name in sites:
            module.register_forward_pre_hook(enter)
            module.register_forward_hook(leave)
    with torch.random.fork_rng(devices=[]), torch.no_grad(), enter_modes(mode):
        torch.manual_seed(0)
        inputs = dict(batch)
        loss = loss_of(run_model(model, inputs), inputs, trial.loss)
    assert loss is not None, "the model returns no loss"
    return outputs, loss.detach()


class _AttentionReplay(_Model):
    """Mode that records the attentions of the full sequence, or replays them for a chunk.

    Only attentions inside of modules of `sites`; others see the keys of their chunk.

    held    the indices of the chunk's tokens; None: record the full sequence
    tables  parameters and buffers: `arange`, and slices of these from 0 to the number of tokens,
            give the positions of the chunk's tokens
    """

    def __init__(
        self,
        products: bool,
        total: int,
        recorded: list[Tensor] | None = None,
        held_tokens: Tensor | None = None,
        tables: list[Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.products, self.count = products, total if held_tokens is None else len(held_tokens)
        self.held, self.calls = held_tokens, 0
        self.noted: list[Tensor] = [] if recorded is None else recorded
        self.counts = tables is not None
        self.shapes = {(tuple(t.shape), t.dtype) for t in tables or ()}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if self._is_attention(func, args):
            return self._replay(func, args, kwargs)
        if self.counts and self.held is not None:
            if func is torch.arange and args in ((self.count,), (0, self.count)):
                kwargs = {k: v for k, v in kwargs.items() if k in ("dtype", "device")}
                return self.held.to(**kwargs)
            if func is Tensor.__getitem__ and self._is_table(args[0]):
                return self._take_positions(*args)
        return super().__torch_function__(func, types, args, kwargs)

    def _is_attention(self, func: Any, args: Any) -> bool:
        if not self.inside:
            return False
        if func is F.scaled_dot_product_attention:
            return True
        if not self.products or func not in PRODUCTS:
            return False
        shape = args[0].shape
        return len(shape) > 2 and tuple(shape[-2:]) == (self.count, self.count)

    def _replay(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        if self.held is None:
            result: Tensor = super().__torch_function__(func, (), args, kwargs)
            self.noted.append(result)
            return result
        self.calls += 1
        return self.noted[self.calls - 1][..., self.held, :]

    def _is_table(self, value: Tensor) -> bool:
        """Return whether a tensor has the form of one of `tables`."""
        return (tuple(value.shape), value.dtype) in self.shapes

    def _take_positions(self, value: Tensor, key: Any) -> Tensor:
        """Index a table; a slice from 0 to the number of tokens takes the chunk's positions."""
        assert self.held is not None
        keys = list(key) if isinstance(key, tuple) else [key]
        for dim, item in enumerate(keys):
            starts = isinstance(item, slice) and item.start in (None, 0) and item.step is None
            if starts and item.stop == self.count and all(isinstance(k, slice) for k in keys[:dim]):
                value, keys[dim] = value.index_select(dim, self.held), slice(None)
        return value[tuple(keys)]
