"""What a user gives to `build` and `verify`, checked before anything is built (S618)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from schedlang.diagnostics.diagnostic import (
    Diagnostic,
    Facts,
    Label,
    Refusal,
    closest,
    kind_of,
    unknown,
)
from schedlang.diagnostics.source import python_span

NAMES = ("batch", "loss", "optimizer", "clip", "weight", "seed", "dropout", "compare", "wait")
VERIFIED = ("batch", "loss", "weight", "seed", "dtype", "shrink", "timeout")
DRAWN = ("native", "logical")
COMPARE = ("nothing", "build", "batches")  # what ranks compare before they trust each other


def check_options(
    args: Sequence[object], others: Mapping[str, object], given: Mapping[str, Any]
) -> None:
    """Refuse positions, names that `build` does not have, and values of the wrong kind."""
    _named("build", args, others, NAMES, "write `sch.build(batch=batch, loss=loss, optimizer=...)`")
    _batch(given["batch"])
    _functions(given)
    _optimizer(given["optimizer"])
    _numbers(given)
    _meeting(given)


def check_verified(
    args: Sequence[object], others: Mapping[str, object], given: Mapping[str, Any]
) -> None:
    """The same of what `verify` is given; words are those of a row, which Python adds otherwise."""
    words = args if all(isinstance(word, str) for word in args) else ()
    rest = () if words else args
    _named("verify", rest, others, VERIFIED, "write `sch.verify(batch=batch, loss=loss)`")
    if words or given["batch"] is None:
        row = ", ".join(f'"{word}"' for word in ("verify", *words))
        _refuse(
            "`verify` needs a batch to compare the program with the model",
            "give one: `sch.verify(batch=batch)`, and `loss=loss` if the model returns none",
            f"or add the row: `sch.row({row})`",
        )
    _functions(given)


def _named(
    verb: str,
    args: Sequence[object],
    others: Mapping[str, object],
    names: Sequence[str],
    written: str,
) -> None:
    if args:
        _refuse(
            f"`{verb}` takes its arguments by name, not {kind_of(args[0])} by position", written
        )
    for name in others:
        near = closest(name, names)
        help_ = f"did you mean `{near}`?" if near else f"it takes {', '.join(names)}"
        _refuse(f"`{verb}` has no argument `{name}`", help_, facts=unknown(name, names))


def _batch(batch: object) -> None:
    if batch is not None and not isinstance(batch, Mapping):
        _refuse(
            f"`batch` is {kind_of(batch)}, not a dict",
            "call it: `batch=batch(0)`"
            if callable(batch)
            else "give the keyword arguments of the model: `batch={'input_ids': ids, ...}`",
        )


def _functions(given: Mapping[str, Any]) -> None:
    signatures = {"loss": "loss(output, batch)", "weight": "weight(batch)"}
    for name, signature in signatures.items():
        value = given[name]
        if value is not None and not callable(value):
            _refuse(f"`{name}` is {kind_of(value)}", f"give a function `{signature}`")


def _optimizer(optimizer: object) -> None:
    if optimizer is not None and (isinstance(optimizer, type) or not callable(optimizer)):
        word = "a class" if isinstance(optimizer, type) else kind_of(optimizer)
        _refuse(
            f"`optimizer` must be a function of the parameters, not {word}",
            "give a function of them: `optimizer=lambda named: torch.optim.AdamW(named, lr=3e-4)`",
        )


def _numbers(given: Mapping[str, Any]) -> None:
    clip, seed = given["clip"], given["seed"]
    if clip is not None and (
        isinstance(clip, bool) or not isinstance(clip, int | float) or clip <= 0
    ):
        _refuse(f"`clip` is {clip!r}", "give the maximum gradient norm, a number above 0")
    drawn = given["dropout"]
    if drawn is not None and drawn not in DRAWN:
        _refuse(f"`dropout` is {drawn!r}", f"give one of {', '.join(map(repr, DRAWN))}")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        _refuse(f"`seed` is {seed!r}", "give an integer")


def _meeting(given: Mapping[str, Any]) -> None:
    compare, wait = given["compare"], given["wait"]
    if compare not in COMPARE:
        _refuse(f"`compare` is {compare!r}", f"give {', '.join(map(repr, COMPARE))}")
    if isinstance(wait, bool) or not isinstance(wait, int | float) or not wait > 0:
        _refuse(f"`wait` is {wait!r}", "give the seconds to wait until all ranks call `build`")


def _refuse(title: str, *helps: str, facts: Facts = ()) -> NoReturn:
    raise Refusal(Diagnostic("S618", title, Label(python_span()), helps=helps, facts=facts))
