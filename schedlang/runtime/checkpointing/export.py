"""export: whole weights as safetensors, in a folder that the model's own library reads."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal
from schedlang.ir.model import Adapting
from schedlang.runtime.comm import world
from schedlang.runtime.storage.folder import replace_folder, together

MARK = "model.safetensors"
MARKS = (MARK, f"{MARK}.index.json")  # of one file, of several
MOST = 2**36  # bytes of one file


def export(
    rank: int,
    path: str | os.PathLike[str],
    model: nn.Module,
    state: dict[str, Tensor],
    merges: Sequence[Adapting] = (),
) -> None:
    """Write whole weights, which the first rank has, under the original's names; all together.

    `merges` are changes that brought parameters: each puts those of the state into others, the last
    first. `model` is the one that the schedule was made for, and is only read. A model of
    transformers is written by its own `save_pretrained`, with its configuration and in its files'
    names, so that `from_pretrained` loads the folder, ties intact. Any other becomes one file of
    whole tensors, for `safetensors.torch.load_model`; what is tied is written once. What was at the
    path stays until the new folder takes its name, in one move. Raises Refusal S631, S632, S634 or
    S638 on all ranks, leaving what was at the path as it was.
    """
    for change in reversed(merges):
        state = change.merged(state)
    target = Path(
        world.broadcast_object(0, os.path.realpath(path))
    )  # a link stays, and what it leads to is new
    together(
        lambda: _check(target, state, model) if rank == 0 else None,
        lambda error: _unwritten(target, str(error)),
    )

    def fill(folder: Path) -> None:
        if rank == 0:
            _write(folder, state, model)

    replace_folder(
        target,
        rank,
        fill,
        marks=MARKS,
        diagnose=lambda error: _unwritten(target, str(error)),
        failures=(Exception,),
    )


def _check(target: Path, state: dict[str, Tensor], model: nn.Module) -> None:
    """Refuse another model, and one whose ties would undo what has been trained apart."""
    if not isinstance(model, nn.Module):
        raise Refusal.of(
            "S634",
            f"this is a {type(model).__name__}, not the model that was scheduled",
            helps=("give the module that was passed to `create_schedule`",),
        )
    known = model.state_dict(keep_vars=True)
    if odd := sorted(known.keys() ^ state.keys()):
        raise Refusal.of(
            "S634",
            f"this is not the model that was scheduled: `{odd[0]}`",
            helps=("give the model that the schedule was made for",),
        )
    first: dict[int, str] = {}
    for name, tensor in known.items():
        one = first.setdefault(id(tensor), name)
        if not torch.equal(state[one], state[name]):
            raise Refusal(
                _unwritten(
                    target,
                    f"`{one}` and `{name}` are one parameter of the "
                    "given model, but were trained separately",
                    "give a model in which they are not tied",
                )
            )


def _write(folder: Path, state: dict[str, Tensor], model: nn.Module) -> None:
    if hasattr(model, "save_pretrained"):
        # saving notes classes and dtypes in the configuration: in that of a copy
        tensors = (*model.parameters(), *model.buffers())
        memo: dict[int, Any] = {id(tensor): tensor for tensor in tensors}
        twin: Any = copy.deepcopy(model, memo)
        twin.save_pretrained(folder, state_dict=state, max_shard_size=MOST)
        return
    from safetensors.torch import save_file

    kept: dict[tuple[int, torch.Size], str] = {}
    metadata = {"format": "pt"}
    for name, tensor in state.items():
        one = kept.setdefault((tensor.data_ptr() or id(tensor), tensor.shape), name)
        if one != name:
            metadata[name] = one
    save_file({name: state[name].contiguous() for name in kept.values()}, folder / MARK, metadata)


def _unwritten(target: Path, why: str, *helps: str) -> Diagnostic:
    return Diagnostic("S631", f"cannot write the weights to `{target}`", notes=(why,), helps=helps)
