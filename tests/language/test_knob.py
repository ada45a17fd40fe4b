"""Knobs: their types, domains and settings."""

from typing import Any

import pytest

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import NOWHERE, Source
from schedlang.language import nodes as n
from schedlang.language.knob import Knob, find_alternatives, make_knob, refuse_unknown_settings
from schedlang.language.syntax import parse
from schedlang.language.value import Names


def parse_knob(text: str, **settings: Any) -> Knob:
    """The knob of a declaration, with these settings."""
    node = parse(Source("gpt2.sched", f"schedule 1\n\n\nknob {text}\n")).items[0]
    assert isinstance(node, n.Knob)
    return make_knob(node, Names(), settings)


@pytest.mark.parametrize(
    "text, settings, value",
    [
        ("tp: int = 2 in [1, 2, 4]", {}, 2),
        ("tp: int = 2 in [1, 2, 4]", {"tp": "4"}, 4),
        ("m: int = 16 in 4..64", {"m": 64}, 64),
        ("lr: float = 1", {}, 1.0),
        ("lr: float = 1e-3 in 1e-5..1", {"lr": "0.5"}, 0.5),
        ("up: bool = true", {"up": "false"}, False),
        ("how: choice = full in [none, full]", {"how": "none"}, "none"),
        ("free: int", {"free": 3}, 3),
    ],
)
def test_values(text: str, settings: dict[str, Any], value: object) -> None:
    """A knob's value is its setting, else its default, converted to its type."""
    result = parse_knob(text, **settings).value
    assert result == value and isinstance(result, bool) == isinstance(value, bool)


@pytest.mark.parametrize(
    "text, settings, code, said",
    [
        ("tp: int = 2 in [1, 2, 4]", {"tp": 3}, "S103", "set `tp` to one of [1, 2, 4]"),
        ("tp: int = 3 in [1, 2, 4]", {}, "S103", "default"),
        ("m: int = 16 in 4..64", {"m": "65"}, "S103", "choose from 4..64"),
        ("tp: int = 2", {"tp": "two"}, "S102", "`tp` cannot be `two`"),
        ("tp: int = 2.5", {}, "S102", "must be of type int"),
        ("up: bool = 1", {}, "S102", "must be of type bool"),
        ("up: bool = true", {"up": "maybe"}, "S102", "cannot be `maybe`"),
        ("x: number = 1", {}, "S102", "choose one of `int`"),
        ("x: inte = 1", {}, "S102", "did you mean `int`?"),
        ("x: int", {}, "S105", "--knob x="),
        ("x: int = 1 in 5..2", {}, "S102", "smaller to the larger"),
        ("x: int = 1 in 5", {}, "S102", "a list or an interval"),
    ],
)
def test_refusals(text: str, settings: dict[str, Any], code: str, said: str) -> None:
    """A value of the wrong type or outside the domain is refused, with the allowed values."""
    with pytest.raises(Refusal) as caught:
        parse_knob(text, **settings)
    assert caught.value.diagnostic.code == code
    assert said in caught.value.render()


def test_the_message_of_a_wrong_setting() -> None:
    """The whole message for a setting outside the domain."""
    with pytest.raises(Refusal) as caught:
        parse_knob("tp: int = 2 in [1, 2, 4]", tp=3)
    assert (
        caught.value.render()
        == """\
error[S103]: `tp` cannot be 3
 --> gpt2.sched:4:21
  |
4 | knob tp: int = 2 in [1, 2, 4]
  |                     ^^^^^^^^^ its allowed values
  |
  = help: set `tp` to one of [1, 2, 4]"""
    )


def test_unknown_setting() -> None:
    """A setting of an unknown knob is refused, never ignored."""
    tp = parse_knob("tp: int = 2")
    refuse_unknown_settings({"tp": 1}, {"tp": tp}, NOWHERE)
    with pytest.raises(Refusal, match="did you mean `tp`"):
        refuse_unknown_settings({"tpp": 1}, {"tp": tp}, NOWHERE)


def test_alternatives() -> None:
    """`find_alternatives` finds the values of the domain that satisfy a requirement."""
    tp = parse_knob("tp: int = 3 in 1..6")
    assert find_alternatives({"tp": tp}, lambda new: 12 % new["tp"] == 0) == [
        "`tp` may be `1`, `2`, `4`, `6`"
    ]
