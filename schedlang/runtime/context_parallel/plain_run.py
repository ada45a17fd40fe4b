"""The model alone on some tokens of its sequences: whether it shows what our runs of it show.

Its attentions answer as in the full sequence, where they were noted; nothing of ours exchanges
keys, shards parts or carries labels, so that what these do wrong is not said of the model.
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

from schedlang.runtime.batch import called, loss_of
from schedlang.runtime.context_parallel.attention_products import PRODUCTS, Lines
from schedlang.runtime.modes import ambient
from schedlang.runtime.rng.logical_dropout import Alone, Still
from schedlang.runtime.sequence_pipelining.probe import lines_of
from schedlang.runtime.sequence_pipelining.trial import Trial, tokens_of

Outputs = dict[str, Tensor]


def depends_on_tokens(trial: Trial, sites: Sequence[str]) -> bool:
    """Return whether the model alone gives some tokens another result than in the full sequence.

    Attentions inside of the modules `sites` see the keys of all tokens, those elsewhere only their
    own.  True where it cannot be told, as for a model that does not run on some tokens.
    """
    products = bool(lines_of(trial, Lines))

    def same(*way: Any) -> bool:
        try:
            return _same(trial, sites, products, *way)
        except Exception:  # whatever the model raises
            return False

    return not any(same(*way) for way in itertools.product((True, False), (0, 1), (True, False)))


def runs(trial: Trial) -> bool:
    """Return whether the model alone takes the trial's batch, and one of a token less."""
    total = sum(trial.lengths)
    try:
        for length in (total, total - 1):
            _ran(trial, tokens_of(trial.batch, total, torch.arange(length)), _Model())
    except Exception:  # whatever the model raises
        return False
    return True


def _same(
    trial: Trial, sites: Sequence[str], products: bool, counted: bool, more: int, labels: bool
) -> bool:
    """Return whether every module gives each part what it gives those tokens, and the losses make
    one.

    `counted`: positions that are counted from shapes are those of the tokens.  `more`: tokens by
    which parts overlap, for a model that moves its labels.  `labels`: count them here.
    """
    total = sum(trial.lengths)
    stops = list(itertools.accumulate(trial.lengths))
    noted = _Answers(products, total)
    want, whole = _ran(trial, trial.batch, noted, sites)
    weights, losses = [], []
    for a, b in zip([0, *stops], stops):
        held = torch.arange(a, min(b + more, total))
        part = tokens_of(trial.batch, total, held)
        if "position_ids" in inspect.signature(trial.model.forward).parameters:
            part.setdefault("position_ids", held.unsqueeze(0))
        tables = [*trial.model.parameters(), *trial.model.buffers()] if counted else []
        weights.append(_counted(trial, part, more) if labels else trial.weight(part))
        if not weights[-1]:
            losses.append(whole * 0)
            continue
        answers = _Answers(products, total, noted.noted, held, tables if counted else None)
        got, loss = _ran(trial, part, answers, sites)
        losses.append(loss)
        by_token = {k: v[:, held] for k, v in want.items() if v.dim() > 1 and v.shape[1] == total}
        if any(name not in got or not _near(got[name], by_token[name]) for name in by_token):
            return False
    shares = [loss * (weight / (sum(weights) or 1.0)) for loss, weight in zip(losses, weights)]
    return _near(torch.stack(shares).sum(), whole)


def _counted(trial: Trial, part: Mapping[str, Any], more: int) -> float:
    """The labels of a part that count; its tokens where there are none."""
    from schedlang.runtime.sequence_pipelining.slices import length_of

    if trial.rule is None:
        return float(length_of(part))
    labels: Tensor = part[trial.rule.source][:, more:]
    return float((labels != trial.rule.ignore_index).sum())


def _near(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are as near as few roundings to float32 leave them, by their
    size."""
    if a.shape != b.shape:
        return False
    gate = 1e-5 if b.dtype == torch.float64 else 1e-3
    return bool((a - b).norm() <= gate * b.norm() + 1e-12)


class _Model(Alone):
    """The model runs alone; `inside` counts the modules with rows of context parallelism around."""

    def __init__(self) -> None:
        super().__init__(Still())
        self.inside = 0


def _ran(
    trial: Trial, batch: Mapping[str, Any], mode: _Model, sites: Sequence[str] = ()
) -> tuple[Outputs, Tensor]:
    """The last output of every module in training, and the loss."""
    found: Outputs = {}
    model = copy.deepcopy(trial.model).train()

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) and output else output
            if isinstance(first, Tensor) and first.is_floating_point():
                found[name] = first.detach()

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
    with torch.random.fork_rng(devices=[]), torch.no_grad(), ambient(mode):
        torch.manual_seed(0)
        given = dict(batch)
        loss = loss_of(called(model, given), given, trial.loss)
    assert loss is not None, "the model returns no loss"
    return found, loss.detach()


class _Answers(_Model):
    """Attentions of the whole are noted; those of a part answer with what was noted.

    Only those inside of modules with rows: others see the keys of their part alone.

    With `tables`, shapes that count the tokens held count those: `arange`, and slices of these.
    """

    def __init__(
        self,
        products: bool,
        total: int,
        noted: list[Tensor] | None = None,
        held: Tensor | None = None,
        tables: list[Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.products, self.count = products, total if held is None else len(held)
        self.held, self.calls = held, 0
        self.noted: list[Tensor] = [] if noted is None else noted
        self.counts = tables is not None
        self.shapes = {(tuple(t.shape), t.dtype) for t in tables or ()}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if self._attends(func, args):
            return self._answer(func, args, kwargs)
        if self.counts and self.held is not None:
            if func is torch.arange and args in ((self.count,), (0, self.count)):
                kwargs = {k: v for k, v in kwargs.items() if k in ("dtype", "device")}
                return self.held.to(**kwargs)
            if func is Tensor.__getitem__ and self._known(args[0]):
                return self._taken(*args)
        return super().__torch_function__(func, types, args, kwargs)

    def _attends(self, func: Any, args: Any) -> bool:
        if not self.inside:
            return False
        if func is F.scaled_dot_product_attention:
            return True
        if not self.products or func not in PRODUCTS:
            return False
        shape = args[0].shape
        return len(shape) > 2 and tuple(shape[-2:]) == (self.count, self.count)

    def _answer(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        if self.held is None:
            made: Tensor = super().__torch_function__(func, (), args, kwargs)
            self.noted.append(made)
            return made
        self.calls += 1
        return self.noted[self.calls - 1][..., self.held, :]

    def _known(self, value: Tensor) -> bool:
        """Return whether it is a parameter or buffer."""
        return (tuple(value.shape), value.dtype) in self.shapes

    def _taken(self, value: Tensor, key: Any) -> Tensor:
        """Take from a whole value the places of the tokens here, for a slice from 0 to their
        number."""
        assert self.held is not None
        keys = list(key) if isinstance(key, tuple) else [key]
        for place, one in enumerate(keys):
            first = isinstance(one, slice) and one.start in (None, 0) and one.step is None
            if first and one.stop == self.count and all(isinstance(k, slice) for k in keys[:place]):
                value, keys[place] = value.index_select(place, self.held), slice(None)
        return value[tuple(keys)]
