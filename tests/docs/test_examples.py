"""Every example schedule: formatted, proven equal, or refused as its comments say."""

from __future__ import annotations

import re
from pathlib import Path

import cloudpickle
import pytest
from typer.testing import CliRunner

from schedlang.cli import app
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.modelfile import load_model_file
from schedlang.language.printer import fmt
from schedlang.language.syntax import parse, read
from schedlang.passes.elaborate.state import Settings
from schedlang.passes.prove import Case, prove
from schedlang.runtime.launch.pool import Pool
from schedlang.schedule import Schedule

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "examples").glob("*/*.sched"))  # techniques have tests of their own
LIBRARIES = ["megatron.sched"]  # definitions only
REFUSED = ["too_many.sched"]
PROVEN = [path for path in FILES if path.name not in (*LIBRARIES, *REFUSED)]

TOO_MANY = """\
error[S403]: 2 heads of `model.layers.0.self_attn` cannot be split over tp=4
 --> examples/llama/megatron.sched:6:17
  |
6 |   {q,k,v}_proj  shard(col, over=over)
  |                 ^^^^^^^^^^^^^^^^^^^^^
  |
  = note: in the forward of `model.layers.0.self_attn`, at modeling_llama.py:N
  = help: `tp` may be one of 1, 2
  = help: let several ranks hold one head:
          `model.layers.0.self_attn.k_proj shard(col, over=tp, heads=2, uneven=replicate)`
  = help: pad with zeros:
          `model.layers.0.self_attn.k_proj shard(col, over=tp, heads=2, uneven=pad)`
"""


def _example_name(path: Path) -> str:
    """The path of an example below examples/."""
    return str(path.relative_to(ROOT / "examples"))


def test_the_examples_are_those_of_the_readme() -> None:
    """All example folders are tested."""
    assert {path.parent.name for path in PROVEN} == {
        "gpt2",
        "llama",
        "mixtral",
        "resnet",
        "bert",
        "custom",
        "finetune",
        "pretrain",
        "t5",
        "unet",
        "vit",
    }
    assert len(PROVEN) >= 6


@pytest.mark.parametrize("path", FILES, ids=_example_name)
def test_every_example_is_formatted(path: Path) -> None:
    """`fmt` would change no example."""
    source = read(path)
    assert fmt(source) == source.text


# their techniques are proven by ordinary tests on models of the same kind; the first one is the
# README's first command, which CI runs
TESTED_ELSEWHERE = (
    "gpt2/3d.sched",
    "gpt2/tp.sched",
    "llama/3d.sched",
    "llama/tp_sp.sched",
    "llama/seq1f1b.sched",
    "finetune/dp.sched",
    "gpt2/memory.sched",
    "bert/one_device.sched",
    "custom/2d.sched",
    "vit/pipeline.sched",
    "gpt2/grid.sched",
    "pretrain/3d.sched",
    "llama/complete.sched",
    "llama/v_half.sched",
    "llama/long_context.sched",
    "llama/kernels.sched",
    "mixtral/ep.sched",
    "resnet/channels.sched",
    "resnet/spatial.sched",
)
PROVEN_PARAMS = [
    pytest.param(path, marks=pytest.mark.deep) if _example_name(path) in TESTED_ELSEWHERE else path
    for path in PROVEN
]


@pytest.mark.parametrize("path", PROVEN_PARAMS, ids=_example_name)
def test_every_example_is_proven(path: Path, pool: Pool) -> None:
    """Each schedule computes what its model computes, in float64 and in its working dtype."""
    model_file = load_model_file(None, path)
    plan = Schedule(model_file.model(), parse(read(path)), Settings()).plan()
    batches = tuple(model_file.batch(step) for step in range(3))
    case = Case(plan, batches, model_file.loss, model_file.weight)
    # all model files have one module name; pickled by value, several can be sent to the same ranks
    cloudpickle.register_pickle_by_value(model_file.module)
    try:
        report = prove(case, pool=pool, title=path.name)
    finally:
        cloudpickle.unregister_pickle_by_value(model_file.module)
    assert report.ok, str(report)
    kinds = {row.kind for row in report.rows}
    assert {"outputs", "loss", "gradients", "gradient norm", "parameters"} <= kinds
    assert any("working dtype" in kind for kind in kinds)


def test_too_many_ranks_are_refused_in_these_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example that must fail names the heads, the place, and the legal sizes."""
    monkeypatch.chdir(ROOT)
    result = CliRunner().invoke(app, ["verify", "examples/llama/too_many.sched"])
    assert result.exit_code == 2
    lines = [line for line in result.stderr.splitlines(True) if " s  " not in line[:10]]
    text = re.sub(
        r"(modeling_llama.py):\d+", r"\1:N", "".join(lines)
    )  # the library moves its lines
    assert text == TOO_MANY and result.stdout == ""  # a slow machine tells how far it is


def test_a_library_has_no_rows_of_its_own() -> None:
    """The library's definitions alone plan no action."""
    path = ROOT / "examples/llama/megatron.sched"
    model_file = load_model_file(None, path)
    try:
        plan = Schedule(model_file.model(meta=True), parse(read(path)), Settings()).plan()
    except Refusal as refusal:  # pragma: no cover - says why
        raise AssertionError(refusal.render()) from None
    assert plan.actions == ()
