"""Expressions: their values, which attributes of a model they may read, and which are refused."""

import pytest

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import NOWHERE
from schedlang.ir.placement import P, R, S
from schedlang.language.syntax import parse_expr
from schedlang.language.value import UNKNOWN, Choice, Names, Symbol, SymbolicCall, evaluate
from tests.toys import gpt_tree

NAMES = Names(
    knobs={"micro": 16, "mode": Choice.of("full", "mode", ["none", "full"]), "tp": 4},
    axes={"tp": 4, "dp": 2},
    arguments={"seq": True, "at_": Symbol("hidden")},
    model=gpt_tree(),
)


def evaluate_text(text: str, names: Names = NAMES) -> object:
    """The value of an expression, with the names of this file."""
    return evaluate(parse_expr(text, NOWHERE), names)


@pytest.mark.parametrize(
    "text, result",
    [
        ("1 + 2 * 3 - 4", 3),
        ("(1 + 2) * 3", 9),
        ("7 // 2 % 2", 1),
        ("-3 + 1", -2),
        ("micro % tp == 0", True),
        ("tp * dp", 8),
        ("not seq or 1 < 2 and 2 <= 2", True),
        ("mode == full", True),
        ("mode != none", True),
        ("model.config.n_head % 4 == 0", True),
        ("model.config.nested.n_layer", 4),
        ("model.config.sizes", (1, 2)),
        ("[1, 2, x]", (1, 2, "x")),
        ("(1, 2)", (1, 2)),
        ("(1)", 1),
        ("40GiB", 40 * 2**30),
        ("2 * 1KiB < 1MiB", True),
        ("1.5ms", 0.0015),
        ("1e-5", 1e-5),
        ('"a b"', "a b"),
        ("col", Symbol("col")),
        ("liger.rms_norm", Symbol("liger.rms_norm")),
        ("S(out, blocks=3)", S("out", 3)),
        ("S(out, blocks=[8, 4, 4])", S("out", (8, 4, 4))),
        ("S(-1)", S(-1)),
        ("S(tp)", S("tp")),
        ("S(seq)", S("seq")),
        ("S(at_)", S("hidden")),
        ("R", R),
        ("P(sum)", P("sum")),
        ("group(4, by=x)", SymbolicCall("group", (4,), (("by", "x"),))),
    ],
)
def test_values(text: str, result: object) -> None:
    """An expression has the value that it has in arithmetic."""
    assert evaluate_text(text) == result


def test_an_axis_is_a_size_and_a_name() -> None:
    """An axis counts as its size in arithmetic and keeps its name as an argument."""
    axis = evaluate_text("tp")
    assert axis == 4 and axis.name == "tp"  # type: ignore[attr-defined]
    assert type(evaluate_text("tp * 2")) is int


def test_without_a_model() -> None:
    """What needs the model is unknown without it, unless the rest decides."""
    blind = Names(knobs={"tp": 2})
    assert evaluate_text("model.config.n_head % tp == 0", blind) is UNKNOWN
    assert evaluate_text("model.config.n_head == 1 and false", blind) is False
    assert evaluate_text("S(out, blocks=model.config.n)", blind) is UNKNOWN


@pytest.mark.parametrize(
    "text, code, said",
    [
        ("1 // 0", "S107", "division by zero"),
        ("micro % (tp - 4)", "S107", "is 0"),
        ("tpp * 2", "S210", "did you mean `tp`?"),
        ("zzzz == 2", "S210", "the names are `seq`, `at_`, `tp`, `dp`, `micro`"),
        ("mode == ful", "S303", "did you mean `full`?"),
        ("mode + 1", "S304", "this operator needs numbers"),
        ("[1] < [2]", "S304", "cannot compare"),
        ("1 and true", "S304", "this must be `true` or `false`"),
        ('"a" * 99999999', "S304", "this operator needs numbers"),
        ("a @ b", "S304", "pattern"),
        ("model.config.n_heed", "S206", "did you mean `n_head`?"),
        ("model.config.computed", "S206", "not a plain value"),
        ("model.config.method", "S206", "not a plain value"),
        ("model.config._secret", "S206", "not a plain value"),
        ("model.config.__class__", "S206", "not a plain value"),
        ("model.config", "S206", "is a Config"),
        ("model.nothing", "S206", "no attribute `nothing`"),
        ("S(out, block=3)", "S302", "it takes `blocks`"),
        ("S()", "S305", "takes one dim"),
        ("S(out, blocks=0)", "S304", "`blocks` must be the number of blocks"),
        ("P(mean)", "S303", "`P(sum)`"),
    ],
)
def test_refusals(text: str, code: str, said: str) -> None:
    """A meaningless expression is refused with its reason; nothing of the model is ever run."""
    with pytest.raises(Refusal) as caught:
        evaluate_text(text)
    assert caught.value.diagnostic.code == code
    assert said in caught.value.render()
