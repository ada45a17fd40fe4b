"""Slapo's acceptance suite: each of its tests has one here, and says if ours differs."""

import re
from pathlib import Path

import pytest

from schedlang.diagnostics.source import Source
from schedlang.language.syntax import parse
from schedlang.passes.elaborate.expand import expand
from tests.slapo.behaviours import Call, behaviours, calls
from tests.slapo.page import PAGE, page

TESTS = Path(__file__).parent.parent


def test_each_is_shown() -> None:
    """The test that is named exists; behaviours are told once."""
    known = {path.name: path.read_text() for path in TESTS.rglob("test_*.py")}
    for one in behaviours():
        file, _, name = one.ours.partition("::")
        assert re.search(rf"^def {name}\(", known[Path(file).name], re.M), one
    assert len({one.theirs for one in behaviours()}) == len(behaviours())


def test_the_page_is_made_of_them() -> None:
    """docs/slapo.md is what `python -m tests.slapo.page` writes."""
    assert PAGE.read_text() == page()


# of what `slapo.list_primitives()` gives, with what is used beside
THEIRS = (
    "annotate",
    "fuse",
    "decompose",
    "replace",
    "replace_all",
    "checkpoint",
    "shard",
    "sync",
    "fork_rng",
    "cut_pipeline_stage",
    "create_schedule",
    "trace",
    "trace_until",
    "find",
    "build",
    "Verify",
    "init_empty_weights",
    "set_random_seed",
    "apply_schedule",
    "register_primitive",
    "autotune",
)


def test_each_call_has_its_rows() -> None:
    """No primitive of Slapo's is left out; who has no rows and no Python says why."""
    text = " ".join(call.theirs for call in calls())
    assert not [name for name in THEIRS if not re.search(rf"\b{name}\b", text)]
    assert all(call.why for call in calls())


@pytest.mark.parametrize("call", [c for c in calls() if c.rows], ids=lambda call: call.theirs[:40])
def test_rows_are_accepted(call: Call) -> None:
    """What `check` reads of a row, it accepts; patterns stand outside of steps."""
    known = "pattern bias_gelu(x, b) { gelu(x + b) }\n"
    own = [row for row in call.rows if not row.startswith("pattern")]
    body = "".join(f"  {row}\n" for row in own) or "  h  fuse(bias_gelu)\n"
    head = "\n".join(row for row in call.rows if row.startswith("pattern")) or known
    text = f'schedule 1\n{head}\nmesh(dp=2, pp=2, tp=2)\nstep "s" {{\n{body}}}\n'
    expand(parse(Source("calls.toml", text)), None)


def test_calls_are_shown() -> None:
    """The test of every call exists; Python that is written parses, and names what there is."""
    import ast

    import schedlang

    known = {path.name: path.read_text() for path in TESTS.rglob("test_*.py")}
    for call in calls():
        file, _, name = call.test.partition("::")
        assert not name or re.search(rf"^def {name}\(", known[Path(file).name], re.M), call
        for named in re.findall(r"schedlang\.(\w+)", call.python):
            assert hasattr(schedlang, named), call
        ast.parse(call.python.replace("...", "0"))


def test_the_block_beside_slapos_is_the_examples() -> None:
    """The rows at the top of the page stand, remarks apart, in a schedule that is proven."""
    (block,) = re.findall(r"^```text\n(at .*?)^```$", PAGE.read_text(), re.S | re.M)
    example = (TESTS.parent / "examples" / "gpt2" / "tp.sched").read_text()
    bare = re.sub(r"\s*#.*", "", example)
    assert all(line.strip() in bare for line in block.splitlines())
