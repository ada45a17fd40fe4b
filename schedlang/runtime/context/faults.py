"""Why a model cannot be split by tokens: the module that gives some tokens something else."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.diagnostic import Diagnostic, Refusal
from schedlang.runtime import nests as pytree
from schedlang.runtime.context.seat import seated
from schedlang.runtime.context.tokens import Tokens
from schedlang.runtime.context.trial import layout_of, parted
from schedlang.runtime.parts import dotted
from schedlang.runtime.slicing.slice_trial import Trial, forward

MIXED = ("positions counted from shapes, and tokens mixed outside of the attentions that rows"
         " select, would be those of one rank only")  # fmt: skip
Outputs = dict[str, dict[int, Tensor]]


def fault(trial: Trial, tokens: Tokens, error: Exception, sites: Sequence[str]) -> Refusal:
    """The refusal of a model for which parts failed with `error` when run as `tokens` says."""
    if isinstance(error, Refusal):
        return error
    kind = type(trial.model).__name__
    whole, found = _Noting(), _Noting()
    handles = whole.on(trial.model)
    forward(trial, trial.model, trial.batch)
    for handle in handles:
        handle.remove()
    try:
        parted(trial, tokens, sites, found.on)
    except Refusal as refused:
        return refused
    except Exception as raised:  # the model's own code, on a part: whatever it raises
        said = f"{type(raised).__name__}: {raised}".splitlines()[0]
        window = _window(trial.model, list(whole.found))
        notes = (said, window) if window else (said,)
        return refusal(f"`{kind}` does not run on some tokens of a sequence", *notes)
    layout = layout_of(tokens.kind, trial.lengths)
    for name, outputs in whole.found.items():
        want, parts = outputs[-1], found.found.get(name, {})
        if want.dim() < 2 or want.shape[1] != layout.total or len(parts) != len(layout.runs):
            continue
        mine = [parts[k][:, : layout.counts[k]] for k in range(len(layout.runs))]
        fits = all(m.shape[1] == n for m, n in zip(mine, layout.counts))
        if not fits or not _near(layout.whole(mine, 1), want):
            return refusal(
                f"`{kind}` cannot be split by tokens",
                f"`{name}` computes a token differently than in the full sequence",
                _window(trial.model, upto(whole.found, name)) or MIXED,
            )
    return refusal(f"`{kind}` cannot be split by tokens", str(error))


def unrunnable(model: nn.Module, title: str, said: str) -> Refusal:
    """The refusal of a model that no trial can run, with what it said."""
    window = _window(model, [name for name, _ in model.named_modules() if name])
    if not window:
        return refusal(title, said)
    return refusal(f"`{type(model).__name__}` cannot be split by tokens", window, f"tried: {said}")


def upto(names: Iterable[str], last: str) -> list[str]:
    """The names up to one of them."""
    return list(itertools.takewhile(lambda name: name != last, names)) + [last]


def _window(model: nn.Module, names: Sequence[str]) -> str:
    """What the first of some modules that mixes neighbours does, if one does."""
    for name in names:
        module = model.get_submodule(name)
        wide = getattr(module, "kernel_size", 1)
        if any(n != 1 for n in (wide if isinstance(wide, tuple) else (wide,))):
            kind = type(module).__name__
            return (f"`{name}` is a `{kind}`: it mixes neighbouring tokens, and later modules"
                    " get no single token of the batch")  # fmt: skip
    return ""


def no_tokens(batch: Mapping[str, Any]) -> Refusal | None:
    """The refusal of a batch whose tokens arise inside of the model: images; None for others."""
    leaves, _ = pytree.tree_flatten_with_path(dict(batch))
    tensors = [(dotted(path), x) for path, x in leaves if isinstance(x, Tensor) and x.dim() > 1]
    if not tensors or any(x.dim() < 4 for _, x in tensors):
        return None
    name, value = tensors[0]
    return Refusal(
        Diagnostic(
            "S674", f"`context_parallel` finds no tokens in the batch: `{name}` is"
            f" {list(value.shape)}",
            notes=("the model itself makes tokens from patches of images, and may add a class"
                   " token",),
            helps=("split its rows: `zero(stage=0, over=cp)`",
                   "or its heads: `layers.*.{q,k,v}_proj  shard(col, over=cp)`, and `row` after",
                   "or a dim between modules: `shard(input=S(1), output=S(1), over=cp)`"),
        )
    )  # fmt: skip


def _near(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-6, atol=1e-9, equal_nan=True)


class _Noting:
    """The first output of every module, innermost first, by part; of the whole as part -1."""

    def __init__(self) -> None:
        self.found: Outputs = {}

    def on(self, model: nn.Module) -> list[Any]:
        """Hooks that note outputs."""

        def note(name: str) -> Any:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                first = output[0] if isinstance(output, tuple) and output else output
                if isinstance(first, Tensor) and first.is_floating_point():
                    seat = seated()
                    held = self.found.setdefault(name, {})
                    held.setdefault(-1 if seat is None else seat.place, first.detach())

            return hook

        named = [(name, module) for name, module in model.named_modules() if name]
        return [module.register_forward_hook(note(name)) for name, module in named]


def refusal(title: str, *notes: str) -> Refusal:
    """The model cannot be split by tokens."""
    return Refusal(
        Diagnostic(
            "S659", title, notes=notes,
            helps=("leave `context_parallel` out for this model",
                   "or select all its attentions: `layers.*.self_attn  context_parallel(...)`"),
        )
    )  # fmt: skip
