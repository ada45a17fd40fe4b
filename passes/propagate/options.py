"""What a user gives to `build`, checked before anything is built (S618)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from schedlang.diagnostics.diagnostic import Diagnostic, Facts, Label, Refusal, closest, unknown
from schedlang.diagnostics.source import python_span

NAMES = ("batch", "loss", "optimizer", "clip", "weight", "seed", "dropout", "compare", "wait")
DRAWN = ("native", "logical")
COMPARE = ("nothing", "build", "batches")  # what ranks compare before they trust each other


def check_options(
    args: Sequence[object], others: Mapping[str, object], given: Mapping[str, Any]
) -> None:
    """Refuse positions, names that `build` does not have, and values of the wrong kind."""
    if args:
        _refuse(
            f"`build` takes its arguments by name, not a {type(args[0]).__name__} by position",
            "write `sch.build(batch=batch, loss=loss, optimizer=...)`",
        )
    for name in others:
        near = closest(name, NAMES)
        help_ = f"did you mean `{near}`?" if near else f"it takes {', '.join(NAMES)}"
        _refuse(f"`build` has no argument `{name}`", help_, unknown(name, NAMES))
    _batch(given["batch"])
    _functions(given)
    _numbers(given)
    _meeting(given)


def _batch(batch: object) -> None:
    if batch is not None and not isinstance(batch, Mapping):
        _refuse(
            f"`batch` is a {type(batch).__name__}, not a dict",
            "give the keyword arguments of the model: `batch={'input_ids': ids, ...}`",
        )


def _functions(given: Mapping[str, Any]) -> None:
    signatures = {"loss": "loss(output, batch)", "weight": "weight(batch)"}
    for name, signature in signatures.items():
        value = given[name]
        if value is not None and not callable(value):
            _refuse(f"`{name}` is a {type(value).__name__}", f"give a function `{signature}`")
    optimizer = given["optimizer"]
    if optimizer is not None and (isinstance(optimizer, type) or not callable(optimizer)):
        word = "a class" if isinstance(optimizer, type) else f"a {type(optimizer).__name__}"
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


def _refuse(title: str, help_: str, facts: Facts = ()) -> NoReturn:
    raise Refusal(Diagnostic("S618", title, Label(python_span()), helps=(help_,), facts=facts))
