"""Limits of a search: read from options of the command line, and checked against settings."""

from __future__ import annotations

from collections.abc import Iterable

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.limits import FORBID, LEAST, PIN, Limits, Value
from schedlang.passes.planner.values import Setting


def setting_values(setting: Setting) -> dict[str, Value]:
    """Return the value of every name that limits know, of a setting that has its stages."""
    placement, recomputed = setting.placement, sum(setting.again)
    return {
        "dp": setting.dp,
        "pp": setting.pp,
        "tp": placement.tp,
        "cp": placement.cp,
        "ep": placement.ep,
        "rows": placement.rows,
        "micro": setting.micro,
        "chunks": setting.chunks,
        "slices": placement.slices,
        "zero": setting.zero,
        "sequence": placement.sequence,
        "order": setting.order,
        "axes": "-".join(setting.axes),
        "offload": placement.offload,
        "again": "none" if not recomputed else "all" if setting.again == setting.cuts else "some",
    }


def satisfies_limits(limits: Limits, setting: Setting) -> bool:
    """Return whether a setting satisfies all limits."""
    return all(limits.admits(*pair) for pair in setting_values(setting).items())


def parse_limits(
    pin: Iterable[str] = (), forbid: Iterable[str] = (), least: Iterable[str] = ()
) -> Limits:
    """Parse the options `--pin`, `--forbid` and `--least`: `tp=4`, of several values `tp=2,4`.

    Raises Refusal S106 for an unknown name, S109 for a value that cannot be read or met.
    """
    limits = Limits()
    for kind, option, texts in ((PIN, "--pin", pin), (FORBID, "--forbid", forbid)):
        for text in texts:
            limits = limits.with_limit(kind, *_read(option, text))
    for text in least:
        limits = limits.with_limit(LEAST, *_read("--least", text))
    return limits


def parse_question(text: str) -> Limits:
    """Parse the limits of a question, separated by spaces: `tp=4 order=GPipe`."""
    return parse_limits(pin=text.split())


def _read(option: str, text: str) -> tuple[str, tuple[Value, ...]]:
    name, equals, values = (part.strip() for part in text.partition("="))
    if not equals or not values:
        message = f"cannot read `{option} {text}`"
        raise Refusal.of("S109", message, helps=(f"write a name and its value: `{option} tp=4`",))
    return name, tuple(_value(value.strip()) for value in values.split(","))


def _value(text: str) -> Value:
    """Parse a number, true or false, or a word."""
    if text in ("true", "false"):
        return text == "true"
    return int(text) if text.isdecimal() else text
