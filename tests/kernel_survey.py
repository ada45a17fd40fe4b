"""Every model of the table of models, tiny: which of its modules kernels replace.

`python -m tests.kernel_survey [kind ...]` prints a line of JSON for each; `--sum FILE` counts what
stands in such lines.  Kernels are put in wherever they fit, in two rounds, since some take one
another's place, and loss, outputs and gradients are compared with the untouched model's, for a
batch that is full and one whose rows end early: a module that was replaced although it computes
something else would show.
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
from tests.zoo_models.others import OTHERS

WORDS = {"norm": ("Norm",), "mlp": ("MLP", "Mlp", "FeedForward")}
IGNORED = -100
Results = dict[str, Tensor]
Batches = Sequence[dict[str, Any]]


def results(model: nn.Module, batches: Batches) -> tuple[Results, bool]:
    """Loss, outputs and gradients of each batch, and whether no logits were computed."""
    found: Results = {}
    waited = True
    for index, batch in enumerate(batches):
        model.zero_grad()
        torch.manual_seed(0)
        with enter_modes(Float64):
            out = model(**batch)
            out.loss.backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        waited &= isinstance(out.logits, LazyLogits) and out.logits.computed is None
        shown = {} if isinstance(out.logits, LazyLogits) else {"logits": out.logits.detach()}
        found |= {
            f"{n} {index}": t for n, t in {"loss": out.loss.detach(), **shown, **grads}.items()
        }
    return found, waited


def difference(found: Results, expected: Results) -> float:
    """The largest relative difference of a tensor; one where a tensor is missing."""
    if {n for n in expected if "logits" not in n} != {n for n in found if "logits" not in n}:
        return 1.0
    top = max(float(e.norm()) for n, e in expected.items() if "logits" not in n)
    return max(
        float((found[n] - e).norm()) / (float(e.norm()) + 1e-3 * top)
        for n, e in expected.items()
        if n in found
    )


class Fits:
    """What kernels say of modules, asked once for modules of a class with the same numbers."""

    def __init__(self) -> None:
        self.known: dict[str, Any] = {}

    def asked(self, module: nn.Module, *kernels: str) -> Any:
        """What the first kernel that fits found, or the last reason why none does."""
        shapes = [tuple(p.shape) for p in module.parameters()]
        plain = [v for v in vars(module).values() if isinstance(v, int | float | str)]
        key = f"{kernels} {type(module).__name__} {shapes} {plain}"
        if key not in self.known:
            tried = (match(module, kernel) for kernel in kernels)
            found: Any = Mismatch("")
            for found in tried:
                if not isinstance(found, Mismatch):
                    break
            self.known[key] = found
        return self.known[key]


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
        elif next(module.children(), None) is not None:
            continue  # what holds modules is no norm itself
        elif any(word in kind for word in WORDS["norm"]) or (own and own[0].ndim == 1):
            found[name] = ("norm", kind)
    return found


def put_in(model: nn.Module, fits: Fits) -> dict[str, Any]:
    """Replace norms and gated MLPs; what was replaced, and what was not, by class."""
    done: Counter[str] = Counter()
    not_done: dict[str, str] = {}
    for name, (looks, kind) in candidates(model).items():
        module = model.get_submodule(name)
        found = fits.asked(module, *(("rms_norm", "layer_norm") if looks == "norm" else ("gated",)))
        if isinstance(found, Mismatch):
            not_done[f"{looks} {kind}"] = f"{found.reason}, {found.error}"[:160]
        else:
            replace(module, found)
            done[f"{looks} {kind} {getattr(found, 'kind', getattr(found, 'act', ''))}"] += 1
    return {"replaced": dict(done), "not": not_done}


def placed(
    model: nn.Module, kernel: str, fits: Fits, wanted: Callable[[nn.Module], bool]
) -> dict[str, int]:
    """Modules that one kernel takes, of those wanted, and those left, with the reason."""
    found: Counter[str] = Counter()
    for module in [m for m in model.modules() if wanted(m)]:
        fit = fits.asked(module, kernel)
        found[getattr(fit, "reason", "replaced")[:160]] += 1
        if not isinstance(fit, Mismatch):
            replace(module, fit)
    return dict(found)


def attends(module: nn.Module) -> bool:
    """An attention that may look up its function by a name."""
    return attention_name(module) is not None and type(module).__name__.endswith("Attention")


def is_attention(module: nn.Module) -> bool:
    """An attention by its class's name."""
    return type(module).__name__.endswith("Attention")


def mixes(module: nn.Module) -> bool:
    """A module of experts."""
    kinds = (nn.Conv1d, nn.Conv2d)
    own = module.parameters(recurse=False)
    return not isinstance(module, kinds) and any(p.ndim == 3 for p in own)


def holds_norms(module: nn.Module) -> bool:
    """A module with a child that is called a norm."""
    return any("norm" in type(child).__name__.lower() for child in module.children())


def survey(model: nn.Module, batches: Batches) -> dict[str, Any]:
    """What was replaced, and the largest relative difference of a tensor, in two rounds."""
    model.train()
    fits = Fits()
    second = copy.deepcopy(model)
    with suppress(Exception):  # what has no such form stays as it is
        second.set_attn_implementation("eager")  # type: ignore[operator]
    made = _first(model, batches, fits)
    more = _second(second, batches, fits)
    error = max(made.pop("error"), more.pop("error"))
    left = Counter(made.pop("left"))
    left.update(more.pop("left"))
    return made | more | {"left": dict(left), "error": error, "ok": error <= 1e-9}


def _first(model: nn.Module, batches: Batches, fits: Fits) -> dict[str, Any]:
    """FlexAttention, grouped experts, norms, gated MLPs and the head."""
    expected, _ = results(copy.deepcopy(model), batches)
    made: dict[str, Any] = {
        "flex_attention": placed(model, "flex_attention", fits, attends),
        "grouped": placed(model, "grouped", fits, mixes),
    }
    made |= put_in(model, fits)  # norms inside of attentions, too
    head: Any = None
    with suppress(Exception):  # of models that have none
        head = model.get_output_embeddings()  # type: ignore[operator]
    found = match(head, "linear_cross_entropy") if head is not None else Mismatch("has no head")
    if not isinstance(found, Mismatch):
        replace(head, found)
    seen, waited = results(model, batches)
    made["head"] = "fused" if waited else getattr(found, "reason", "computed")
    return made | {"left": _left(model), "error": difference(seen, expected)}


def _second(model: nn.Module, batches: Batches, fits: Fits) -> dict[str, Any]:
    """torch's own attention in place of eager, rotations, and sums with norms."""
    expected, _ = results(copy.deepcopy(model), batches)
    eager = Fits()  # the same modules attend otherwise here
    made = {
        "sdpa": placed(model, "sdpa", eager, attends),
        "rope": placed(model, "rope", eager, is_attention),
        "add_norm": placed(model, "add_norm", fits, holds_norms),
    }
    seen, _ = results(model, batches)
    return made | {"left": _left(model), "error": difference(seen, expected)}


def _left(model: nn.Module) -> dict[str, int]:
    """Modules of which calls were left to them, by kernel and reason."""
    return {f"{one.kernel}: {one.reason}"[:160]: len(one.sites) for one in declined_in(model)}


def ready(kind: str) -> tuple[nn.Module, list[dict[str, Any]]]:
    """A model in float64, and a full batch and, of those that take a mask, a padded one."""
    if kind in OTHERS:
        torch.manual_seed(0)
        model, batches = OTHERS[kind].make()
        return model.double(), [_double(batch) for batch in batches]
    try:
        model, batch = causal.ready(kind, layers=2)
    except causal.NotTiny:  # some configurations say of more layers what they are
        model, batch = causal.ready(kind)
    return model, [batch, *_padded(model, batch)]


def _double(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: t.double() if t.is_floating_point() else t for n, t in batch.items()}


def _padded(model: nn.Module, batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The batch with rows that end early."""
    if "attention_mask" not in inspect.signature(model.forward).parameters:
        return
    mask = torch.ones_like(batch["input_ids"])
    mask[1, -5:] = 0
    labels = batch["labels"].masked_fill(mask == 0, IGNORED)
    given = batch | {"labels": labels, "attention_mask": mask}
    with suppress(Exception), torch.no_grad(), enter_modes(Float64):
        model(**given)
        yield given


def answer(kind: str) -> dict[str, Any]:
    """The outcome as plain values."""
    try:
        return {"kind": kind, **survey(*ready(kind))}
    except Exception as error:  # whatever a model raises: it is out of the survey
        said = f"{type(error).__name__}: {error}"
        return {"kind": kind, "left_out": " ".join(said.split())[:200]}


def told(lines: Sequence[str]) -> Iterator[str]:
    """Of lines of this survey: kinds and modules by kernel, reasons, and what was wrong."""
    rows = [json.loads(line) for line in lines]
    got = [row for row in rows if "left_out" not in row]
    wrong = [row["kind"] for row in got if not row["ok"]]
    yield f"{len(rows)} kinds, {len(got)} tiny; wrong: {wrong or 'none'}"
    yield f"largest error {max(row['error'] for row in got):.1e}"
    counts: dict[str, list[int]] = {
        word: [sum(n for k, n in row["replaced"].items() if k.startswith(word)) for row in got]
        for word in WORDS
    }
    kernels = ("flex_attention", "sdpa", "rope", "add_norm", "grouped")
    counts |= {kernel: [row[kernel].get("replaced", 0) for row in got] for kernel in kernels}
    counts["head"] = [int(row["head"] == "fused") for row in got]
    for name, each in counts.items():
        yield f"{name:15} {sum(n > 0 for n in each):4} kinds {sum(each):5} modules"
    reasons: dict[str, list[str]] = {}
    for row in got:
        for name, why in row["not"].items():
            reasons.setdefault(f"{name.split()[0]}: {why}", []).append(row["kind"])
        for kernel in kernels:
            for why in row[kernel].keys() - {"replaced"}:
                reasons.setdefault(f"{kernel}: {why}", []).append(row["kind"])
        for why in row["left"]:
            reasons.setdefault(f"calls left, {why}", []).append(row["kind"])
    for why, kinds in sorted(reasons.items(), key=lambda pair: -len(pair[1])):
        yield f"{len(kinds):3} {why} | {' '.join(kinds)}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["--sum"]:
        print("\n".join(told(Path(sys.argv[2]).read_text().splitlines())))
        raise SystemExit
    for asked in sys.argv[1:] or dict.fromkeys([*causal.kinds(), *OTHERS]):
        print(json.dumps(answer(asked)), flush=True)
