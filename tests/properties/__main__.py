"""Run many random legal schedules; print their choices and outcomes:
`python -m tests.properties --help`."""

from __future__ import annotations

import argparse
import collections
import re
import time
import traceback
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime.launch.pool import Pool
from tests.engine import Threads
from tests.properties import engine, schedules
from tests.properties.choices import count_choices
from tests.properties.schedules import Drawn

PRELOAD = (
    "torch",
    "torch.distributed",
    "cloudpickle",
    "schedlang.passes.prove",
    "tests.properties.models",
)


def main(count: int, seed: int, form: str, uses: bool = False) -> None:
    """Draw and run schedules and count outcomes; print failures with code to reproduce them."""
    known_errors: set[str] = set()

    def seen(outcome: str) -> bool:
        shortened = re.sub(
            "[0-9]", "", outcome[:60] + outcome[-160:]
        )  # a traceback ends in its error
        known_errors.add(shortened) if (is_new := shortened not in known_errors) else None
        return not is_new

    counts: collections.Counter[str] = collections.Counter()
    drawn_rows: collections.Counter[str] = collections.Counter()
    start = time.perf_counter()
    processes = form.endswith("-gloo")
    form = form.removesuffix("-gloo")
    with Pool(preload=PRELOAD) if processes else Threads() as pool:

        @hypothesis.seed(seed)
        @settings(
            max_examples=count,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(schedules.legal(used=uses))
        def one(drawn: Drawn) -> None:
            outcome = attempt(drawn, pool, form)
            counts[outcome.split(":")[0]] += 1
            drawn_rows.update(count_choices(drawn.text))
            if not outcome.startswith(("equal", "refused as")) and not seen(outcome):
                print(f"---- {outcome}\n{drawn!r}\n{drawn.text}", flush=True)

        one()
    spent = time.perf_counter() - start
    print("\n".join(f"{count_:6} {choice}" for choice, count_ in sorted(drawn_rows.items())))
    print(dict(counts), f"{spent:.0f} s, {1000 * spent / max(1, counts.total()):.0f} ms each")


def attempt(drawn: Drawn, pool: Any, form: str) -> str:
    """Run one drawn schedule; returns `equal` or what happened instead."""
    try:
        engine.check(drawn, pool, getattr(engine, form))
    except Refusal as refusal:
        if refusal.diagnostic.code == drawn.refused or refusal.diagnostic.code in drawn.may:
            return "refused as it must be" if drawn.refused else "refused as it may be"
        return f"refused {refusal.diagnostic.code}: {refusal.render()}"
    except engine.Differs as differs:
        return f"DIFFERS: {differs}"
    except Exception as error:
        return f"{type(error).__name__}: {traceback.format_exc(limit=-6)} {error}"
    return f"NOT REFUSED: {drawn.refused}" if drawn.refused else "equal"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="tests.properties", description="Run drawn schedules.")
    parser.add_argument("count", type=int, nargs="?", default=100)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    parser.add_argument(
        "form",
        nargs="?",
        default="cheap",
        choices=[form + ranks for form in ("cheap", "whole") for ranks in ("", "-gloo")],
        help="how much is compared; with -gloo on processes, else on threads",
    )
    parser.add_argument(
        "--uses", action="store_true", help="models that use something twice, split in one use"
    )
    asked = parser.parse_args()
    main(asked.count, asked.seed, asked.form, asked.uses)
