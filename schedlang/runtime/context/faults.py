"""Why a model cannot be split by tokens: the module that gives some tokens something else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.diagnostic import Diagnostic, Refusal
from schedlang.runtime.context.seat import seated
from schedlang.runtime.context.tokens import Tokens
from schedlang.runtime.context.trial import layout_of, parted
from schedlang.runtime.slice_trial import Trial, forward

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
        return refusal(f"`{kind}` does not run on some tokens of a sequence", said)
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
                f"`{name}` gives a token something else than it gives within the sequence",
                "positions that it counts by shapes, or tokens that it mixes by other means than "
                "the attentions that rows name, are those of one rank only",
            )
    return refusal(f"`{kind}` cannot be split by tokens", str(error))


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
                   "or name all its attentions: `layers.*.self_attn  context_parallel(...)`"),
        )
    )  # fmt: skip
