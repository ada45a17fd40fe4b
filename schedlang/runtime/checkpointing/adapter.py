"""Adapters alone, in a folder that PEFT reads: `PeftModel.from_pretrained(model, path)`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal
from schedlang.ir.model import Adapting
from schedlang.runtime.adapted import MAGNITUDE, Adapt, Adapted
from schedlang.runtime.checkpointing.steps import resolved
from schedlang.runtime.comm import world
from schedlang.runtime.storage.folder import replace_folder

MARK, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."  # of all names: that of the model which PEFT wraps


def export_adapter(
    rank: int,
    path: str | os.PathLike[str],
    model: nn.Module,
    state: Mapping[str, Tensor],
    changes: Sequence[Adapting],
    trained: Sequence[str],
) -> None:
    """Write the adapters, and modules that are trained beside them (`modules_to_save`).

    `state` are whole tensors, which the first rank has.  Probabilities of dropout are those of the
    first row: PEFT knows one.  Raises Refusal S631, S632, S639 or S638 on all ranks, leaving what
    was at the path as it was.
    """
    rows = [change for change in changes if isinstance(change, Adapt)]
    target = Path(world.broadcast_object(0, str(resolved(path))))
    if not rows or len({row.kind for row in rows}) > 1:
        raise Refusal(_no_adapter(target, bool(rows)))
    apart = {f"{fqn}.{name}" for row in rows for fqn in row.sites for name in Adapted.inner}
    saved = sorted({name.rpartition(".")[0] for name in trained if name not in apart})

    def fill(folder: Path) -> None:
        if rank == 0:
            from safetensors.torch import save_file

            tensors = {_name(n): v.contiguous() for n, v in state.items() if n in apart}
            beside = (n for n in state if n.rpartition(".")[0] in saved and n not in apart)
            tensors |= {f"{PREFIX}{name}": state[name].contiguous() for name in beside}
            save_file(tensors, folder / MARK, {"format": "pt"})
            (folder / CONFIG).write_text(json.dumps(_config(rows, saved, model), indent=2))

    def diagnose(error: BaseException) -> Diagnostic:
        return Diagnostic("S631", f"cannot write the adapters to `{target}`", notes=(str(error),))

    replace_folder(target, rank, fill, marks=(MARK,), diagnose=diagnose, failures=(Exception,))


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
