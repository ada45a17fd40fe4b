"""Options that verbs share, alone or in groups, and the wrapper that makes a function a verb.

A verb takes groups of options as dataclasses; the command line has their fields one by one.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from schedlang.garbage_collection import collect_less_often
from schedlang.verbs.exits import UNCHECKED, exit_code_of, show_json


def flatten_groups(function: Callable[..., Any]) -> Callable[..., Any]:
    """Turn a function of groups of options into a function of single options.

    A parameter whose annotation is a dataclass is replaced by the dataclass's fields, with their
    order, annotations and defaults; no two groups may have an option of the same name.
    """
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {n: kind for n, kind in hints.items() if is_dataclass(kind)}
    if not groups:
        return function
    params = [
        option.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[option.name])
        for option in inspect.signature(function).parameters.values()
    ]
    expanded = [option for param in params for option in _expand_parameter(param, groups)]

    @functools.wraps(function)
    def run(**options: Any) -> Any:
        grouped = {
            name: kind(**{entry.name: options.pop(entry.name) for entry in fields(kind)})
            for name, kind in groups.items()
        }
        return function(**grouped, **options)

    run.__signature__ = inspect.Signature(expanded)  # type: ignore[attr-defined]
    run.__annotations__ = {option.name: option.annotation for option in expanded}
    return run


def _expand_parameter(
    parameter: inspect.Parameter, groups: Mapping[str, Any]
) -> Iterator[inspect.Parameter]:
    """Yield the options of a parameter: itself, or the fields of its group."""
    if parameter.name not in groups:
        yield parameter
        return
    kind = groups[parameter.name]
    hints = get_type_hints(kind, include_extras=True)
    for group_field in fields(kind):
        default = inspect.Parameter.empty if group_field.default is MISSING else group_field.default
        yield parameter.replace(
            name=group_field.name, default=default, annotation=hints[group_field.name]
        )


Verb = TypeVar("Verb", bound=Callable[..., Any])

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
Timeout = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        metavar="SECONDS",
        min=0.001,
        help="Stop after this many seconds, with exit code 3.",
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of weights, batches and dropout.")]
WorkingDtype = Annotated[
    str | None, typer.Option(help="Also check in this working dtype: float32 or bfloat16.")
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="M",
        help="Model file or module; default: model.py, or the schedule's name with .py.",
    ),
]
Knobs = Annotated[
    list[str] | None,
    typer.Option("--knob", metavar="NAME=VALUE", help="Set a knob; may be repeated."),
]
MeshSizes = Annotated[
    str | None,
    typer.Option(
        "--mesh", metavar="AXIS=N,...", help="Set axis sizes, and the knobs that define them."
    ),
]


@dataclass(frozen=True)
class Common:
    """The options of every verb that plans: the model, knobs and mesh."""

    model: Model = None
    knob: Knobs = None
    mesh: MeshSizes = None


@contextmanager
def exit_unchecked(
    timeout: float | None, as_json: bool, done: Callable[[], None]
) -> Iterator[None]:
    """Exit with 3, after printing the reason, where a rank dies, all ranks hang, or the time is
    over."""
    from schedlang.runtime.launch.rank_job import Hang, RankDied, limit_time

    def tell(account: str) -> None:
        done()
        if as_json:
            show_json({"exit": UNCHECKED, "error": account})
        print(account, file=sys.stderr, flush=True)
        sys.stdout.flush()

    try:
        with limit_time(timeout, hard=tell):
            yield
    except (RankDied, Hang) as failure:
        tell(str(failure))
        raise typer.Exit(UNCHECKED) from None


def verb(function: Verb) -> Verb:
    """Make a function a verb: refusals exit with 2, errors of schedlang with 3, always with a
    message.

    Options may be grouped in dataclasses.
    """

    options_of = flatten_groups(function)

    @functools.wraps(options_of)
    def run(*args: Any, **options: Any) -> Any:
        collect_less_often()

        def call() -> int:
            options_of(*args, **options)
            return 0

        code = exit_code_of(call, bool(options.get("as_json")), reraise=(typer.Exit, typer.Abort))
        if code:
            raise typer.Exit(code)

    return run  # type: ignore[return-value]
