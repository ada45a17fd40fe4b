"""How a verb ends: text or JSON, and the exit code that its result stands for."""

from __future__ import annotations

import functools
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, Any, NoReturn, TypeVar

import typer

from schedlang.diagnostic import Refusal

HOLDS, FAILS, REFUSED, UNCHECKED = 0, 1, 2, 3

Verb = TypeVar("Verb", bound=Callable[..., Any])

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
Model = Annotated[
    str | None, typer.Option("--model", metavar="M", help="Model file or module; default model.py.")
]
Knobs = Annotated[
    list[str] | None,
    typer.Option("--knob", metavar="NAME=VALUE", help="Set a knob; may be repeated."),
]
MeshSizes = Annotated[
    str | None,
    typer.Option("--mesh", metavar="AXIS=N,...", help="Set sizes of axes, and their knobs."),
]


def verb(function: Verb) -> Verb:
    """Turn refusals into exit 2 and errors of our own into exit 3; a message is always shown."""

    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except Refusal as refusal:
            refuse(refusal, as_json=bool(options.get("as_json")))
        except (typer.Exit, typer.Abort, KeyboardInterrupt):
            raise
        except BrokenPipeError:  # who read the output has gone, as `head` does
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(UNCHECKED) from None
        except Exception as error:
            traceback.print_exc()
            if options.get("as_json"):
                show_json({"exit": UNCHECKED, "error": f"{type(error).__name__}: {error}"})
            raise typer.Exit(UNCHECKED) from None

    return run  # type: ignore[return-value]


def refuse(refusal: Refusal, as_json: bool = False) -> NoReturn:
    """Show a refusal and end with its exit code."""
    if as_json:
        messages = [d.to_json() for d in refusal.diagnostics]
        show_json({"exit": REFUSED, "diagnostics": messages})
    else:
        print(refusal.render(), file=sys.stderr)
    raise typer.Exit(REFUSED)


def show_json(value: object) -> None:
    """One JSON document on standard output."""
    print(json.dumps(value, indent=2, ensure_ascii=False))
