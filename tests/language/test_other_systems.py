"""Words of other systems and papers: each is refused with the row to write in schedlang."""

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

SPELLINGS: dict[str, Any] = tomllib.loads(
    (Path(__file__).parents[1] / "data" / "spellings.toml").read_text()
)
SAMPLE_ANSWERS = SPELLINGS.pop("samples")["answers"]
AXES = (
    *("dp", "dp2", "pp", "tp", "cp", "ep", "sp", "r", "c", "x", "y", "z", "u", "grp", "rep"),
    *("node", "nodes", "gpu", "ring", "team", "head", "ctx", "vw"),
)
HEAD = f"""schedule 1

mesh({", ".join(f"{axis}=2" for axis in AXES)})
knob k: int = 2
pattern bias_gelu(x, b) {{ gelu(x + b) }}

"""


def check_row(row: str) -> tuple[Diagnostic, ...]:
    """The diagnostics of `check` for one row; none if it is legal."""
    try:
        expand(parse(Source("x.sched", f"{HEAD}{row}\n")), None)
    except Refusal as refusal:
        return refusal.diagnostics
    return ()


def offered_rows(helps: tuple[str, ...]) -> list[str]:
    """The rows in the helps of a message."""
    quoted = (fragment for help_ in helps for fragment in re.findall(r"`([^`]+)`", help_))
    rows = [re.fullmatch(r"(?:\S+(?:, \S+)*  )?([a-z_]+)\(.*\)", text) for text in quoted]
    return [text[0] for text in rows if text and "..." not in text[0]]


def first_answer(row: str) -> str:
    """The first help of the first diagnostic, or its code, or "taken" for a legal row."""
    diagnostics = check_row(row)
    return "taken" if not diagnostics else (*diagnostics[0].helps, diagnostics[0].code)[0]


ROWS = [
    pytest.param(row, said, id=f"{key} {row}")
    for key, one in SPELLINGS.items()
    for row, said in one["rows"]
]


@pytest.mark.parametrize("row, said", ROWS)
def test_each_row_is_taken_or_answered(row: str, said: str) -> None:
    """Each row gets the answer of the table, and every offered row is legal."""
    assert first_answer(row) == said
    for offer in (
        offer for diagnostic in check_row(row) for offer in offered_rows(diagnostic.helps)
    ):
        assert not check_row(offer), f"{row}: {offer}\n{check_row(offer)[0].render()}"


# codes of mistakes in a row's arguments, for any modules
ARGUMENT_CODES = frozenset(
    ("S302", "S303", "S304", "S305", "S306", "S422", "S840", "S842", "S851", "S856", "S870", "S890")
)


class Block(nn.Module):
    """A block with modules for the rows of every primitive."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """One block of a chain."""
        out: Tensor = x + self.down(self.up(self.norm(x)))
        return out


def _offered_calls() -> list[str]:
    """Every call that is legal, offered for another one, or given as an example; each once."""
    load_all()
    rows = [item.example for item in registry().values()]
    rows += [spelling.row for table in ARGUMENTS.values() for spelling in table.values()]
    rows += [row for helps in VERBS.values() for row in offered_rows(helps)]
    for row in (row for item in SPELLINGS.values() for row, _ in item["rows"]):
        diagnostics = check_row(row)
        rows += (
            [row]
            if not diagnostics
            else [offer for d in diagnostics for offer in offered_rows(d.helps)]
        )
    state = (re.search(r"[a-z_]+\(.*\)$", row) for row in rows if "{}" not in row)
    return list(dict.fromkeys(call[0] for call in state if call))


def test_no_row_that_is_offered_is_refused_for_its_arguments() -> None:
    """An offered row with wrong arguments is refused without a model already.

    Found here: `compress(gradients, int4, over=dp)` was offered and taken, until it was planned.
    """
    head = expand(parse(Source("x.sched", HEAD)), None)
    model = nn.Sequential(*(Block() for _ in range(4)))
    plan = replace(schedlang.create_schedule(model).plan(), mesh=head.mesh)
    rows = _offered_calls()
    codes = {text: _refusal_codes(text, head, plan) for text in rows}
    refused = {text: refusals for text, refusals in codes.items() if refusals <= ARGUMENT_CODES}
    assert len(rows) > 90 and not refused, refused


def _refusal_codes(text: str, head: State, plan: Plan) -> set[str]:
    """The codes that a call is refused with on the model and on its layers; "" where it is
    legal."""
    call = parse_expr(text, NOWHERE)
    assert isinstance(call, Call)
    kind = registry()[call.name.text]
    row = bind(kind, state.evaluate_arguments(call, head.names), call.span, head.axes)
    row = state.resolve_pattern(row, head, call.span)
    results = set()
    for sites in [("",)] if kind.takes == "model" else [("",), ("0", "1", "2"), ("0.up", "2.up")]:
        try:
            plan.add(row, sites)
            results.add("")
        except Refusal as refusal:
            results.add(refusal.diagnostic.code)
    return results


def test_rows_said_in_words() -> None:
    """A row in prose is refused at its place, with the form of a row if it resembles one."""
    prose = [text for entry in SPELLINGS.values() for text in entry["words"]]
    answers = {text: check_row(text) for text in prose}
    assert all(answers.values()), [text for text, diagnostics in answers.items() if not diagnostics]
    formed = [
        w
        for w, (diagnostic, *_) in answers.items()
        if diagnostic.code == "S003" and diagnostic.helps
    ]
    assert len(prose) > 200 and len(formed) > 0.8 * len(prose), len(formed) / len(prose)
    assert "`zero(stage=0, over=dp)`" in answers["replicate model over dp"][0].helps[0]


def test_samples_of_the_description(tmp_path: Path) -> None:
    """Every row of the sample files is legal, except those that the table lists with their
    answers."""
    for name, text in SAMPLES.items():
        (tmp_path / name).write_text(text)
    answers = []
    for name in SAMPLES:
        path = tmp_path / name
        try:
            expand(parse(Source(str(path), path.read_text())), None)
        except Refusal as refusal:
            lines = path.read_text().split("\n")
            for diagnostic in refusal.diagnostics:
                row = " ".join(lines[diagnostic.primary.span.line - 1].split())
                answers.append([name, row, (*diagnostic.helps, diagnostic.code)[0]])
    assert answers == SAMPLE_ANSWERS


def test_orders_of_other_names() -> None:
    """Another system's name of a pipeline order is refused with ours; a similar name is offered
    alone."""
    for name, order in OTHER_ORDERS.items():
        assert find_order(order)
        with pytest.raises(ValueError, match=re.escape(f'write `order="{order}"`')):
            find_order(name)
    assert first_answer('pipeline(order="nothing like it", micro=4)').count(",") == len(ORDERS) - 1
    assert first_answer("pipeline(order=dualpipevv, micro=4)") == 'write `order="DualPipeV"`'


def test_names_of_orders_are_known_without_them() -> None:
    """`ORDER_NAMES` lists the registered orders, so that parsing does not import them."""
    names = {name.lower() for order in ORDERS for name in (order.name, *order.aliases)}
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
            assert not any(check_row(row) for row in rows), rows
            assert not word or word not in words_of(own.types.get(name)), (verb, key)
    for verb, helps in VERBS.items():
        assert verb not in registry()
        assert all(not check_row(row) for row in offered_rows(helps)), verb


@pytest.mark.parametrize("verb", sorted(ARGUMENTS))
def test_what_is_written_instead_is_legal(verb: str) -> None:
    """Each entry, in some call of the verb, offers a call or a row that is legal."""
    load_all()
    dead = [key for key in ARGUMENTS[verb] if not any(map(_helps, _call_variants(verb, key)))]
    assert not dead, dead


def _helps(row: str) -> bool:
    """Whether something is offered for a row, and all of it is legal."""
    found = [one for one in check_row(row) if one.helps]
    if not found or not found[0].helps[0].startswith(("write ", "its row here")):
        return False
    return not any(check_row(one) for one in offered_rows(found[0].helps))


def _call_variants(verb: str, key: str) -> Iterator[str]:
    """Yield variants of a verb's example with another argument, as the table's key says."""
    example = registry()[verb].example
    path, _, call = example.rpartition("  ")
    name, _, value_name = key.partition("=")
    position = _position_of(verb, name)
    bases = [call, re.sub(r"(\()[a-z0-9]+(?:, |(?=\)))", r"\1", call), *_changed_calls(verb, call)]
    for base in bases:
        values = (
            (value_name, f"[{value_name}]", f"{value_name}(2)")
            if value_name
            else ("2", "true", "gpipe", "2GiB")
        )
        for value in values:
            yield f"{path}  {_with_argument(base, value, name, position)}".strip()


def _changed_calls(verb: str, call: str) -> Iterator[str]:
    """Yield the call with another word for one of its choices, with two axes, and with none."""
    signature = signature_of(registry()[verb])
    for kind in map(signature.types.get, signature.positional):
        choices = words_of(kind)
        current = next((choice for choice in choices if re.search(rf"[( ]{choice}\b", call)), None)
        for choice in choices if current is not None else ():
            changed = re.sub(rf"(?<=[( ]){current}\b", choice, call)
            yield from (changed, re.sub(r", over=\w+", "", changed))
    yield re.sub(r"over=\w+", "over=(node, gpu)", call)


def _position_of(verb: str, name: str) -> int | None:
    """The position of an argument that needs no name, or None."""
    signature = signature_of(registry()[verb])
    order: tuple[str, ...] = (signature.many,) if signature.many else signature.positional
    return order.index(name) if name in order else None


def _with_argument(call: str, value: str, name: str, position: int | None) -> str:
    """The call with one more argument, in place of the one of its name or position."""
    verb, _, inside = call[:-1].partition("(")
    arguments = [argument for argument in re.split(r", (?![^(\[]*[)\]])", inside) if argument]
    arguments = [argument for argument in arguments if not argument.startswith(f"{name}=")]
    positional, keywords = (
        [x for x in arguments if "=" not in x],
        [x for x in arguments if "=" in x],
    )
    if position is not None and position <= len(positional):
        positional[position : position + 1] = [value]
    elif name:
        keywords.append(f"{name}={value}")
    else:
        positional.append(value)
    return f"{verb}({', '.join([*positional, *keywords])})"


def test_a_call_is_mended_whole() -> None:
    """All wrong words of a call are corrected at once, each with its reason; legal ones stay."""
    first, second = check_row("x  fuse(bias_gelu, with=triton, rng=philox, rounding=eager)")
    expected = "write `fuse(bias_gelu, backend=rowwise, rounding=eager)`"
    assert first.helps == second.helps == (expected,)
    assert not first.notes and "drawn as the model draws" in second.notes[0]
    diagnostics = check_row("offload(params, optimizer, to=nvme)")
    assert diagnostics[0].helps == (
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
    """A default added by a correction gives way to what the call says, in any order of
    arguments."""
    assert first_answer(f"layers.*  {row}") == f"write `{said}`"


def test_no_call_is_offered_that_is_not_legal() -> None:
    """Where another argument is wrong too, the primitive's example is offered instead."""
    diagnostics = check_row("x  offload(grads, to=moon)")
    assert "offload(activations, to=cpu)" in diagnostics[0].helps[0]


def test_values_as_they_are_written() -> None:
    """Values print as in a schedule: sizes in whole units, names bare, texts in quotes."""
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
    """`S(seq, layout=zigzag)` on inputs is answered with the row on the attention module."""
    row = "shard(input_ids=S(seq, layout=zigzag), over=cp)"
    assert offered_rows(check_row(row)[0].helps) == [
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
    """`sch.grade` is empty, rounding, or what steps relax; `undo` removes it again."""
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
