"""Every schedule that ships as an example: formatted, proven or refused as it says."""

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


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT / "examples"))


def test_the_examples_are_those_of_the_readme() -> None:
    """Nothing is left out because a name changed."""
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


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_every_example_is_formatted(path: Path) -> None:
    """`fmt` would change nothing."""
    source = read(path)
    assert fmt(source) == source.text


# what these show is proven by ordinary tests of its own, on models of the same kind; the first
# is the README's first command, which CI types
ELSEWHERE = (
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
TRIED = [
    pytest.param(path, marks=pytest.mark.deep) if _name(path) in ELSEWHERE else path
    for path in PROVEN
]


@pytest.mark.parametrize("path", TRIED, ids=_name)
def test_every_example_is_proven(path: Path, pool: Pool) -> None:
    """Each schedule computes what its model computes, in float64 and in its working dtype."""
    found = load_model_file(None, path)
    plan = Schedule(found.model(), parse(read(path)), Settings()).plan()
    batches = tuple(found.batch(step) for step in range(3))
    case = Case(plan, batches, found.loss, found.weight)
    # model files share a name; by value several of them travel to the same ranks
    cloudpickle.register_pickle_by_value(found.module)
    try:
        report = prove(case, pool=pool, title=path.name)
    finally:
        cloudpickle.unregister_pickle_by_value(found.module)
    assert report.ok, str(report)
    kinds = {row.kind for row in report.rows}
    assert {"outputs", "loss", "gradients", "gradient norm", "parameters"} <= kinds
    assert any("working dtype" in kind for kind in kinds)


def test_too_many_ranks_are_refused_in_these_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one example that is meant to fail says which heads, where, and what would be legal."""
    monkeypatch.chdir(ROOT)
    done = CliRunner().invoke(app, ["verify", "examples/llama/too_many.sched"])
    assert done.exit_code == 2
    said = [line for line in done.stderr.splitlines(True) if " s  " not in line[:10]]
    text = re.sub(r"(modeling_llama.py):\d+", r"\1:N", "".join(said))  # the library moves its lines
    assert text == TOO_MANY and done.stdout == ""  # a slow machine tells how far it is


def test_a_library_has_no_rows_of_its_own() -> None:
    """The library's definitions plan nothing, so that `use` brings in words only."""
    path = ROOT / "examples/llama/megatron.sched"
    found = load_model_file(None, path)
    try:
        plan = Schedule(found.model(meta=True), parse(read(path)), Settings()).plan()
    except Refusal as refusal:  # pragma: no cover - says why
        raise AssertionError(refusal.render()) from None
    assert plan.actions == ()
