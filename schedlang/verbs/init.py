"""init: write a commented schedule for a model and a mesh; on the meta device."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from schedlang.verbs.exits import bad_option, show_json
from schedlang.verbs.options import AsJson, verb

if TYPE_CHECKING:
    from torch import nn

    from schedlang.ir.modelfile import ModelFile


@verb
def init(
    model: Annotated[
        str, typer.Argument(help="A model file, its folder, or a module.", metavar="MODEL")
    ],
    mesh: Annotated[
        str, typer.Option("--mesh", metavar="AXIS=N,...", help="Axes and their sizes.")
    ] = "",
    adapt: Annotated[
        str | None,
        typer.Option(
            metavar="lora|dora", help="Train adapters of this kind on the blocks' projections."
        ),
    ] = None,
    rank: Annotated[int, typer.Option(min=1, help="Rank of the adapters.")] = 8,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the schedule to this file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a schedule for a model and a mesh of ranks.

    `schedlang init model.py --mesh dp=2,pp=2,tp=2 -o my.sched`

    The name of an axis gives its purpose: dp, data and fsdp split the batch, ep the experts, cp the
    sequences, pp and pipe the model into stages, tp and model the tensors.  `init` follows one
    forward without values and tries which rows are legal.  It lists the modules that stay
    replicated, with the reason.
    """
    start = time.perf_counter()
    from schedlang.ir.modelfile import load_model_file
    from schedlang.passes.autoshard.adapter_rows import Adapters
    from schedlang.passes.autoshard.propose import check_mesh, propose
    from schedlang.verbs.inputs import check_folders, model_to_try, parse_settings, write_output

    check_folders(out=out)
    if adapt not in (None, "lora", "dora"):
        bad_option(f"`--adapt {adapt}` is no kind of adapter", "`--adapt lora` or `--adapt dora`")
    sizes = parse_settings((), mesh).mesh
    check_mesh(sizes)
    model_file = load_model_file(model)
    import torch  # noqa: F401  (a model file may defer it; it counts as an import)

    imports = time.perf_counter() - start
    module = _make_model(model_file, sizes)
    adapters = None if adapt is None else Adapters(adapt, rank)
    calls = model_file.loss, model_file.weight
    values = partial(model_to_try, model_file, module)
    proposal = propose(module, model_file.batch(0), sizes, *calls, adapters, values)
    spent = time.perf_counter() - start - imports
    if out is not None:
        write_output(out, proposal.text)
    if as_json:
        show_json({"schedule": proposal.text, "notes": list(proposal.notes), "mesh": dict(sizes)})
    else:
        if out is None:
            print(proposal.text, end="")
        print(f"written in {spent:.1f} s, imports {imports:.1f} s", file=sys.stderr)


def _make_model(model_file: ModelFile, sizes: Mapping[str, int]) -> nn.Module:
    """Return the model on the meta device; with values if its sequences may be split."""
    from schedlang.passes.autoshard.propose import ROLES
    from schedlang.verbs.inputs import model_to_try

    module = model_file.model(meta=True)
    split = any(size > 1 and ROLES[axis] == "tokens" for axis, size in sizes.items())
    return model_to_try(model_file, module) if split else module
