"""Every causal language model of transformers, tiny: which of its modules kernels replace.

`python -m tests.kernel_survey [kind ...]` prints a line of JSON for each.  All kernels that fit are
put in at once, and loss and gradients are compared with the untouched model's: a module that was
replaced although it computes something else would show.
"""

from __future__ import annotations

import copy
import json
import sys
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.kernels.probe import Mismatch
from schedlang.runtime.float64 import Float64
from schedlang.runtime.logits.lazy_logits import LazyLogits
from schedlang.runtime.modes import ambient
from schedlang.runtime.replacing.attention import implementation
from schedlang.runtime.replacing.kernel import match, replace
from tests.survey import kinds, ready

WORDS = {"norm": ("Norm",), "mlp": ("MLP", "Mlp", "FeedForward")}
Results = dict[str, Tensor]


def results(model: nn.Module, batch: dict[str, Any]) -> tuple[Results, bool]:
    """Loss and gradients, and whether the loss was computed without logits."""
    model.zero_grad()
    torch.manual_seed(0)
    with ambient(Float64):
        out = model(**batch)
        out.loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    waited = isinstance(out.logits, LazyLogits) and out.logits.real is None
    return {"loss": out.loss.detach(), **found}, waited


def candidates(model: nn.Module) -> dict[str, tuple[str, str]]:
    """Modules that kernels may fit: name -> (what it looks like, its class).

    Those of a linear layer are left to their module; a norm or MLP is also looked for by its name,
    so that what is not replaced can be told.
    """
    found = {}
    for name, module in model.named_modules():
        kind = type(module).__name__
        own = list(module.parameters(recurse=False))
        if not list(module.parameters()) and "Norm" not in kind:
            continue
        if any(word in kind for word in WORDS["mlp"]):
            found[name] = ("mlp", kind)
        elif any(word in kind for word in WORDS["norm"]) or (own and own[0].ndim == 1):
            found[name] = ("norm", kind)
    return found


def fitting(module: nn.Module, looks: str) -> Any:
    """The first kernel that fits, or the last reason why none does."""
    found: Any = None
    for kernel in ("rms_norm", "layer_norm") if looks == "norm" else ("gated",):
        found = match(module, kernel)
        if not isinstance(found, Mismatch):
            return found
    return found


def put_in(model: nn.Module) -> dict[str, Any]:
    """Replace all that fits in a model; what was replaced, and what was not, by class."""
    known: dict[str, Any] = {}
    done: Counter[str] = Counter()
    not_done: dict[str, str] = {}
    for name, (looks, kind) in candidates(model).items():
        module = model.get_submodule(name)
        shapes = [tuple(p.shape) for p in module.parameters()]
        key = f"{kind} {shapes} {[v for v in vars(module).values() if isinstance(v, int | float)]}"
        found = known.setdefault(key, None) or fitting(module, looks)
        known[key] = found
        if isinstance(found, Mismatch):
            not_done[f"{looks} {kind}"] = f"{found.reason}, {found.error}"[:160]
        else:
            replace(module, found)
            done[f"{looks} {kind} {getattr(found, 'kind', getattr(found, 'act', ''))}"] += 1
    return {"replaced": dict(done), "not": not_done}


def attending(model: nn.Module) -> dict[str, int]:
    """Attentions of the classes that one takes over, and those left, with the reason."""
    found: Counter[str] = Counter()
    for name, module in model.named_modules():
        if implementation(module) is None or not type(module).__name__.endswith("Attention"):
            continue
        fits = match(module, "flex_attention")
        found[getattr(fits, "reason", "replaced")[:160]] += 1
        if not isinstance(fits, Mismatch):
            replace(model.get_submodule(name), fits)
    return dict(found)


def mixing(model: nn.Module) -> dict[str, int]:
    """Modules of experts that grouped products take over, and those left, with the reason."""
    found: Counter[str] = Counter()
    for module in model.modules():
        if not any(p.ndim == 3 for p in module.parameters(recurse=False)):
            continue
        fits = match(module, "grouped")
        found[getattr(fits, "reason", "replaced")[:160]] += 1
        if not isinstance(fits, Mismatch):
            replace(module, fits)
    return dict(found)


def survey(model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    """What was replaced, and the largest relative difference of a gradient."""
    model.train()
    expected, _ = results(copy.deepcopy(model), batch)
    made: dict[str, Any] = {"attention": attending(model), "experts": mixing(model)}
    made |= put_in(model)  # norms inside of attentions, too
    head = model.get_output_embeddings()  # type: ignore[operator]
    found = match(head, "linear_cross_entropy") if head is not None else Mismatch("has no head")
    if not isinstance(found, Mismatch):
        replace(head, found)
    seen, waited = results(model, batch)
    made["head"] = "fused" if waited else getattr(found, "reason", "computed")
    top = max(float(e.norm()) for e in expected.values())
    same = seen.keys() == expected.keys()
    made["error"] = max(
        float((seen[n] - e).norm()) / (float(e.norm()) + 1e-3 * top) if n in seen else 1.0
        for n, e in expected.items()
    )
    return made | {"ok": same and made["error"] <= 1e-9}


def answer(kind: str) -> dict[str, Any]:
    """The outcome as plain values."""
    try:
        return {"kind": kind, **survey(*ready(kind, layers=2))}
    except Exception as error:  # whatever a model raises: it is out of the survey
        said = f"{type(error).__name__}: {error}"
        return {"kind": kind, "left_out": " ".join(said.split())[:200]}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for asked in sys.argv[1:] or kinds():
        print(json.dumps(answer(asked)), flush=True)
