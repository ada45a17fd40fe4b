"""The models of the table, tiny, each with batches of which one is ragged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests import survey
from tests.zoo_models.others import OTHERS

ROWS, TOKENS, LAYERS = 4, 12, 2
IGNORED = -100


@dataclass(frozen=True)
class Subject:
    """A model and two batches of the same keys: one ragged where it is text, one full."""

    kind: str
    model: nn.Module
    batches: tuple[Mapping[str, Any], ...]


def names() -> dict[str, str]:
    """Every kind of the table, and the family that it belongs to."""
    causal = dict.fromkeys(survey.kinds(), "causal language")
    return causal | {name: other.family for name, other in OTHERS.items()}


def subject(kind: str) -> Subject:
    """One model of the table; raises NotTiny where it cannot be had."""
    if kind in OTHERS:
        torch.manual_seed(0)
        model, batches = OTHERS[kind].make()
        return _tried(Subject(kind, model.float(), tuple(_single(b) for b in batches)), kind)
    model, _ = _ready(kind)
    if hasattr(model, "set_experts_implementation"):
        with suppress(ValueError):  # most models have no experts
            model.set_experts_implementation("grouped_mm")  # transformers' default
    made = [Subject(kind, model.float(), pair) for pair in (_words(True), _words(False))]
    for one in made:  # some models take no mask
        if _runs(one) is None:
            return one
    return _tried(made[-1], kind)


def _ready(kind: str) -> Any:
    try:
        return survey.ready(kind, LAYERS)
    except survey.NotTiny:  # some configurations say of more layers what they are
        return survey.ready(kind)


def _single(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {k: v.float() if v.is_floating_point() else v for k, v in batch.items()}


def _tried(one: Subject, kind: str) -> Subject:
    if (said := _runs(one)) is not None:
        raise survey.NotTiny(f"{kind}: {said}")
    return one


def _runs(one: Subject) -> str | None:
    """Why the model as it is does not run on its batches, or None."""
    try:
        with torch.no_grad():
            for batch in one.batches:
                found = one.model(**batch)
                loss = found.loss if hasattr(found, "loss") else found[0]
                if not bool(torch.isfinite(loss)):
                    return "its loss is not finite"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _words(masked: bool) -> tuple[dict[str, Tensor], ...]:
    """Token ids with labels: a batch whose rows end early, and a full one."""
    return tuple(text(seed, ragged=ragged, masked=masked) for seed, ragged in ((0, True), (1, 0)))


def text(seed: int, *, ragged: bool | int, masked: bool = True) -> dict[str, Tensor]:
    """Token ids, labels, and a mask of the rows that end early."""
    ids = torch.randint(3, 250, (ROWS, TOKENS), generator=torch.Generator().manual_seed(seed))
    labels, mask = ids.clone(), torch.ones_like(ids)
    for row, end in ((1, TOKENS - 3), (3, TOKENS // 2)) if ragged else ():
        labels[row, end:] = IGNORED
        mask[row, end:] = 0
    given = {"input_ids": ids, "labels": labels}
    return given | {"attention_mask": mask} if masked else given


Make = Callable[[], tuple[nn.Module, list[dict[str, Tensor]]]]
