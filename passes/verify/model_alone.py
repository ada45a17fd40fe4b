"""Compare the parts of a batch with the whole by the model alone, to find whose fault a gap is.

None of our loops, threads, dtypes and logical draws takes part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from schedlang.ir.module_copies import copy_module
from schedlang.passes.propagate.batch_refusals import part_refusal
from schedlang.passes.verify.compare import RTOL
from schedlang.passes.verify.original import returned_loss
from schedlang.passes.verify.proof_case import Case, copy_original
from schedlang.runtime.batch import run_model
from schedlang.runtime.device import generators_restored
from schedlang.runtime.label_means import scaled_means
from schedlang.runtime.modes import enter_modes
from schedlang.runtime.rng.logical_dropout import RowDraws, SourceMode
from schedlang.runtime.training_mode import TrainingMode

if TYPE_CHECKING:
    from schedlang.passes.verify.probe import Probe

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
            if not _gap(full, repeated) <= RTOL:
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
    return _gap(added, full)


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


def _gap(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
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
