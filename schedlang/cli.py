"""The command line: one verb per file of `schedlang.verbs`, imported when it is called."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import typer

VERBS = (
    *("fmt", "check", "tree", "init", "plan", "diff", "why"),
    *("verify", "ci", "run", "simulate", "tune", "explain", "lsp"),
)
HELP = "The model says what to compute, the schedule says how, and the two are proven to agree."


def main() -> None:
    """Run the command line."""
    words = sys.argv[1:]
    if words[:1] == ["check"]:
        from schedlang.verbs.checking import plain

        code = plain(words[1:])
        if code is not None:
            sys.exit(code)
    # a verb that is named needs none of the others; a word that is no verb is told all of them
    made(words[:1] if words and words[0] in VERBS else VERBS)()


def made(verbs: Sequence[str]) -> typer.Typer:
    """The command line with some of its verbs."""
    import typer

    app = typer.Typer(
        name="schedlang",
        help=HELP,
        epilog="Exit 0: holds. 1: does not hold. 2: refused. 3: could not be checked.",
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_group)
    for name in verbs:
        app.command(name)(getattr(importlib.import_module(f"schedlang.verbs.{name}"), name))
    return app


def _group() -> None:
    # with a callback of its own, the command line has verbs even where only one was imported
    pass


def __getattr__(name: str) -> Any:
    """`app`, the command line with all its verbs, made when it is asked for."""
    if name != "app":
        raise AttributeError(f"module `schedlang.cli` has no `{name}`")
    return globals().setdefault("app", made(VERBS))


if __name__ == "__main__":
    main()
