"""Slapo's test suite and API: each test and call has its counterpart here, on docs/slapo.md."""

import re
from pathlib import Path

import pytest

from schedlang.diagnostics.source import Source
from schedlang.language.syntax import parse
from schedlang.passes.elaborate.expand import expand
from tests.slapo.behaviours import Call, behaviours, calls
from tests.slapo.page import PAGE, page_text

TESTS = Path(__file__).parent.parent


def test_each_is_shown() -> None:
    """Every named test exists; no behaviour is listed twice."""
    test_files = {path.name: path.read_text() for path in TESTS.rglob("test_*.py")}
    for behaviour in behaviours():
        file, _, name = behaviour.ours.partition("::")
        assert re.search(rf"^def {name}\(", test_files[Path(file).name], re.M), behaviour
    assert len({behaviour.theirs for behaviour in behaviours()}) == len(behaviours())


def test_the_page_is_made_of_them() -> None:
    """docs/slapo.md equals the output of `python -m tests.slapo.page`."""
    assert PAGE.read_text() == page_text()


# the names from `slapo.list_primitives()`, and other functions of its API
SLAPO_NAMES = (
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
    """Every primitive of Slapo is listed, and every call has its explanation."""
    text = " ".join(call.theirs for call in calls())
    assert not [name for name in SLAPO_NAMES if not re.search(rf"\b{name}\b", text)]
    assert all(call.why for call in calls())


@pytest.mark.parametrize("call", [c for c in calls() if c.rows], ids=lambda call: call.theirs[:40])
def test_rows_are_accepted(call: Call) -> None:
    """The rows of each call pass `check`."""
    pattern = "pattern bias_gelu(x, b) { gelu(x + b) }\n"
    rows = [row for row in call.rows if not row.startswith("pattern")]
    body = "".join(f"  {row}\n" for row in rows) or "  h  fuse(bias_gelu)\n"
    head = "\n".join(row for row in call.rows if row.startswith("pattern")) or pattern
    text = f'schedule 1\n{head}\nmesh(dp=2, pp=2, tp=2)\nstep "s" {{\n{body}}}\n'
    expand(parse(Source("calls.toml", text)), None)


def test_calls_are_shown() -> None:
    """The test of every call exists; its Python parses and uses existing names."""
    import ast

    import schedlang

    test_files = {path.name: path.read_text() for path in TESTS.rglob("test_*.py")}
    for call in calls():
        file, _, name = call.test.partition("::")
        assert not name or re.search(rf"^def {name}\(", test_files[Path(file).name], re.M), call
        for attribute in re.findall(r"schedlang\.(\w+)", call.python):
            assert hasattr(schedlang, attribute), call
        ast.parse(call.python.replace("...", "0"))


def test_the_block_beside_slapos_is_the_examples() -> None:
    """The rows at the top of the page are, without comments, in a proven example."""
    (block,) = re.findall(r"^```text\n(at .*?)^```$", PAGE.read_text(), re.S | re.M)
    example = (TESTS.parent / "examples" / "gpt2" / "tp.sched").read_text()
    without_comments = re.sub(r"\s*#.*", "", example)
    assert all(line.strip() in without_comments for line in block.splitlines())
