"""Words of other systems and papers are answered with the row that is written here."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import schedlang
from schedlang.diagnostics.diagnostic import Diagnostic, Refusal
from schedlang.diagnostics.other_systems import ARGUMENTS, ORDER_NAMES, VERBS
from schedlang.diagnostics.other_systems import ORDERS as OTHER_ORDERS
from schedlang.diagnostics.source import NOWHERE, Source
from schedlang.ir.plan import Plan
from schedlang.ir.primitive import load_all, registry
from schedlang.language.kinds import bind, signature_of, words_of
from schedlang.language.nodes import Call
from schedlang.language.suggest import CallArgument, correct_call, format_argument
from schedlang.language.syntax import parse, parse_expr
from schedlang.language.value import Bytes, Seconds, Symbol
from schedlang.passes.elaborate import state
from schedlang.passes.elaborate.expand import expand
from schedlang.passes.elaborate.state import State
from schedlang.pipeline.schedules import ORDERS, find_order
from tests.samples import SAMPLES

FOUND: dict[str, Any] = tomllib.loads(
    (Path(__file__).parents[1] / "data" / "spellings.toml").read_text()
)
SAID = FOUND.pop("samples")["answers"]
AXES = (
    *("dp", "dp2", "pp", "tp", "cp", "ep", "sp", "r", "c", "x", "y", "z", "u", "grp", "rep"),
    *("node", "nodes", "gpu", "ring", "team", "head", "ctx", "vw"),
)
HEAD = f"""schedule 1

mesh({", ".join(f"{axis}=2" for axis in AXES)})
knob k: int = 2
pattern bias_gelu(x, b) {{ gelu(x + b) }}

"""


def told(row: str) -> tuple[Diagnostic, ...]:
    """What `check` says of one row; nothing where it is legal."""
    try:
        expand(parse(Source("x.sched", f"{HEAD}{row}\n")), None)
    except Refusal as refusal:
        return refusal.diagnostics
    return ()


def offered(helps: tuple[str, ...]) -> list[str]:
    """The rows in what a message offers."""
    quoted = (fragment for help_ in helps for fragment in re.findall(r"`([^`]+)`", help_))
    rows = [re.fullmatch(r"(?:\S+(?:, \S+)*  )?([a-z_]+)\(.*\)", one) for one in quoted]
    return [one[0] for one in rows if one and "..." not in one[0]]


def answer(row: str) -> str:
    """The first help of the first message, the code of one without, or "taken"."""
    found = told(row)
    return "taken" if not found else (*found[0].helps, found[0].code)[0]


ROWS = [
    pytest.param(row, said, id=f"{key} {row}")
    for key, one in FOUND.items()
    for row, said in one["rows"]
]


@pytest.mark.parametrize("row, said", ROWS)
def test_each_row_is_taken_or_answered(row: str, said: str) -> None:
    """What the table says happens, and rows that are offered are legal."""
    assert answer(row) == said
    for one in (one for found in told(row) for one in offered(found.helps)):
        assert not told(one), f"{row}: {one}\n{told(one)[0].render()}"


# what is wrong with a row, whatever its modules
OF_ARGUMENTS = frozenset(
    ("S302", "S303", "S304", "S305", "S306", "S422", "S840", "S842", "S851", "S856", "S870", "S890")
)


class Block(nn.Module):
    """What rows of any verb find some modules in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """One block of a chain."""
        made: Tensor = x + self.down(self.up(self.norm(x)))
        return made


def _calls_offered() -> list[str]:
    """Every call that is taken, offered for another or given as an example, once."""
    load_all()
    rows = [one.example for one in registry().values()]
    rows += [other.row for table in ARGUMENTS.values() for other in table.values()]
    rows += [row for helps in VERBS.values() for row in offered(helps)]
    for row in (row for one in FOUND.values() for row, _ in one["rows"]):
        found = told(row)
        rows += [row] if not found else [o for d in found for o in offered(d.helps)]
    state = (re.search(r"[a-z_]+\(.*\)$", row) for row in rows if "{}" not in row)
    return list(dict.fromkeys(call[0] for call in state if call))


def test_no_row_that_is_offered_is_refused_for_its_arguments() -> None:
    """With modules as without a model: what a row lacks or says twice is told before there is one.

    Found here: `compress(gradients, int4, over=dp)` was offered and taken, until it was planned.
    """
    head = expand(parse(Source("x.sched", HEAD)), None)
    model = nn.Sequential(*(Block() for _ in range(4)))
    plan = replace(schedlang.create_schedule(model).plan(), mesh=head.mesh)
    rows = _calls_offered()
    codes = {text: _codes(text, head, plan) for text in rows}
    refused = {text: found for text, found in codes.items() if found <= OF_ARGUMENTS}
    assert len(rows) > 90 and not refused, refused


def _codes(text: str, head: State, plan: Plan) -> set[str]:
    """What a call is refused with, about the model and about its layers; "" where it is taken."""
    call = parse_expr(text, NOWHERE)
    assert isinstance(call, Call)
    kind = registry()[call.name.text]
    row = bind(kind, state.evaluate_arguments(call, head.names), call.span, head.axes)
    row = state.resolve_pattern(row, head, call.span)
    found = set()
    for sites in [("",)] if kind.takes == "model" else [("",), ("0", "1", "2"), ("0.up", "2.up")]:
        try:
            plan.add(row, sites)
            found.add("")
        except Refusal as refusal:
            found.add(refusal.diagnostic.code)
    return found


def test_rows_said_in_words() -> None:
    """A row as prose is refused at its place, with the form of a row where it is near to one."""
    said = [words for one in FOUND.values() for words in one["words"]]
    answers = {words: told(words) for words in said}
    assert all(answers.values()), [words for words, found in answers.items() if not found]
    formed = [w for w, (first, *_) in answers.items() if first.code == "S003" and first.helps]
    assert len(said) > 200 and len(formed) > 0.8 * len(said), len(formed) / len(said)
    assert "`zero(stage=0, over=dp)`" in answers["replicate model over dp"][0].helps[0]


def test_samples_of_the_description(tmp_path: Path) -> None:
    """Every row of the sample files is taken, but for those of the table: each with its answer."""
    for name, text in SAMPLES.items():
        (tmp_path / name).write_text(text)
    found = []
    for name in SAMPLES:
        path = tmp_path / name
        try:
            expand(parse(Source(str(path), path.read_text())), None)
        except Refusal as refusal:
            lines = path.read_text().split("\n")
            for one in refusal.diagnostics:
                row = " ".join(lines[one.primary.span.line - 1].split())
                found.append([name, row, (*one.helps, one.code)[0]])
    assert found == SAID


def test_orders_of_other_names() -> None:
    """What stands for an order is one, and is no name of its own; a near name is offered alone."""
    for name, order in OTHER_ORDERS.items():
        assert find_order(order)
        with pytest.raises(ValueError, match=re.escape(f'write `order="{order}"`')):
            find_order(name)
    assert answer('pipeline(order="nothing like it", micro=4)').count(",") == len(ORDERS) - 1
    assert answer("pipeline(order=dualpipevv, micro=4)") == 'write `order="DualPipeV"`'


def test_names_of_orders_are_known_without_them() -> None:
    """A file is read without importing the orders, by their names: these, and no others."""
    names = {name.lower() for one in ORDERS for name in (one.name, *one.aliases)}
    assert names == ORDER_NAMES and not names & set(OTHER_ORDERS)


def test_the_table_is_of_what_there_is() -> None:
    """Verbs that there are, arguments and words that there are not, and rows that are legal."""
    load_all()
    for verb, table in ARGUMENTS.items():
        own = signature_of(registry()[verb])
        for key, other in table.items():
            name, equals, word = key.partition("=")
            assert equals or key not in own.keywords, (verb, key)
            rows = [other.row] if other.row and "{}" not in other.row else []
            assert not any(told(row) for row in rows), rows
            assert not word or word not in words_of(own.types.get(name)), (verb, key)
    for verb, helps in VERBS.items():
        assert verb not in registry()
        assert all(not told(row) for row in offered(helps)), verb


@pytest.mark.parametrize("verb", sorted(ARGUMENTS))
def test_what_is_written_instead_is_legal(verb: str) -> None:
    """Each entry, in some call of the verb, offers a call or a row that is legal."""
    load_all()
    dead = [key for key in ARGUMENTS[verb] if not any(map(_helps, _calls(verb, key)))]
    assert not dead, dead


def _helps(row: str) -> bool:
    """Whether something is offered for a row, and all of it is legal."""
    found = [one for one in told(row) if one.helps]
    if not found or not found[0].helps[0].startswith(("write ", "its row here")):
        return False
    return not any(told(one) for one in offered(found[0].helps))


def _calls(verb: str, key: str) -> Iterator[str]:
    """The verb's example, what of it has to be said, and these with each other word that the verb
    has, without axes and over two; with an argument of other words."""
    example = registry()[verb].example
    path, _, call = example.rpartition("  ")
    name, _, word = key.partition("=")
    place = _place(verb, name)
    bases = [call, re.sub(r"(\()[a-z0-9]+(?:, |(?=\)))", r"\1", call), *_varied(verb, call)]
    for base in bases:
        tried = (word, f"[{word}]", f"{word}(2)") if word else ("2", "true", "gpipe", "2GiB")
        for value in tried:
            yield f"{path}  {_with(base, value, name, place)}".strip()


def _varied(verb: str, call: str) -> Iterator[str]:
    """A call with another word in the place of one, with two axes, and without any."""
    own = signature_of(registry()[verb])
    for kind in map(own.types.get, own.positional):
        words = words_of(kind)
        said = next((word for word in words if re.search(rf"[( ]{word}\b", call)), None)
        for word in words if said is not None else ():
            other = re.sub(rf"(?<=[( ]){said}\b", word, call)
            yield from (other, re.sub(r", over=\w+", "", other))
    yield re.sub(r"over=\w+", "over=(node, gpu)", call)


def _place(verb: str, name: str) -> int | None:
    """Where an argument stands that needs no name; None: it has one."""
    own = signature_of(registry()[verb])
    order: tuple[str, ...] = (own.many,) if own.many else own.positional
    return order.index(name) if name in order else None


def _with(call: str, value: str, name: str, place: int | None) -> str:
    """A call with another argument, in the place of the one of its name."""
    verb, _, inside = call[:-1].partition("(")
    given = [one for one in re.split(r", (?![^(\[]*[)\]])", inside) if one]
    given = [one for one in given if not one.startswith(f"{name}=")]
    bare, named = [x for x in given if "=" not in x], [x for x in given if "=" in x]
    if place is not None and place <= len(bare):
        bare[place : place + 1] = [value]
    elif name:
        named.append(f"{name}={value}")
    else:
        bare.append(value)
    return f"{verb}({', '.join([*bare, *named])})"


def test_a_call_is_mended_whole() -> None:
    """All words of a call at once, each with its own reason; what is legal stays as it was."""
    first, second = told("x  fuse(bias_gelu, with=triton, rng=philox, rounding=eager)")
    whole = "write `fuse(bias_gelu, backend=rowwise, rounding=eager)`"
    assert first.helps == second.helps == (whole,)
    assert not first.notes and "drawn as the model draws" in second.notes[0]
    both = told("offload(params, optimizer, to=nvme)")
    assert both[0].helps == (
        "write `offload(parameters, to=disk)`",
        "and a separate row below: `offload(optimizer, to=cpu)`",
    )


@pytest.mark.parametrize(
    "row, said",
    [
        ("checkpoint(budget=3GiB)", "checkpoint(plan=rotor, memory=3GiB)"),
        ("checkpoint(plan=pareto, budget=3GiB)", "checkpoint(plan=pareto, memory=3GiB)"),
        ("checkpoint(budget=3GiB, plan=pareto)", "checkpoint(plan=pareto, memory=3GiB)"),
        ("checkpoint(dtr, memory=3GiB)", "checkpoint(plan=dtr, memory=3GiB)"),
        ("checkpoint(memory=3GiB, dtr)", "checkpoint(memory=3GiB, plan=dtr)"),
    ],
)
def test_what_is_said_is_kept(row: str, said: str) -> None:
    """What goes with an argument in another's place gives way to what the call says, in any
    order."""
    assert answer(f"layers.*  {row}") == f"write `{said}`"


def test_no_call_is_offered_that_is_not_legal() -> None:
    """Where another argument is wrong besides, the example is offered."""
    found = told("x  offload(grads, to=moon)")
    assert "offload(activations, to=cpu)" in found[0].helps[0]


def test_values_as_they_are_written() -> None:
    """Sizes in whole units, words bare, texts in quotes."""
    values = [Bytes(2**31), Bytes(1000), Seconds(0.002), Symbol("a"), "b c", True, (1, 2.5)]
    assert list(map(format_argument, values)) == [
        "2GiB",
        "1000B",
        "2ms",
        "a",
        '"b c"',
        "true",
        "[1, 2.5]",
    ]
    assert correct_call("fuse", [CallArgument("pattern", "bias_gelu", False)], ("pattern",)) is None


def test_a_view_of_tokens_names_the_attention() -> None:
    """`S(seq, layout=zigzag)` on inputs is said by the row of the attention."""
    row = "shard(input_ids=S(seq, layout=zigzag), over=cp)"
    assert offered(told(row)[0].helps) == [
        "layers.*.attn  context_parallel(ring, over=cp, layout=zigzag)"
    ]


def test_in_python_as_in_text() -> None:
    """A call from Python gets the same answer in Python, at its line."""
    sch = schedlang.create_schedule(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(Refusal, match=re.escape('write `.checkpoint(save=["attention"])`')):
        sch["0"].checkpoint(save=["flash_attention"])
    with pytest.raises(Refusal, match=re.escape('`sch["layers.*"].checkpoint()` recomputes')):
        sch["0"].recompute()


def test_a_grade_is_what_is_given_up() -> None:
    """Nothing, rounding, and what a step relaxes besides; `undo` takes it back."""
    sch = schedlang.create_schedule(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    sch.mesh(dp=2)
    assert sch.grade == frozenset()
    with sch.step("fewer bits", relax=["dtype"]):
        sch["0"].cast("bf16")
    assert sch.grade == {"rounding", "dtype"} == sch.plan().gives_up
    sch.undo(to="fewer bits")
    sch["1"].checkpoint()
    assert sch.grade == frozenset()
    sch.zero(stage=1, over="dp")
    assert sch.grade == {"rounding"}
