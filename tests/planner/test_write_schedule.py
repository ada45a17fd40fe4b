"""Schedules written from settings: canonical text, plannable, and verified."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from schedlang.cli import app
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import Source
from schedlang.ir.model import ModelFacts
from schedlang.ir.modelfile import load_model_file
from schedlang.ir.primitive import load_all
from schedlang.language import nodes as n
from schedlang.language import printer
from schedlang.language.syntax import parse
from schedlang.passes.autoshard.knob_tuning import Job, price_plan
from schedlang.passes.elaborate.expand import expand
from schedlang.passes.planner.profile import Profiles
from schedlang.passes.planner.schedule_writer import write_schedule
from schedlang.passes.planner.values import Placement, Setting
from schedlang.passes.simulate.machine import CLUSTERS
from schedlang.passes.simulate.one_rank_step import expand_rows

EXAMPLES = Path(__file__).parents[2] / "examples"
P = Placement


def profiles(name: str, dtype: str = "") -> Profiles:
    """Return the profiles of an example's model."""
    load_all()
    example = EXAMPLES / name.replace("balanced", "mixtral") / "model.py"
    model_file = load_model_file(str(example), None)
    model = model_file.model(meta=True)
    if name == "balanced":  # a router's loss, of sums over the batch
        model.config.output_router_logits = True
    model_facts = ModelFacts(model)
    return Profiles(model_facts, model_file.batch(1), model_file.loss, model_file.weight, dtype)


# example, setting, lines that the written schedule must have
CASES = [
    (
        "gpt2",
        Setting(P(1, tp=2), dp=2, pp=2, micro=4, zero=2, cuts=(2, 4), again=(2, 1)),
        [
            "mesh(dp=2, pp=2, tp=2)",
            "transformer.h[0:2]  checkpoint()",
            "transformer.h.1  pipeline_split(over=pp)",
            "zero(stage=2, over=dp)",
            'pipeline(order="1F1B", micro=4)',
        ],
    ),
    (
        "llama",
        Setting(P(1, cp=2, tp=2, sequence=True), pp=2, chunks=2, micro=2, order="Interleaved1F1B"),
        [
            "mesh(pp=2, cp=2, tp=2)",
            "model.layers.0      shard(input=S(seq), over=tp)  "
            "# masks and positions are made of the whole",
            'pipeline(order="Interleaved1F1B", micro=2, chunks=2)',
        ],
    ),
    (
        "mixtral",
        Setting(P(1, ep=2), dp=4, pp=2, micro=2),
        [
            "mesh(dp=2, ep=2, pp=2)",
            "model.layers.*.mlp.experts  expert_parallel(over=ep)  # each rank has some experts",
            "zero(stage=1, over=(dp, ep))",
        ],
    ),
    (
        "gpt2",
        Setting(P(1, offload="both"), dp=2, pp=2, micro=4, cuts=(2, 4), again=(2, 1)),
        [
            "transformer.h[0:2]  checkpoint()",
            "transformer.h.*  offload(activations)",
            "offload(optimizer)",
        ],
    ),
    (
        "gpt2",  # unequal nodes: a node for each stage, rows split by speed
        Setting(P(2), dp=2, pp=2, micro=2, axes=("pp", "dp", "cp", "tp"), rows=(6, 2)),
        ["mesh(pp=2, dp=2)", "zero(stage=1, over=dp, rows=[3, 1])"],
    ),
    (
        "llama",
        Setting(P(1, slices=2), pp=2, micro=2, order="Seq1F1B"),
        ['pipeline(order="Seq1F1B", micro=2, slices=2)'],
    ),
    ("resnet", Setting(P(1), pp=3, micro=2), ['step "training" relax(batch_stats) {']),
    ("llama", Setting(P(1)), ["mesh(dp=1)"]),
    ("balanced", Setting(P(1), dp=2, micro=2), ['step "training" relax(batch_stats) {']),
    ("balanced", Setting(P(2), dp=2), ['step "training" {']),
    ("balanced", Setting(P(2, cp=2), dp=2), ['step "training" {']),
]


@pytest.mark.parametrize(("name", "setting", "lines"), CASES, ids=lambda one: str(one)[:12])
def test_a_text_is_canonical_and_planned(name: str, setting: Setting, lines: list[str]) -> None:
    """The text is formatted, has the expected rows, and can be planned."""
    source = profiles(name)
    written = write_schedule(source, setting, ["a remark that stays"])
    text = written.text
    tree = parse(Source("written", text))
    assert tree == written and printer.to_text(tree) == printer.to_text(written) == text
    assert [node.span.line for node in n.walk(tree)] == [node.span.line for node in n.walk(written)]
    stripped_lines = [line.strip() for line in text.splitlines()]
    assert "# a remark that stays" in stripped_lines
    assert [line for line in lines if line not in stripped_lines] == []
    plan = expand(tree, source.facts).plan
    assert plan is not None and plan.mesh.world == max(1, setting.ranks)


@pytest.mark.parametrize("placement", [P(2, tp=2), P(2, cp=2), P(1, ep=2, tp=2)], ids=str)
def test_a_step_with_sums_over_the_batch_is_priced(placement: Placement) -> None:
    """The router's loss is simulated beside a sharded vocabulary, split sequences, stages."""
    source = profiles("balanced")
    setting = Setting(placement, dp=2, pp=2)
    plan = expand(write_schedule(source, setting), source.facts).plan
    assert plan is not None
    rows = setting.dp * placement.rows
    batch = expand_rows(source.batch, rows)
    job = Job(source.facts, batch, source.loss, source.weight, CLUSTERS["h100"], setting.ranks)
    tried = price_plan(job, plan, {})
    assert tried.time is not None and tried.peak > 0


def test_a_recipe_is_a_step() -> None:
    """The cast of a 16-bit recipe is the first step."""
    text_lines = write_schedule(profiles("llama", "bf16"), Setting(P(1, tp=2))).text.splitlines()
    assert text_lines.index("  cast(bf16, params=true)") < text_lines.index(
        'step "tensor parallel" {'
    )


def test_batch_norms_keep_the_dtype_of_their_statistics(tmp_path: Path) -> None:
    """A convolutional network in 16 bits is written with rows that torch runs."""
    file = tmp_path / "written.sched"
    file.write_text(write_schedule(profiles("resnet", "bf16"), Setting(P(3), dp=2)).text)
    assert "blocks.*.{first,second}  cast(fp32)  # as its statistics" in file.read_text()
    model = str(EXAMPLES / "resnet" / "model.py")
    result = CliRunner().invoke(app, ["verify", str(file), "--model", model])
    assert result.exit_code == 0, result.output


def test_what_has_no_rows_is_refused() -> None:
    """Two layers cannot be three stages; a Llama has no experts."""
    source = profiles("mixtral")
    with pytest.raises(ValueError, match="does not cut"):
        write_schedule(source, Setting(P(1), pp=2, cuts=(1, 1)))
    with pytest.raises(Refusal, match="S212"):
        write_schedule(profiles("llama"), Setting(P(1, ep=2), dp=2))


VERIFIED = [
    ("llama", "", Setting(P(1, tp=2, sequence=True), pp=2, micro=2, again=(3, 0))),
    ("llama", "bf16", Setting(P(1, tp=2), pp=2, micro=2, cuts=(2, 4), again=(1, 2))),
    ("gpt2", "", Setting(P(2, tp=2, sequence=True), dp=2, micro=2, zero=2, again=(3,))),
    ("mixtral", "", Setting(P(1, ep=2), dp=4)),
    (
        "llama",
        "",
        Setting(
            P(1),
            *(2, 2, 2),
            zero=2,
            cuts=(4, 2),
            axes=("pp", "dp", "cp", "tp"),
            rows=(1, 3),
        ),
    ),
    ("t5", "", Setting(P(1, tp=2, sequence=True), pp=2, micro=2)),
    ("bert", "", Setting(P(1, tp=2, sequence=True), dp=2, micro=2, zero=3)),
    ("gpt2", "", Setting(P(1, offload="both"), dp=2, pp=2, micro=4, zero=1)),
    ("llama", "", Setting(P(1, tp=2, slices=2), pp=2, micro=2, order="Seq1F1B", again=(2, 0))),
    ("llama", "bf16", Setting(P(1, tp=2, offload="both"), pp=2, micro=2, again=(2, 0))),
]


@pytest.mark.deep
@pytest.mark.parametrize(("name", "dtype", "setting"), VERIFIED, ids=lambda one: str(one)[:12])
def test_a_text_is_proven(name: str, dtype: str, setting: Setting, tmp_path: Path) -> None:
    """Written schedules are verified against the original, with fewer layers too."""
    file = tmp_path / "written.sched"
    file.write_text(write_schedule(profiles(name, dtype), setting).text, encoding="utf-8")
    model = str(EXAMPLES / name / "model.py")
    options = [] if name == "t5" else ["--shrink"]  # the example's model cannot be shrunk
    result = CliRunner().invoke(app, ["verify", str(file), "--model", model, *options])
    assert result.exit_code == 0, result.output
