"""Count which modules of tiny models of all kinds are replaced by kernels.

`python -m tests.kernel_survey [kind ...]` prints a line of JSON for each kind; `--sum FILE` adds up
such lines.  Kernels replace all modules that they match, in two rounds, because some exclude one
another.  Loss, outputs and gradients are compared with the original model's, for a full batch and
one with padded rows: this shows a module that was replaced although it computes something else.
"""

from __future__ import annotations

import copy
import inspect
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.kernels.probe import Mismatch
from schedlang.runtime.declined_calls import declined_in
from schedlang.runtime.float64 import Float64
from schedlang.runtime.kernel_injection.kernel import match, replace
from schedlang.runtime.kernel_injection.sdpa_attention import attention_name
from schedlang.runtime.lazy_logits.lazy import LazyLogits
from schedlang.runtime.modes import enter_modes
from tests import survey as causal
from tests.zoo_models.others import OTHER_MODELS

WORDS = {"norm": ("Norm",), "mlp": ("MLP", "Mlp", "FeedForward")}
IGNORED = -100
Results = dict[str, Tensor]
Batches = Sequence[dict[str, Any]]


def run_batches(model: nn.Module, batches: Batches) -> tuple[Results, bool]:
    """Loss, outputs and gradients of each batch, and whether no logits were computed."""
    tensors: Results = {}
    is_lazy = True
    for index, batch in enumerate(batches):
        model.zero_grad()
        torch.manual_seed(0)
        with enter_modes(Float64):
            output = model(**batch)
            output.loss.backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        is_lazy &= isinstance(output.logits, LazyLogits) and output.logits.computed is None
        logits = {} if isinstance(output.logits, LazyLogits) else {"logits": output.logits.detach()}
        tensors |= {
            f"{n} {index}": t for n, t in {"loss": output.loss.detach(), **logits, **grads}.items()
        }
    return tensors, is_lazy


def difference(actual: Results, expected: Results) -> float:
    """The largest relative difference of a tensor; one where a tensor is missing."""
    if {n for n in expected if "logits" not in n} != {n for n in actual if "logits" not in n}:
        return 1.0
    top = max(float(e.norm()) for n, e in expected.items() if "logits" not in n)
    return max(
        float((actual[n] - e).norm()) / (float(e.norm()) + 1e-3 * top)
        for n, e in expected.items()
        if n in actual
    )


class KernelMatches:
    """Matches of kernels, cached for modules of one class with the same numbers."""

    def __init__(self) -> None:
        self.known: dict[str, Any] = {}

    def asked(self, module: nn.Module, *kernels: str) -> Any:
        """The match of the first kernel that fits, or the last mismatch."""
        shapes = [tuple(p.shape) for p in module.parameters()]
        plain_values = [v for v in vars(module).values() if isinstance(v, int | float | str)]
        key = f"{kernels} {type(module).__name__} {shapes} {plain_values}"
        if key not in self.known:
            tried = (match(module, kernel) for kernel in kernels)
            match_result: Any = Mismatch("")
            for match_result in tried:
                if not isinstance(match_result, Mismatch):
                    break
            self.known[key] = match_result
        return self.known[key]


def candidates(model: nn.Module) -> dict[str, tuple[str, str]]:
    """Modules that kernels may match: name -> (role, class).

    Norms and MLPs are also found by the names of their classes, so that those that no kernel
    matches are reported.
    """
    by_name = {}
    for name, module in model.named_modules():
        kind = type(module).__name__
        own_parameters = list(module.parameters(recurse=False))
        if not list(module.parameters()) and "Norm" not in kind:
            continue
        if any(key in kind for key in WORDS["mlp"]):
            by_name[name] = ("mlp", kind)
        elif next(module.children(), None) is not None:
            continue  # a module with children is no norm itself
        elif any(key in kind for key in WORDS["norm"]) or (
            own_parameters and own_parameters[0].ndim == 1
        ):
            by_name[name] = ("norm", kind)
    return by_name


def replace_modules(model: nn.Module, fits: KernelMatches) -> dict[str, Any]:
    """Replace norms and gated MLPs; return what was replaced and what was not, by class."""
    replaced: Counter[str] = Counter()
    declined: dict[str, str] = {}
    for name, (role, kind) in candidates(model).items():
        module = model.get_submodule(name)
        fit = fits.asked(module, *(("rms_norm", "layer_norm") if role == "norm" else ("gated",)))
        if isinstance(fit, Mismatch):
            declined[f"{role} {kind}"] = f"{fit.reason}, {fit.error}"[:160]
        else:
            replace(module, fit)
            replaced[f"{role} {kind} {getattr(fit, 'kind', getattr(fit, 'act', ''))}"] += 1
    return {"replaced": dict(replaced), "not": declined}


def replace_with(
    model: nn.Module, kernel: str, fits: KernelMatches, is_wanted: Callable[[nn.Module], bool]
) -> dict[str, int]:
    """Replace wanted modules by one kernel; count those replaced, and the others by reason."""
    counts: Counter[str] = Counter()
    for module in [m for m in model.modules() if is_wanted(m)]:
        fit = fits.asked(module, kernel)
        counts[getattr(fit, "reason", "replaced")[:160]] += 1
        if not isinstance(fit, Mismatch):
            replace(module, fit)
    return dict(counts)


def is_named_attention(module: nn.Module) -> bool:
    """Whether a module is an attention that looks up its function by a name."""
    return attention_name(module) is not None and type(module).__name__.endswith("Attention")


def is_attention(module: nn.Module) -> bool:
    """Whether the class is named as an attention."""
    return type(module).__name__.endswith("Attention")


def is_experts(module: nn.Module) -> bool:
    """Whether a module holds stacked experts."""
    kinds = (nn.Conv1d, nn.Conv2d)
    parameters = module.parameters(recurse=False)
    return not isinstance(module, kinds) and any(p.ndim == 3 for p in parameters)


def holds_norms(module: nn.Module) -> bool:
    """Whether a child's class is named as a norm."""
    return any("norm" in type(child).__name__.lower() for child in module.children())


def survey(model: nn.Module, batches: Batches) -> dict[str, Any]:
    """Replace in two rounds; return what was replaced and the largest relative difference."""
    model.train()
    fits = KernelMatches()
    second = copy.deepcopy(model)
    with suppress(Exception):  # models without an eager form stay as they are
        second.set_attn_implementation("eager")  # type: ignore[operator]
    first_round = _first_round(model, batches, fits)
    second_round = _second_round(second, batches, fits)
    error = max(first_round.pop("error"), second_round.pop("error"))
    declined = Counter(first_round.pop("left"))
    declined.update(second_round.pop("left"))
    return (
        first_round | second_round | {"left": dict(declined), "error": error, "ok": error <= 1e-9}
    )


def _first_round(model: nn.Module, batches: Batches, fits: KernelMatches) -> dict[str, Any]:
    """FlexAttention, grouped experts, norms, gated MLPs and the head."""
    expected, _ = run_batches(copy.deepcopy(model), batches)
    report: dict[str, Any] = {
        "flex_attention": replace_with(model, "flex_attention", fits, is_named_attention),
        "grouped": replace_with(model, "grouped", fits, is_experts),
    }
    report |= replace_modules(model, fits)  # also norms inside attentions
    head: Any = None
    with suppress(Exception):  # some models have no head
        head = model.get_output_embeddings()  # type: ignore[operator]
    head_fit = match(head, "linear_cross_entropy") if head is not None else Mismatch("has no head")
    if not isinstance(head_fit, Mismatch):
        replace(head, head_fit)
    actual, waited = run_batches(model, batches)
    report["head"] = "fused" if waited else getattr(head_fit, "reason", "computed")
    return report | {"left": _declined_calls(model), "error": difference(actual, expected)}


def _second_round(model: nn.Module, batches: Batches, fits: KernelMatches) -> dict[str, Any]:
    """SDPA in place of eager attention, rotary embeddings, and additions with norms."""
    expected, _ = run_batches(copy.deepcopy(model), batches)
    eager = KernelMatches()  # the same modules attend otherwise here
    report = {
        "sdpa": replace_with(model, "sdpa", eager, is_named_attention),
        "rope": replace_with(model, "rope", eager, is_attention),
        "add_norm": replace_with(model, "add_norm", fits, holds_norms),
    }
    actual, _ = run_batches(model, batches)
    return report | {"left": _declined_calls(model), "error": difference(actual, expected)}


def _declined_calls(model: nn.Module) -> dict[str, int]:
    """Count modules whose calls a kernel declined, by kernel and reason."""
    return {
        f"{declined.kernel}: {declined.reason}"[:160]: len(declined.sites)
        for declined in declined_in(model)
    }


def make_model(kind: str) -> tuple[nn.Module, list[dict[str, Any]]]:
    """A model in float64, a full batch, and a padded one if the model takes a mask."""
    if kind in OTHER_MODELS:
        torch.manual_seed(0)
        model, batches = OTHER_MODELS[kind].make()
        return model.double(), [_double(batch) for batch in batches]
    try:
        model, batch = causal.tiny_model(kind, layers=2)
    except causal.NotTiny:  # some configurations describe more layers
        model, batch = causal.tiny_model(kind)
    return model, [batch, *_padded(model, batch)]


def _double(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: t.double() if t.is_floating_point() else t for n, t in batch.items()}


def _padded(model: nn.Module, batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the batch with padded rows, if the model takes it."""
    if "attention_mask" not in inspect.signature(model.forward).parameters:
        return
    mask = torch.ones_like(batch["input_ids"])
    mask[1, -5:] = 0
    labels = batch["labels"].masked_fill(mask == 0, IGNORED)
    padded = batch | {"labels": labels, "attention_mask": mask}
    with suppress(Exception), torch.no_grad(), enter_modes(Float64):
        model(**padded)
        yield padded


def survey_kind(kind: str) -> dict[str, Any]:
    """The survey of one kind as plain values, or why it is left out."""
    try:
        return {"kind": kind, **survey(*make_model(kind))}
    except Exception as error:  # a model that raises anything is left out
        message = f"{type(error).__name__}: {error}"
        return {"kind": kind, "left_out": " ".join(message.split())[:200]}


def summarize(lines: Sequence[str]) -> Iterator[str]:
    """Summarize lines of the survey: kinds and modules by kernel, reasons, errors."""
    rows = [json.loads(line) for line in lines]
    finished = [row for row in rows if "left_out" not in row]
    wrong_kinds = [row["kind"] for row in finished if not row["ok"]]
    yield f"{len(rows)} kinds, {len(finished)} tiny; wrong: {wrong_kinds or 'none'}"
    yield f"largest error {max(row['error'] for row in finished):.1e}"
    counts: dict[str, list[int]] = {
        module_kind: [
            sum(n for k, n in row["replaced"].items() if k.startswith(module_kind))
            for row in finished
        ]
        for module_kind in WORDS
    }
    kernels = ("flex_attention", "sdpa", "rope", "add_norm", "grouped")
    counts |= {kernel: [row[kernel].get("replaced", 0) for row in finished] for kernel in kernels}
    counts["head"] = [int(row["head"] == "fused") for row in finished]
    for name, numbers in counts.items():
        yield f"{name:15} {sum(n > 0 for n in numbers):4} kinds {sum(numbers):5} modules"
    reasons: dict[str, list[str]] = {}
    for row in finished:
        for name, reason in row["not"].items():
            reasons.setdefault(f"{name.split()[0]}: {reason}", []).append(row["kind"])
        for kernel in kernels:
            for reason in row[kernel].keys() - {"replaced"}:
                reasons.setdefault(f"{kernel}: {reason}", []).append(row["kind"])
        for reason in row["left"]:
            reasons.setdefault(f"calls left, {reason}", []).append(row["kind"])
    for reason, kinds in sorted(reasons.items(), key=lambda pair: -len(pair[1])):
        yield f"{len(kinds):3} {reason} | {' '.join(kinds)}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["--sum"]:
        print("\n".join(summarize(Path(sys.argv[2]).read_text().splitlines())))
        raise SystemExit
    for asked in sys.argv[1:] or dict.fromkeys([*causal.kinds(), *OTHER_MODELS]):
        print(json.dumps(survey_kind(asked)), flush=True)
