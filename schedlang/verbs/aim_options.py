"""tune --aim: options that set what a search minimises: time, cost or energy of a training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from schedlang.verbs.exits import bad_option, check_positive

if TYPE_CHECKING:
    from schedlang.passes.planner.aims import Aim

TIMES = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True)
class Aims:
    """The quantity of a training to be minimised, the training's length, and its deadline."""

    aim: Annotated[
        str | None,
        typer.Option(
            "--aim",
            metavar="time|cost|energy",
            help="What to minimise over a training; it may use only some nodes of `--on`.",
        ),
    ] = None
    samples: Annotated[
        list[str] | None,
        typer.Option(
            "--samples",
            metavar="[ROWS=]N",
            help="Rows of the training; 512=10M: in steps of 512 rows. May be repeated.",
        ),
    ] = None
    tokens: Annotated[
        str | None,
        typer.Option(
            "--tokens", metavar="N", help="Tokens of the training, instead of `--samples`."
        ),
    ] = None
    deadline: Annotated[
        str | None,
        typer.Option(
            "--deadline", metavar="72h", help="The training must end within this time (s, m, h, d)."
        ),
    ] = None
    eta: Annotated[
        float, typer.Option("--eta", help="Share of energy in Zeus's cost; the rest is time.")
    ] = 1.0

    @property
    def is_given(self) -> bool:
        """Whether any of these options is given."""
        return self != Aims()

    def read(self, rows: int, length: int) -> Aim | None:
        """Return the aim of a job whose steps have `rows` rows of `length` tokens; None without
        options.

        Raises Refusal S109 for illegal options, and for a training without a length.
        """
        from schedlang.passes.planner.aims import AIMS, COST, ENERGY, TIME, Aim

        if not self.is_given:
            return None
        name = self.aim or TIME
        if name not in AIMS:
            bad_option(f"`--aim {name}` is none of {', '.join(AIMS)}", f"`--aim {COST}`")
        if self.eta != 1 and name != ENERGY:
            bad_option(f"`--eta` weighs energy, not {name}", f"`--aim {ENERGY}`")
        if not 0 <= self.eta <= 1:
            bad_option(f"`--eta {self.eta:g}` is no share", "give one from 0 to 1: `--eta 0.5`")
        samples = (
            self._steps_from_tokens(rows, length)
            if self.tokens is not None
            else self._steps_from_samples(rows)
        )
        return Aim(name, samples, self._deadline_seconds(), self.eta)

    def _steps_from_samples(self, rows: int) -> Mapping[int, float]:
        if not self.samples:
            title = "nothing says how long the training is"
            bad_option(title, "give its rows or tokens: `--samples 10M`, `--tokens 300G`")
        steps: dict[int, float] = {}
        for text in self.samples:
            row_text, _, total_text = text.rpartition("=")
            steps[parse_count(row_text, "--samples") if row_text else rows] = parse_count(
                total_text, "--samples"
            )
        if any(total_text < row_text for row_text, total_text in steps.items()):
            bad_option(
                "a training has fewer rows than one of its steps", "give all: `--samples 10M`"
            )
        return steps

    def _steps_from_tokens(self, rows: int, length: int) -> Mapping[int, float]:
        assert self.tokens is not None
        count = parse_count(self.tokens, "--tokens")
        if self.samples:
            bad_option("`--tokens` and `--samples` both say how long it is", "give one of them")
        if not length:
            bad_option("rows of this model's batch have no tokens", "give rows: `--samples 10M`")
        if count < rows * length:
            bad_option("a training has fewer tokens than one of its steps", "`--tokens 300G`")
        return {rows: count / length}

    def _deadline_seconds(self) -> float:
        if self.deadline is None:
            return math.inf
        number, unit = self.deadline[:-1], self.deadline[-1:].lower()
        try:
            seconds = float(number) * TIMES[unit]
        except (ValueError, KeyError):
            bad_option(f"cannot read `--deadline {self.deadline}`", "write `72h`, `90m` or `3d`")
        check_positive("deadline", seconds)
        return seconds


def parse_count(text: str, option: str) -> int:
    """Parse a number of rows or tokens: 4M is 4 x 2^20; refuses S109."""
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    if unit not in UNITS or not number.isdecimal() or int(number) < 1:
        bad_option(f"cannot read `{option} {text}`", f"write `{option} 4M`: 4 x 2^20")
    return int(number) * UNITS[unit]
