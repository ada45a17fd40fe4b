"""Primitive classes: what they must define, how arguments are bound, conflicts, and `explain`."""

from collections.abc import Iterator
from dataclasses import field
from typing import Any, Literal

import pytest

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import Source, Span
from schedlang.ir.placement import P, Placement, R, S
from schedlang.ir.primitive import Primitive, isolated_registry, refuse, registry, relation_of
from schedlang.language import manual
from schedlang.language.kinds import Argument, Axes, Axis, Many, Rest, bind
from schedlang.language.value import UNKNOWN, AxisSize, Symbol

SPAN = Span(Source("x", "split(col, over=tp)"), 1, 1, 1, 20)
AXES = {"tp": 2, "dp": 4}


class WithCheck:
    """The methods that every primitive needs."""

    def check(self, site: Any, plan: Any) -> None:
        pass


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """Run each test with an empty registry."""
    with isolated_registry(keep=[]):
        yield


@pytest.fixture
def split() -> type[Primitive]:
    class split(WithCheck, Primitive):
        """Split the parameters of a module."""

        style: Literal["col", "row", "vocab"] | None = None
        over: Axis = field(kw_only=True)
        blocks: int | tuple[int, ...] = 1
        tensors: Rest[Placement] = ()
        example = "h  split(col, over=tp)"
        reads = frozenset({"structure", "shape"})
        writes = frozenset({"placement"})
        gives_up = frozenset({"rounding"})

    return split


def argument(value: object, name: str | None = None) -> Argument:
    """An argument with a span."""
    return Argument(name, value, SPAN, SPAN)


def bind_args(kind: type[Primitive], *args: object, **keywords: object) -> Any:
    """The row of a primitive with these arguments."""
    arguments = [argument(a) for a in args] + [argument(v, k) for k, v in keywords.items()]
    return bind(kind, arguments, SPAN, AXES)


def bind_refusal(kind: type[Primitive], *args: object, **keywords: object) -> Refusal:
    """The refusal of a primitive with these arguments."""
    with pytest.raises(Refusal) as caught:
        bind_args(kind, *args, **keywords)
    return caught.value


@pytest.fixture
def many() -> type[Primitive]:
    class many(WithCheck, Primitive):
        """Takes several kinds of arguments."""

        what: Many[Literal["forward", "backward"]] = ()
        over: Axes = ()
        to: Literal["cpu", "disk"] = "cpu"
        rate: float = 0.5
        on: bool = False
        save: tuple[str, ...] = ()
        limit: int | None = None
        example = "many(forward)"
        takes = "model"

    return many


def test_fields_are_the_arguments(split: type[Primitive], many: type[Primitive]) -> None:
    """Arguments become fields of their declared types: by position, by name, or by a free name."""
    split_row = bind_args(
        split, Symbol("col"), over=AxisSize.of("tp", 2), blocks=(4, 2), bias=R, out=S(-1)
    )
    assert (split_row.style, split_row.over, split_row.blocks) == ("col", "tp", (4, 2))
    assert split_row.tensors == (("bias", R), ("out", S(-1)))
    assert split_row == bind_args(split, "col", over="tp", blocks=(4, 2), bias=R, out=S(-1))
    many_row = bind_args(
        many, "forward", "backward", over=AxisSize.of("dp", 4), rate=1, save=("a", "b")
    )
    assert (
        many_row.what == ("forward", "backward")
        and many_row.over == ("dp",)
        and many_row.rate == 1.0
    )
    assert bind_args(many, over=("dp", "tp")).over == ("dp", "tp")
    assert bind_args(many, limit=Symbol("none")).limit is None
    assert bind_args(many, limit=UNKNOWN).limit is UNKNOWN
    assert isinstance(hash(split_row), int)


@pytest.mark.parametrize(
    "args, named, code, said",
    [
        (("rows",), {"over": "tp"}, "S303", "`split` has no style `rows`"),
        (("rows",), {"over": "tp"}, "S303", "choose one of `col`, `row`, `vocab`"),
        (("col",), {"over": "tpp"}, "S204", "did you mean `over=tp`?"),
        (("col",), {"over": "tpp"}, "S204", "the mesh is tp=2, dp=4"),
        (("col",), {"over": 3}, "S304", "`over` of `split` must be an axis of the mesh"),
        (("col",), {"over": "tp", "block": 3}, "S302", "did you mean `blocks`?"),
        (("col", 2, 5), {"over": "tp"}, "S302", "no further positional argument"),
        (("col", 2), {"blocks": 2, "over": "tp"}, "S302", "`blocks` is given twice"),
        (("col",), {}, "S305", "for example `h  split(col, over=tp)`"),
        (("col",), {"over": "tp", "blocks": "x"}, "S304", "an integer or a list"),
        (("col",), {"over": "tp", "bias": 3}, "S304", "`S(dim)` or `R` or `P(sum)`"),
        ((), {"over": "tp", "bias": P("sum")}, "", ""),
    ],
)
def test_mistakes_in_arguments(
    split: type[Primitive], args: tuple[object, ...], named: Any, code: str, said: str
) -> None:
    """Each kind of wrong argument has its code, and the message says what is right."""
    if not code:
        assert bind_args(split, *args, **named).tensors == (("bias", P("sum")),)
        return
    refusal = bind_refusal(split, *args, **named)
    assert [d.code for d in refusal.diagnostics] == [code]
    assert said in refusal.render()


def test_more_mistakes(many: type[Primitive]) -> None:
    """Booleans are not numbers, lists are not single values; several mistakes are reported
    together."""
    assert "must be an integer" in bind_refusal(many, limit=True).render()
    assert "`true` or `false`" in bind_refusal(many, on=1).render()
    assert "a list of names" in bind_refusal(many, save=3).render()
    assert (
        "each value in `save` of `many` must be a name"
        in bind_refusal(many, save=("a", 3)).render()
    )
    assert "did you mean `dp`?" in bind_refusal(many, over=("tp", "dpp")).render()
    refusal = bind_refusal(many, "sideways", to="tape", nothing=1)
    assert sorted(d.code for d in refusal.diagnostics) == ["S302", "S303", "S303"]
    assert "no mesh is declared" in str(
        pytest.raises(Refusal, bind, many, [argument("tp", "over")], SPAN, {}).value
    )


def test_a_primitive_is_whole() -> None:
    """A class without a docstring, an example or a check cannot be a primitive."""
    with pytest.raises(Refusal) as caught:

        class nothing(Primitive):
            pass

    missing = "no docstring and no example and no check"
    assert missing in caught.value.diagnostic.title
    assert "nothing" not in registry()
    with pytest.raises(Refusal, match="facets that exist"):

        class odd(WithCheck, Primitive):
            """Writes what does not exist."""

            example = "odd()"
            writes = frozenset({"weather"})


def test_one_name_one_primitive(split: type[Primitive]) -> None:
    """A second primitive of the same name is refused; both modules are named."""
    body = {
        "__doc__": "Another.",
        "__module__": "elsewhere",
        "example": "split()",
        "check": WithCheck.check,
    }
    with pytest.raises(Refusal, match=f"one in {split.__module__}, one in elsewhere"):
        type("split", (Primitive,), body)
    assert registry()["split"] is split


def test_refuse_leaves_the_place_to_the_caller() -> None:
    """`refuse` raises without a span; the caller that knows the row attaches it."""
    with pytest.raises(Refusal) as caught:
        refuse("S401", "no weight", "it is a Block", notes=["n"], helps=["h"])
    assert caught.value.at(SPAN).diagnostic.primary.span == SPAN


def test_conflicts_follow_from_facets() -> None:
    """Only reads and writes decide how two primitives relate."""

    def made(name: str, reads: set[str], writes: set[str]) -> type[Primitive]:
        body = {"__doc__": name, "__module__": name, "example": f"{name}()"}
        body |= {"reads": frozenset(reads), "writes": frozenset(writes)}  # type: ignore[dict-item]
        return type(name, (WithCheck, Primitive), body)

    pad = made("pad", {"structure"}, {"shape"})
    shard = made("shard", {"structure", "shape"}, {"placement"})
    keep = made("keep", {"structure"}, {"recompute"})
    assert relation_of(pad, shard) == "order"
    assert relation_of(shard, pad) == "clash"
    assert relation_of(shard, keep) == "commute"
    assert relation_of(shard, shard) == "both"


def test_explain(split: type[Primitive]) -> None:
    """The page of a primitive is generated from its class."""
    text = manual.explain(split)
    assert text.startswith("split(style=none, over=axis, blocks=1, name=S(dim) | R | P(sum), ...)")
    for fragment in (
        "Split the parameters",
        "h  split(col, over=tp)",
        "reads     shape, structure",
    ):
        assert fragment in text
    assert "gives up  rounding" in text
    assert manual.to_json(split)["writes"] == ["placement"]
