"""The command line: one verb per file of `schedlang.verbs`, imported when it is called."""

from __future__ import annotations

import gc
import importlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from inspect import cleandoc
from typing import TYPE_CHECKING, Annotated, Any

from schedlang.garbage_collection import ProcessState

if TYPE_CHECKING:
    import typer

VERBS = (
    *("fmt", "check", "tree", "init", "plan", "diff", "why"),
    *("verify", "ci", "run", "launch", "doctor", "simulate", "tune", "fabric", "calibrate"),
    *("explain", "lsp"),
)
HELP = "The model says what to compute, the schedule says how; schedlang proves that both agree."


def main() -> None:
    """Run the command line."""
    _prepare_output()
    try:
        _run(sys.argv[1:])
    except OSError:
        from schedlang.verbs.exits import UNCHECKED, is_output_lost

        if not is_output_lost():
            raise
        sys.exit(UNCHECKED)


def _run(args: Sequence[str]) -> None:
    if args == ["--version"]:
        from schedlang import __version__

        print(f"schedlang {__version__}", flush=True)
        sys.exit()
    if args[:1] == ["check"]:
        from schedlang.verbs.quick_check import run_quick_check

        code = run_quick_check(args[1:])
        if code is not None:
            sys.stdout.flush()
            sys.exit(code)
    ProcessState.own = True
    try:
        # load only the named verb; for an unknown word all of them, to list them
        app = make_app(args[:1] if args and args[0] in VERBS else VERBS)
        _run_with_json_errors(app) if "--json" in args else app()
    finally:
        gc.freeze()  # else the interpreter's exit would visit all objects, for most of a second
        sys.stdout.flush()


def _prepare_output() -> None:
    """Let every verb write: to the null device for a closed stream, else as UTF-8.

    Files and pipes get UTF-8 whatever the locale is, since schedules are read so. A terminal, and
    an encoding that the user has set, get escapes for what they cannot show.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115
        elif isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() != "utf-8":
            if stream.isatty() or "PYTHONIOENCODING" in os.environ:
                stream.reconfigure(errors="backslashreplace")
            else:
                stream.reconfigure(encoding="utf-8")


def _run_with_json_errors(app: typer.Typer) -> None:
    """Run a verb with `--json`: usage errors are printed as JSON, too."""
    try:
        code = app(standalone_mode=False)
    except Exception as error:
        format_message = getattr(error, "format_message", None)  # of an error of typer or click
        if type(error).__name__ == "Abort":  # by the keyboard
            sys.exit(1)
        if format_message is None:
            raise
        from schedlang.diagnostics.diagnostic import Refusal
        from schedlang.verbs.exits import REFUSED, show_refusal

        verb = f" {sys.argv[1]}" if sys.argv[1] in VERBS else ""
        helps = (f"`schedlang{verb} --help` lists what it takes",)
        show_refusal(Refusal.of("S109", format_message(), helps=helps), as_json=True)
        sys.exit(REFUSED)
    sys.exit(code if isinstance(code, int) else 0)


def make_app(verbs: Sequence[str]) -> typer.Typer:
    """Make the command line with these verbs."""
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
    app.callback()(_version_callback())
    for name in verbs:
        verb = getattr(importlib.import_module(f"schedlang.verbs.{name}"), name)
        app.command(name, help=_join_lines(verb.__doc__))(verb)
    return app


def _join_lines(text: str) -> str:
    """Return a docstring with one line for each paragraph, so that the terminal wraps it."""
    return "\n\n".join(" ".join(part.split("\n")) for part in cleandoc(text).split("\n\n"))


def _version_callback() -> Callable[[bool], None]:
    """Make the callback before a verb: it has `--version`, and makes the verbs a group."""
    import typer

    from schedlang import __version__

    def tell(wanted: bool) -> None:
        if wanted:
            print(f"schedlang {__version__}")
            raise typer.Exit

    option = typer.Option(
        "--version", help="Show the version and exit.", callback=tell, is_eager=True
    )

    def group(version: bool = False) -> None:
        pass

    group.__annotations__["version"] = Annotated[bool, option]
    return group


def __getattr__(name: str) -> Any:
    """Return `app`, the command line with all its verbs, made on first use."""
    if name != "app":
        raise AttributeError(f"module `schedlang.cli` has no `{name}`")
    return globals().setdefault("app", make_app(VERBS))


if __name__ == "__main__":
    main()
