"""The command line: one verb per file of `schedlang.verbs`."""

from __future__ import annotations

import typer

from schedlang.verbs.check import check
from schedlang.verbs.ci import ci
from schedlang.verbs.diff import diff
from schedlang.verbs.explain import explain
from schedlang.verbs.fmt import fmt
from schedlang.verbs.init import init
from schedlang.verbs.lsp import lsp
from schedlang.verbs.plan import plan
from schedlang.verbs.run import run
from schedlang.verbs.simulate import simulate
from schedlang.verbs.tree import tree
from schedlang.verbs.verify import verify
from schedlang.verbs.why import why

app = typer.Typer(
    name="schedlang",
    help="The model says what to compute, the schedule says how, and the two are proven to agree.",
    epilog="Exit 0: holds. 1: does not hold. 2: refused. 3: could not be checked.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

for verb in (fmt, check, tree, init, plan, diff, why, verify, ci, run, simulate, explain, lsp):
    app.command(verb.__name__)(verb)


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
