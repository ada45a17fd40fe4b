"""Tiny models of the table, each with a ragged and a full batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests import survey
from tests.zoo_models.others import OTHER_MODELS

ROWS, TOKENS, LAYERS = 4, 12, 2
IGNORED = -100


@dataclass(frozen=True)
class Subject:
    """A model and two batches with equal keys: for text one is ragged, one full."""

    kind: str
    model: nn.Module
    batches: tuple[Mapping[str, Any], ...]


def model_families() -> dict[str, str]:
    """Return all kinds of models in the table with their families."""
    families = dict.fromkeys(survey.kinds(), "causal language")
    return families | {name: entry.family for name, entry in OTHER_MODELS.items()}


def make_subject(kind: str) -> Subject:
    """Build one model of the table; raises NotTiny if that is not possible."""
    if kind in OTHER_MODELS:
        torch.manual_seed(0)
        model, batches = OTHER_MODELS[kind].make()
        return _check_runs(
            Subject(kind, model.float(), tuple(_to_float32(b) for b in batches)), kind
        )
    model, _ = _tiny_model(kind)
    if hasattr(model, "set_experts_implementation"):
        with suppress(ValueError):  # most models have no experts
            model.set_experts_implementation("grouped_mm")  # transformers' default
    candidates = [
        Subject(kind, model.float(), pair) for pair in (_text_batches(True), _text_batches(False))
    ]
    for candidate in candidates:  # some models accept no mask
        if _run_error(candidate) is None:
            return candidate
    return _check_runs(candidates[-1], kind)


def _tiny_model(kind: str) -> Any:
    try:
        return survey.tiny_model(kind, LAYERS)
    except survey.NotTiny:  # some configurations list their layers
        return survey.tiny_model(kind)


def _to_float32(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {k: v.float() if v.is_floating_point() else v for k, v in batch.items()}


def _check_runs(candidate: Subject, kind: str) -> Subject:
    if (problem := _run_error(candidate)) is not None:
        raise survey.NotTiny(f"{kind}: {problem}")
    return candidate


def _run_error(candidate: Subject) -> str | None:
    """Return why the unmodified model does not run on its batches, or None."""
    try:
        with torch.no_grad():
            for batch in candidate.batches:
                output = candidate.model(**batch)
                loss = output.loss if hasattr(output, "loss") else output[0]
                if not bool(torch.isfinite(loss)):
                    return "its loss is not finite"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _text_batches(masked: bool) -> tuple[dict[str, Tensor], ...]:
    """Return a ragged and a full batch of token ids with labels."""
    return tuple(
        text_batch(seed, ragged=ragged, masked=masked) for seed, ragged in ((0, True), (1, 0))
    )


def text_batch(seed: int, *, ragged: bool | int, masked: bool = True) -> dict[str, Tensor]:
    """Return token ids, labels, and optionally a mask; in a ragged batch some rows end early."""
    ids = torch.randint(3, 250, (ROWS, TOKENS), generator=torch.Generator().manual_seed(seed))
    labels, mask = ids.clone(), torch.ones_like(ids)
    for row, end in ((1, TOKENS - 3), (3, TOKENS // 2)) if ragged else ():
        labels[row, end:] = IGNORED
        mask[row, end:] = 0
    batch = {"input_ids": ids, "labels": labels}
    return batch | {"attention_mask": mask} if masked else batch


Make = Callable[[], tuple[nn.Module, list[dict[str, Tensor]]]]
