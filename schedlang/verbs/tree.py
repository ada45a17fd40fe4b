"""tree: the model with its paths, shapes, ties; repeated blocks folded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from schedlang.verbs.exits import show_json
from schedlang.verbs.options import AsJson, Model, verb


@verb
def tree(
    file: Annotated[
        Path | None, typer.Argument(help="A schedule or a model file.", metavar="FILE")
    ] = None,
    model: Model = None,
    each: Annotated[bool, typer.Option("--each", help="Show repeated blocks one by one.")] = False,
    depth: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Show only this many levels of modules.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the model as a schedule sees it: paths, classes, parameters with named dims, ties."""
    from schedlang.diagnostics.tables import terminal_columns
    from schedlang.ir.model import ModelFacts
    from schedlang.ir.modelfile import load_model_file
    from schedlang.language.syntax import read
    from schedlang.viz.tree import format_tree
    from schedlang.viz.tree import tree as tree_of

    if file is not None and file.suffix == ".py" and model is None:
        model = str(file)
    elif file is not None:
        read(file)  # refuses a file that is missing
    model_file = load_model_file(model, file)
    root = tree_of(ModelFacts(model_file.model(meta=True)), each=each)
    if as_json:
        show_json(root.to_json())
    else:
        print(format_tree(root, depth, terminal_columns()))
