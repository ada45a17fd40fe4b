"""Adapters alone, in a folder that PEFT reads: `PeftModel.from_pretrained(model, path)`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal
from schedlang.ir.model import Adapting
from schedlang.runtime.adapted import MAGNITUDE, Adapt, Adapted

MARK, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."  # of all names: that of the model which PEFT wraps


def rows_of(changes: Sequence[Adapting], target: Path) -> list[Adapt]:
    """The rows that bring adapters; raises Refusal S639 for none, or of more than one kind."""
    rows = [change for change in changes if isinstance(change, Adapt)]
    if not rows or len({row.kind for row in rows}) > 1:
        raise Refusal(_no_adapter(target, bool(rows)))
    return rows


def contents(
    rows: Sequence[Adapt], state: Mapping[str, Tensor], trained: Sequence[str], model: nn.Module
) -> tuple[dict[str, Tensor], str]:
    """The tensors that are written, by PEFT's names, and the text of its configuration.

    Adapters, and modules that are trained beside them (`modules_to_save`).  Probabilities of
    dropout are those of the first row: PEFT knows one.
    """
    apart = {f"{fqn}.{name}" for row in rows for fqn in row.sites for name in Adapted.inner}
    saved = sorted({name.rpartition(".")[0] for name in trained if name not in apart})
    tensors = {_name(name): value for name, value in state.items() if name in apart}
    beside = (n for n in state if n.rpartition(".")[0] in saved and n not in apart)
    tensors |= {f"{PREFIX}{name}": state[name] for name in beside}
    return tensors, json.dumps(_config(rows, saved, model), indent=2)


def _name(name: str) -> str:
    """A parameter's name in the file: PEFT's matrices are modules of their own."""
    owner, _, local = name.rpartition(".")
    local = "lora_magnitude_vector" if local == MAGNITUDE else f"{local}.weight"
    return f"{PREFIX}{owner}.{local}"


def _config(rows: Sequence[Adapt], saved: Sequence[str], model: nn.Module) -> dict[str, Any]:
    first, own = rows[0], getattr(getattr(model, "config", None), "name_or_path", None)
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": own or None,
        "inference_mode": True,
        "r": first.rank,
        "lora_alpha": first.alpha,
        "lora_dropout": first.dropout,
        "use_dora": first.kind == "dora",
        "fan_in_fan_out": any(row.transposed for row in rows),
        "bias": "none",
        "target_modules": [fqn for row in rows for fqn in row.sites],
        "rank_pattern": {fqn: row.rank for row in rows[1:] for fqn in row.sites},
        "alpha_pattern": {fqn: row.alpha for row in rows[1:] for fqn in row.sites},
        "modules_to_save": list(saved) or None,
    }


def _no_adapter(target: Path, several: bool) -> Diagnostic:
    if several:
        return Diagnostic(
            "S639",
            f"cannot write the adapters to `{target}`: some are `lora` and some `dora`",
            notes=("a folder of PEFT has one kind",),
            helps=("export the merged weights: `program.export(path, model)`",),
        )
    return Diagnostic(
        "S639",
        f"cannot write the adapters to `{target}`: no row brings any",
        helps=(
            "add a row: `layers.*.mlp.up  adapt(lora, rank=8)`",
            "or export the weights: `program.export(path, model)`",
        ),
    )
