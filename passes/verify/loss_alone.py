"""Try a loss function alone, for a model that is too large to be tried with it.

Its outputs are random, of the shapes that the model returns. Whatever a model computes for a row,
the weighted losses of the parts of a batch must make the loss of the batch, and so must the
gradients of the outputs. What is a loss function's own is found so: a sum, statistics of the batch,
pairs of rows, a mean over another count than the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir import pytree
from schedlang.ir.module_copies import copy_module
from schedlang.ir.plan import Plan
from schedlang.passes.analyze.prepare import Prepared
from schedlang.passes.propagate.batch_refusals import HELPS_WEIGHT, part_refusal
from schedlang.passes.propagate.loss_sums import is_statistics_relaxed
from schedlang.passes.propagate.original_forward import weight_of
from schedlang.passes.verify.compare import RTOL
from schedlang.passes.verify.original import repeat_first_rows, returned_loss
from schedlang.passes.verify.proof_case import Case, copy_original
from schedlang.runtime.batch import BatchPart, named_tensors, row_count, run_model, split_batch
from schedlang.runtime.device import generators_restored
from schedlang.runtime.global_state import restore_global_state
from schedlang.runtime.label_means import scaled_means, with_means
from schedlang.runtime.modes import enter_modes
from schedlang.runtime.rng.logical_dropout import RowDraws, SourceMode
from schedlang.runtime.row_lists import describe_number_lists
from schedlang.runtime.tracing.meta_runs import meta_model, without_values
from schedlang.runtime.training_mode import TrainingMode

if TYPE_CHECKING:
    from schedlang.passes.verify.probe import Probe

Loss = Callable[[Any, Mapping[str, Any]], Tensor]
Batch = Mapping[str, Any]
LARGEST = 10**7  # elements of an output that are tried
TOLERANCE = 1e-3  # of a loss in float32, and of its gradients
_BOUNDS = 0.05, 0.95  # of outputs: legal as scores and as probabilities


def check_loss_alone(
    plan: Plan, batch: Batch, ready: Prepared, loss: Loss | None, weight: Any
) -> None:
    """Refuse (S703) a loss function whose weighted losses of parts are not that of the batch.

    Nothing is refused where that is unknown: the loss draws, communicates or fails on random
    outputs, or the model has outputs without rows.
    """
    splits_rows = plan.shares * plan.micro > 1 and not (plan.row_gathers or plan.contexts)
    if loss is None or not splits_rows or ready.slicing or is_statistics_relaxed(plan):
        return
    if any(tensor.is_meta for tensor in named_tensors(batch).values()):
        return
    try:
        with restore_global_state(plan.model.model, loss), generators_restored():
            difference = _first_difference(plan, batch, ready, loss, weight)
    except Exception:  # of the model, the loss or the weight, on these outputs or parts
        return
    if difference:
        raise Refusal.of(
            "S703",
            "splitting the batch changes this loss",
            notes=(
                f"`loss` alone, on random outputs: {difference}",
                "a sum over rows, statistics of the batch and pairs of rows would differ by rank",
                *describe_number_lists(batch, row_count(batch)),
            ),
            helps=HELPS_WEIGHT,
        )


def _first_difference(plan: Plan, batch: Batch, ready: Prepared, loss: Loss, weight: Any) -> str:
    """Return how the weighted parts differ from the batch; "" if they do not, or it is unknown."""
    weigh = weight or weight_of(ready.traced, plan.shares * plan.micro)
    row_parts = [part.rows for part in _parts(plan, batch)]
    outputs = _random_outputs(plan, batch, _parts(plan, batch)[0])
    for tried in (batch, repeat_first_rows(batch, row_parts)) if outputs is not None else ():
        if tried is not None and outputs is not None:
            parts = with_means(weigh, _parts(plan, tried))
            weights = [float(weigh(part.inputs)) for part in parts]
            with _NoCollectives():  # type: ignore[no-untyped-call]
                text = _difference(outputs, tried, parts, weights, loss)
            if text:
                return text
    return ""


class _NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raise at a collective of the loss: here all ranks have the same rows."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise RuntimeError(f"the loss calls {func}")
        return func(*args, **(kwargs or {}))


def _parts(plan: Plan, batch: Batch) -> list[BatchPart]:
    split = split_batch(batch, plan.share_weights, plan.micro)
    return [part for share in split for part in share]


def _random_outputs(plan: Plan, batch: Batch, part: BatchPart) -> _Outputs | None:
    """Return random outputs of the shapes that the model has for a batch and a part of it.

    Returns None if it is not known which dim has the rows, if an output is not of the parameters,
    or if there are too many elements.
    """
    model, flat = meta_model(plan.model.model, {}), []
    model.train()
    for inputs in (batch, part.inputs):
        with without_values(inputs) as (bare, _):
            flat.append(pytree.tree_flatten(run_model(model, bare)))
    (full, spec), (small, small_spec) = flat
    tensors = [leaf for leaf in full if isinstance(leaf, Tensor)]
    if spec != small_spec or sum(t.numel() for t in tensors) > LARGEST:
        return None
    if not all(t.requires_grad for t in tensors):  # of the batch, as a mask is, that has a weight
        return None
    rows, part_rows = row_count(batch), len(part.rows)
    per_row = [_entries_of_row(x, y, rows, part_rows) for x, y in zip(full, small, strict=True)]
    if min(per_row, default=-1) < 0:
        return None
    device = next(iter(named_tensors(batch).values())).device
    generator = torch.Generator().manual_seed(0)
    leaves = [_random(x, generator).to(device) if isinstance(x, Tensor) else x for x in full]
    return _Outputs(leaves, spec, per_row)


@dataclass(frozen=True)
class _Outputs:
    """Outputs of a batch as leaves, with the numbers of entries that each has for a row."""

    leaves: Sequence[Any]
    spec: Any
    per_row: Sequence[int]

    def call(self, loss: Loss, batch: Batch, rows: Sequence[int], share: float) -> list[Any]:
        """Return the loss of rows times `share`, and the gradients of their outputs."""
        leaves = list(self.leaves)
        for number, entries in enumerate(self.per_row):
            if entries:
                part = leaves[number][rows[0] * entries : (rows[-1] + 1) * entries].clone()
                leaves[number] = part.requires_grad_()
        value = loss(pytree.tree_unflatten(leaves, self.spec), batch) * share
        value.backward()  # type: ignore[no-untyped-call]
        return [value.detach(), *(x.grad if isinstance(x, Tensor) else None for x in leaves)]


def _entries_of_row(x: Any, y: Any, rows: int, part_rows: int) -> int:
    """Return how many entries of dim 0 of an output are of one row; 0 for no tensor, -1 if unknown.

    x, y: the output of a batch and of its part, without values
    """
    if not isinstance(x, Tensor):
        return 0 if type(x) is type(y) else -1
    if not x.ndim or x.ndim != y.ndim or x.shape[1:] != y.shape[1:] or x.shape[0] % rows:
        return -1
    entries = x.shape[0] // rows
    return entries if entries and entries * part_rows == y.shape[0] else -1


def _random(x: Tensor, generator: torch.Generator) -> Tensor:
    low, high = _BOUNDS
    dtype = torch.promote_types(x.dtype, torch.float32)
    return low + (high - low) * torch.rand(x.shape, generator=generator, dtype=dtype)


def _difference(
    outputs: _Outputs,
    batch: Batch,
    parts: Sequence[BatchPart],
    weights: Sequence[float],
    loss: Loss,
) -> str:
    """Return how far the weighted parts are from the batch; "" if near, or if the loss draws."""
    rows = range(row_count(batch))
    full, again = (outputs.call(loss, batch, rows, 1.0) for _ in range(2))
    if _gap(full, full) != 0.0 or _gap(again, full) > TOLERANCE or not all(weights):
        return ""  # not finite; the loss draws, or counts; parts without a gradient
    shares = []
    for part, weight in zip(parts, weights):
        with scaled_means(part):
            shares.append(outputs.call(loss, part.inputs, part.rows, weight / sum(weights)))
    joined = [torch.stack([share[0] for share in shares]).sum(0), *_joined(shares)]
    gap = _gap(joined, full)
    return "" if gap <= TOLERANCE else f"in {len(parts)} parts it differs by {gap:.1e}"


def _joined(shares: Sequence[Sequence[Any]]) -> Iterator[Tensor | None]:
    """Yield the gradient of each output, of all parts."""
    for gradients in zip(*(share[1:] for share in shares)):
        known = [g for g in gradients if g is not None]
        yield torch.cat(known) if len(known) == len(gradients) else None


def _gap(found: Sequence[Any], full: Sequence[Any]) -> float:
    """Return the gap of a loss, or of gradients, relative to the norm of all gradients.

    The loss may be zero where its terms cancel. Returns NaN where a value is not finite.
    """
    pairs = [(x, y) for x, y in zip(found, full) if y is not None]
    if any(x is None for x, _ in pairs):
        return float("inf")
    norms = [float((x - y).norm()) for x, y in pairs]
    size = sum(float(y.norm()) for _, y in pairs[1:])
    return max(norms[0] / (float(full[0].abs()) + size), sum(norms[1:]) / size) if size else 0.0


# -- the model alone, to find whose fault a gap is -------------------------------------------------

SEEDS = (0, 1)
UNKNOWN = float("inf")


def model_gap(probe: Probe) -> float:
    """Return the relative gap between weighted parts and the whole, for the model alone.

    None of our loops, threads, dtypes and logical draws takes part, so that our mistakes are not
    blamed on the model. Random draws are made by row. Returns `UNKNOWN` if the model draws
    otherwise or cannot run without a mode.
    """
    case, parts, weights = probe.case, probe.parts, probe.weights
    module = copy_original(case)
    TrainingMode(module).train()
    row_ids = [row for part in parts for row in part.rows]
    try:
        with generators_restored():
            full, repeated = (
                run_model_alone(case, module, probe.batch, row_ids, seed) for seed in SEEDS
            )
            if not _result_gap(full, repeated) <= RTOL:
                return UNKNOWN
            added: dict[str, Tensor] = {}
            for part, weight in zip(parts, weights):
                given = case, module, part.inputs, part.rows
                with scaled_means(part):
                    part_results = (
                        run_model_alone(*given, share=weight / sum(weights)) if weight else {}
                    )
                for name, value in part_results.items():
                    added[name] = added.get(name, torch.zeros(())) + value
    except Exception:  # any error of the model without our modes
        return UNKNOWN
    return _result_gap(added, full)


def run_model_alone(
    case: Case,
    module: nn.Module,
    batch: Mapping[str, Any],
    rows: Sequence[int],
    seed: int = 0,
    share: float = 1.0,
) -> dict[str, Tensor]:
    """Return loss (under "") and gradients of rows of a batch, each times `share`.

    The module does not change.
    """
    torch.manual_seed(seed)
    fresh = copy_module(module)
    with enter_modes(SourceMode(RowDraws(rows))):
        loss = (case.loss or returned_loss)(run_model(fresh, batch), batch) * share
        loss.backward()  # type: ignore[no-untyped-call]
    gradients = {name: p.grad for name, p in fresh.named_parameters() if p.grad is not None}
    return {"": loss.detach(), **gradients}


def _result_gap(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Return the largest gap, relative to each tensor's norm; small tensors to the largest norm."""
    if a.keys() != b.keys() or any(a[k].shape != b[k].shape for k in b):
        return UNKNOWN
    max_norm = max(float(value.norm()) for value in b.values())
    gaps = [float((a[k] - b[k]).norm()) / (float(b[k].norm()) + 1e-3 * max_norm or 1.0) for k in b]
    return max((gap if gap == gap else UNKNOWN for gap in gaps), default=0.0)


def part_error(probe: Probe, error: Exception) -> Exception:
    """Return S604 if the model alone rejects a part, or rows are gathered; else the error."""
    case, module = probe.case, copy_original(probe.case)
    for part in probe.parts:
        try:
            run_model_alone(case, module, part.inputs, part.rows)
        except Exception as raised:  # whatever the model raises
            return part_refusal(raised, probe.batch)
    return part_refusal(error, probe.batch, True) if probe.case.plan.row_gathers else error
