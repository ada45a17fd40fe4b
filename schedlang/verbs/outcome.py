"""Options that verbs share, and a verb as the command line calls it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import typer

from schedlang.verbs.ending import UNCHECKED, ended, show_json
from schedlang.verbs.grouped import flat

Verb = TypeVar("Verb", bound=Callable[..., Any])

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
Timeout = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        metavar="SECONDS",
        min=0.001,
        help="Stop after so many seconds, with exit code 3.",
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of weights, batches and dropout.")]
WorkingDtype = Annotated[
    str | None, typer.Option(help="Also check in this working dtype: float32 or bfloat16.")
]
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


@dataclass(frozen=True)
class Common:
    """The options of every verb that plans: the model, and what is set from outside."""

    model: Model = None
    knob: Knobs = None
    mesh: MeshSizes = None


@contextmanager
def unchecked(timeout: float | None, as_json: bool, done: Callable[[], None]) -> Iterator[None]:
    """Exit 3, with the account, where a rank dies, none gets on, or the time is over."""
    from schedlang.runtime.launch.job import Hang, RankDied, limited

    def tell(account: str) -> None:
        done()
        if as_json:
            show_json({"exit": UNCHECKED, "error": account})
        print(account, file=sys.stderr, flush=True)
        sys.stdout.flush()

    try:
        with limited(timeout, hard=tell):
            yield
    except (RankDied, Hang) as failure:
        tell(str(failure))
        raise typer.Exit(UNCHECKED) from None


def verb(function: Verb) -> Verb:
    """Turn refusals into exit 2 and errors of our own into exit 3; a message is always shown.

    Options may be taken in groups, as dataclasses.
    """

    options_of = flat(function)

    @functools.wraps(options_of)
    def run(*args: Any, **options: Any) -> Any:
        def call() -> int:
            options_of(*args, **options)
            return 0

        code = ended(call, bool(options.get("as_json")), through=(typer.Exit, typer.Abort))
        if code:
            raise typer.Exit(code)

    return run  # type: ignore[return-value]
