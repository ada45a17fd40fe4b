"""lsp: the language server, for editors."""

from __future__ import annotations

from typing import Annotated

import typer

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.verbs.options import verb


@verb
def lsp(
    model: Annotated[
        bool, typer.Option("--model/--no-model", help="Import model files, for paths and shapes.")
    ] = True,
) -> None:
    """Run the language server on stdin and stdout: diagnostics, completion, hover, formatting."""
    from importlib.metadata import version

    try:
        from schedlang.editors.server import make_server
    except ImportError:
        title = "the language server needs the package `pygls`, which is not installed"
        raise Refusal.of("S909", title, helps=("pip install 'schedlang[editors]'",)) from None
    make_server(version("schedlang"), model=model).start_io()
