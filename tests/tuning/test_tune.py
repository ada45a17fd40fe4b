"""`tune`: every setting is tried and priced as by `plan`; the quickest that fits comes first."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from schedlang import create_schedule
from schedlang.cli import app
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import Source
from schedlang.ir.modelfile import load_model_file
from schedlang.language.syntax import parse
from schedlang.passes.autoshard.knob_tuning import settings_of
from schedlang.passes.simulate.machine import CLUSTERS

MODEL = '''
"""Blocks of two projections."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 64)
        self.down = nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def model():
    return Net()


def batch(seed):
    return {"x": torch.randn(16, 16, generator=torch.Generator().manual_seed(seed))}


def loss(output, batch):
    return output.pow(2).mean()
'''
SHEET = """[sheet]
speed = 989e12
stream = 3350e9
link = 450e9
network = 50e9
node = 8
memory = "80 GiB"
"""
SCHEDULE = """schedule 1 for Net

knob tp: int = 1 in [1, 2]
knob again: bool = false
knob micro: int = 2 in 1..4

mesh(dp=_, tp=tp)

step "all" {
  blocks.*.up    shard(col, over=tp)
  blocks.*.down  shard(row, over=tp)
  when again { blocks.*  checkpoint() }
  zero(stage=1, over=dp)
  pipeline(order="GPipe", micro=micro)
}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A schedule beside its model."""
    return write_files(tmp_path)


def write_files(folder: Path) -> Path:
    (folder / "model.py").write_text(MODEL)
    (folder / "my.sched").write_text(SCHEDULE)
    return folder / "my.sched"


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of `tune` for the schedule on four ranks."""
    return tune(write_files(tmp_path_factory.mktemp("every")), "--gpus", 4, "--on", "a100")


def tune(*arguments: object, code: int = 0) -> dict[str, Any]:
    """Run `tune --json`, and return its report."""
    result = CliRunner().invoke(app, ["tune", *map(str, arguments), "--json"])
    assert result.exit_code == code, result.output
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def test_every_setting_is_tried() -> None:
    """All values of choices and flags, powers of two of intervals; knobs that are set are fixed."""
    tree = parse(Source("my.sched", SCHEDULE))
    assert len(settings_of(tree, {}, {})) == 2 * 2 * 3
    assert settings_of(tree, {"tp": "2", "again": "true"}, {}) == [
        {"micro": 1},
        {"micro": 2},
        {"micro": 4},
    ]
    with_tp = settings_of(tree, {"tp": "2"}, {"micro": ["3"]})
    assert with_tp == [{"again": False, "micro": "3"}, {"again": True, "micro": "3"}]


def test_too_many_settings_are_refused() -> None:
    """Too many settings are refused, with the knob that has most values."""
    many_values = SCHEDULE.replace("in 1..4", f"in [{', '.join(map(str, range(1, 500)))}]")
    with pytest.raises(Refusal, match="1996 settings"):
        settings_of(parse(Source("my.sched", many_values)), {}, {})


def test_the_first_is_the_quickest_that_fits(file: Path, every: dict[str, Any]) -> None:
    """Settings are sorted by time; those above the memory limit are left out."""
    assert len(every["fit"]) == 12
    seconds = [entry["time"]["seconds"] for entry in every["fit"]]
    assert seconds == sorted(seconds)
    peaks = sorted(entry["peak"] for entry in every["fit"])
    limit = (peaks[5] + peaks[6]) // 2
    fewer = tune(file, "--gpus", 4, "--on", "a100", "--memory", f"{limit / 1024}KiB")
    assert fewer["fit"] == [entry for entry in every["fit"] if entry["peak"] <= limit]
    assert len(fewer["too_large"]) == 12 - len(fewer["fit"]) > 0


def test_a_price_is_that_of_the_plan_alone(file: Path, every: dict[str, Any]) -> None:
    """The peak equals that of `plan`; recomputation takes more time and less memory."""
    entries = {
        (item["given"]["tp"], item["given"]["again"], item["given"]["micro"]): item
        for item in every["fit"]
    }
    entry = entries[2, True, 2]
    arguments = [
        "--knob",
        "tp=2",
        "--knob",
        "again=true",
        "--knob",
        "micro=2",
        "--mesh",
        "dp=2,tp=2",
    ]
    result = CliRunner().invoke(app, ["plan", str(file), *arguments, "--json"])
    assert entry["mesh"] == {"dp": 2, "tp": 2}
    assert (
        max(item["peak"] for item in json.loads(result.stdout)["account"]["memory"])
        == entry["peak"]
    )
    assert entry["time"]["computing"] > entries[2, False, 2]["time"]["computing"]
    assert entries[1, True, 1]["peak"] < entries[1, False, 1]["peak"]


def test_the_command_it_ends_with_can_be_pasted(file: Path) -> None:
    """The `next:` command of the table runs."""
    arguments = ["--gpus", "4", "--on", "a100", "--top", "2", "--knob", "again=false"]
    result = CliRunner().invoke(app, ["tune", str(file), *arguments])
    assert result.exit_code == 0 and "4 more fit" in result.output
    next_line = next(
        line for line in result.output.splitlines() if line.startswith("next: schedlang ")
    )
    pasted = CliRunner().invoke(app, shlex.split(next_line)[2:])
    assert pasted.exit_code == 0, pasted.output


def test_what_cannot_be_is_told_beside_the_others(file: Path) -> None:
    """A setting that 16 rows cannot fill is refused beside others; if none fits, exit is 1."""
    arguments = (file, "--gpus", 4, "--on", "a100", "--knob", "tp=1", "--knob", "again=false")
    report = tune(*arguments, "--try", "micro=4,8")
    assert [entry["given"]["micro"] for entry in report["fit"]] == ["4"]
    assert [entry["refusal"]["code"] for entry in report["refused"]] == ["S103"]
    tune(*arguments, "--memory", "1KiB", code=1)


# -- a model, for which a schedule is searched -----------------------------------------------------


def search_model(model: Path, *arguments: object, code: int = 0) -> dict[str, Any]:
    """Run `tune` on a model file for two ranks, and return the report."""
    if "--on" not in arguments:
        arguments = ("--on", "h100", *arguments)
    return tune(model, "--gpus", 2, "--dtype", "none", *arguments, code=code)


def test_a_model_is_searched_and_its_schedule_runs(file: Path) -> None:
    """The written schedule has the reported peak, lists rejected settings, and is verified."""
    model, best = file.parent / "model.py", file.parent / "best.sched"
    report = search_model(model, "-o", best, "--pin", "pp=2", "--why", "pp=1")
    assert report["best"]["setting"]["pp"] == 2 and report["done"]
    assert best.read_text() == report["schedule"] and "# Rejected: " in report["schedule"]
    assert [entry["kind"] for entry in report["asked"]] == ["pp = 1"]
    result = CliRunner().invoke(app, ["plan", str(best), "--model", str(model), "--json"])
    assert result.exit_code == 0, result.output
    memory = json.loads(result.stdout)["account"]["memory"]
    assert max(entry["peak"] for entry in memory) == report["peak"]
    result = CliRunner().invoke(app, ["verify", str(best), "--model", str(model)])
    assert result.exit_code == 0, result.output


def test_a_step_of_more_rows_is_planned(file: Path) -> None:
    """A schedule for more rows than the model file's batch has is planned with so many.

    Added rows are like the first row, in nested batches too; the peak equals the search's.
    """
    model, best = file.parent / "model.py", file.parent / "best.sched"
    nested = MODEL.replace('{"x": torch.randn(', '{"side": {"x": [torch.randn(')
    nested = nested.replace("manual_seed(seed))}", "manual_seed(seed))]}}")
    head, _, body = nested.rpartition("forward(self, x):")
    model.write_text(f"{head}forward(self, side):\n        x = side['x'][0].mul_(2){body}")
    report = search_model(model, "--rows", 64, "-o", best, "--pin", "rows=1")
    assert report["best"]["setting"]["micro"] == 32
    arguments = ["plan", str(best), "--model", str(model), "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2 and "--rows N" in result.output, result.output
    result = CliRunner().invoke(app, [*arguments, "--rows", "64"])
    assert result.exit_code == 0, result.output
    memory = json.loads(result.stdout)["account"]["memory"]
    assert max(entry["peak"] for entry in memory) == report["peak"]
    result = CliRunner().invoke(app, [*arguments, "--rows", "64", "--lock"])
    assert result.exit_code == 2 and "S109" in result.output, result.output


def test_a_search_on_unlike_nodes_deals_rows_and_its_schedule_runs(file: Path) -> None:
    """The quick rank gets more rows; `--memory` and wrong `--gpus` are refused."""
    model, best, on = (file.parent / name for name in ("model.py", "best.sched", "two.toml"))
    slow = SHEET.replace("[sheet]", "[slow]").replace("= 989e12", "= 200e12")
    slow = slow.replace("3350e9", "800e9").replace("80 GiB", "32 GiB")
    nodes = "".join(f'[[node]]\ndevice = "{device}"\nranks = 1\n' for device in ("slow", "sheet"))
    on.write_text(nodes + SHEET + slow)
    arguments = (model, "--on", on, "--dtype", "none", "--pin", "pp=1", "--pin", "tp=1", "-o", best)
    report = tune(*arguments)
    few, many = map(int, re.findall(r"rows=\[(\d+), (\d+)\]", report["schedule"])[0])
    assert report["ranks"] == 2 and few < many
    assert "on 1 slow of 32 GiB, 1 sheet of 80 GiB" in report["schedule"]
    result = CliRunner().invoke(app, ["verify", str(best), "--model", str(model)])
    assert result.exit_code == 0, result.output
    text = best.read_text().replace("mesh(dp=2)", 'mesh(dp=2) on "two.toml"')
    best.write_text(text)
    (planned,) = tune(best, "--model", model)["fit"]
    assert planned["time"]["seconds"] == pytest.approx(report["seconds"])
    best.write_text(text.replace(f"[{few}, {many}]", "[1, 1]"))
    (even,) = tune(best, "--model", model)["fit"]
    assert even["time"]["seconds"] > planned["time"]["seconds"]
    for options, message in (
        (("--memory", "1GiB"), "has unlike nodes"),
        (("--gpus", "3"), "`two` has 2 ranks, not 3"),
    ):
        result = CliRunner().invoke(app, ["tune", *map(str, arguments), *options])
        assert result.exit_code == 2 and message in result.output, result.output


def test_a_schedule_binds_a_search(file: Path) -> None:
    """`search` lines of a schedule limit the search like options; its other rows are ignored."""
    model, own_schedule = file.parent / "model.py", file.parent / "mine.sched"
    own_schedule.write_text(
        "schedule 1\n\nsearch forbid pp = 2\nsearch pin zero = 1\n\nmesh(dp=2) on h100x2\n"
    )
    report = tune(own_schedule, "--model", model, "--dtype", "none")
    assert report["best"]["setting"]["pp"] == 1 and report["best"]["setting"]["zero"] == 1
    assert report["ranks"] == 2
    tune(
        own_schedule, "--model", model, "--dtype", "none", "--pin", "dp=1", "--pin", "tp=1", code=1
    )


def test_the_choice_of_guides_is_found(file: Path) -> None:
    """A model that fits is replicated; where its state does not fit, ZeRO is used.

    The cluster has no start times, which would dominate for so small a model.
    """
    model, sheet = file.parent / "model.py", file.parent / "sheet.toml"
    sheet.write_text(SHEET)
    model.write_text(MODEL.replace("torch.randn(16, 16", "torch.randn(4096, 16"))
    arguments = ("--on", sheet, "--pin", "rows=2048")
    every = search_model(model, *arguments, "--pin", "zero=0")
    assert every["best"]["setting"]["dp"] == 2
    fewer = search_model(model, *arguments, "--memory", f"{every['peak'] - 1}B")
    assert fewer["peak"] < every["peak"] and fewer["best"]["setting"]["zero"] > 0


def test_nothing_fits(file: Path) -> None:
    """If nothing fits the exit is 1, nothing is written, and the smallest setting is reported."""
    best = file.parent / "best.sched"
    report = search_model(file.parent / "model.py", "--memory", "1KiB", "-o", best, code=1)
    assert report["best"] is None and not best.exists()
    (rejected,) = report["rejected"]
    assert rejected["kind"] == "what needs least"
    assert re.fullmatch(r"needs at least .* of 1 KiB: dp = 2,.* zero = 3.*", rejected["reason"])


def test_a_model_without_ways_says_why(file: Path) -> None:
    """A wrong model file is refused as elsewhere, not reported as too large."""
    model = file.parent / "model.py"
    model.write_text(MODEL.partition("def loss")[0])
    result = CliRunner().invoke(app, ["tune", str(model), "--gpus", "2", "--on", "h100"])
    assert result.exit_code == 2 and "S615" in result.output, result.output


def test_a_planner_is_asked_by_name(file: Path) -> None:
    """`--planner` writes that planner's setting with its paper and estimate, and the best."""
    model, best = file.parent / "model.py", file.parent / "best.sched"
    report = search_model(model, "--planner", "pipedream", "--pin", "pp=2", "-o", best)
    assert report["best"]["setting"]["pp"] == 2 and best.read_text() == report["schedule"]
    assert "# Planner pipedream: PipeDream (" in report["schedule"]
    assert "for a microbatch in the slowest stage" in report["by"][1]
    assert report["rejected"][0]["kind"] == "the best of the whole search"
    none = search_model(model, "--planner", "ptd-p", "--memory", "1KiB", code=1)
    assert none["best"] is None and "nothing fits" in none["rejected"][0]["reason"]
    result = CliRunner().invoke(app, ["tune", str(model), "--planner", "list"])
    assert (
        result.exit_code == 0 and "Alpa (Zheng" in result.output and "leaves out" in result.output
    )


def test_a_schedule_searches_as_the_verb_does(file: Path) -> None:
    """`Schedule.search` gives the same rows as `tune`; if nothing fits it is unchanged."""
    model = load_model_file(str(file.parent / "model.py"), None)
    sch = create_schedule(model.model())
    options = dict(loss=model.loss, dtype="", pin={"pp": 2})
    result = sch.search(model.batch(0), "h100", 2, **options)
    verb = search_model(file.parent / "model.py", "--pin", "pp=2")
    rows = [line for line in verb["schedule"].splitlines() if not line.startswith("#")]
    assert result.best is not None and result.best.setting.pp == 2
    assert [line for line in str(sch).splitlines() if line] == [line for line in rows if line]
    tiny = replace(CLUSTERS["h100"], memory=1024)
    old_text = str(sch)
    assert sch.search(model.batch(0), tiny, 2, **options).best is None and str(sch) == old_text
    for on, ranks, message in (("abacus", 2, "unknown cluster"), ("h100", None, "is missing")):
        with pytest.raises(Refusal, match=message):
            sch.search(model.batch(0), on, ranks)
    with pytest.raises(Refusal, match="open step"), sch.step("one"):
        sch.search(model.batch(0), "h100x2")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--planner", "pipedrem"), "did you mean `pipedream`?"),
        (("--pin", "tq=2"), "a search has no `tq`"),
        (("--pin", "tp=0"), "`tp` cannot be `0`"),
        (("--pin", "tp=3"), "no way to lay 2 ranks has tp = 3\n  = help: `tp` may be 1, 2"),
        (("--why", "cp=2"), "no way to lay 2 ranks has cp = 2\n  = help: `cp` may be 1"),
        (("--least", "dp=4"), "no way to lay 2 ranks has dp at least 4"),
        (("--pin", "rows=5"), "no way to lay 16 rows has rows = 5"),
        (("--batch", "much"), "cannot read `--batch much`"),
        (("--batch", "4M"), "rows without tokens"),
        (("--batch", "1K", "--rows", "4"), "both say how large a step is"),
        (("--dtype", "int8"), "is none of bf16"),
        (("-o", "nowhere/best.sched"), "mkdir -p nowhere"),
        (("--try", "micro=2"), "a model file has no knobs"),
    ],
)
def test_wrong_words_of_a_search(file: Path, words: tuple[str, ...], said: str) -> None:
    """Wrong options are refused with valid values, before any search."""
    model = str(file.parent / "model.py")
    result = CliRunner().invoke(app, ["tune", model, "--gpus", "2", "--on", "h100", *words])
    assert result.exit_code == 2 and said in result.output, result.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "the cluster is missing"),
        (("--on", "abacus", "--gpus", "4"), "unknown cluster `abacus`"),
        (("--on", "a100"), "number of ranks is missing"),
        (("--on", "a100x4", "--memory", "much"), "cannot read `--memory much`"),
        (("--on", "a100x4", "--tflops", "0"), "`--tflops` must be finite and above 0, not 0"),
        (("--on", "a100x4", "--try", "micro"), "cannot read `--try micro`"),
        (("--on", "a100x4", "--try", "macro=2"), "no knob `macro`"),
    ],
)
def test_what_is_missing_is_said(file: Path, words: tuple[str, ...], said: str) -> None:
    """Missing options are refused before any model is built."""
    result = CliRunner().invoke(app, ["tune", str(file), *words])
    assert result.exit_code == 2
    assert said in result.output


SCHEDULE_BEGUN = """schedule 1 for Net

mesh(dp=1, tp=2) on a100x2

step "all" {
  blocks.*.up  shard(col, over=tp)
  verify(train, steps=2)
}
"""


def test_every_operator_is_laid_out_and_rows_of_a_schedule_stay(tmp_path: Path) -> None:
    """`--layouts` completes rows in place; for a model file it writes a valid schedule."""
    model, file, out = (tmp_path / name for name in ("model.py", "begun.sched", "done.sched"))
    model.write_text(MODEL)
    file.write_text(SCHEDULE_BEGUN)
    command = ["tune", str(file), "--layouts", "--model", str(model)]
    written = CliRunner().invoke(app, [*command, "-o", str(out)])
    assert written.exit_code == 0, written.output
    row = "  blocks.*.down  shard(row, over=tp)\n"
    assert out.read_text().replace("blocks.*.up    ", "blocks.*.up  ") == SCHEDULE_BEGUN.replace(
        "  blocks.*.up", f"{row}  blocks.*.up"
    )
    json_command = ["tune", str(model), "--layouts", "--gpus", "2", "--on", "a100", "--json"]
    report = json.loads(CliRunner().invoke(app, json_command).stdout)
    assert report["seconds"] > 0 and report["init"] > 0 and report["mesh"] == {"inner": 2}
    assert "cast(bf16, params=true)" in report["schedule"]
    walk_report = json.loads(
        CliRunner().invoke(app, [*json_command, "--planner", "flexflow"]).stdout
    )
    assert (walk_report["schedule"], walk_report["solved"]) == (
        report["schedule"],
        report["solved"],
    )
    unity_command = ["tune", str(model), "--planner", "unity", *json_command[3:], "--dtype", "none"]
    unity_report = json.loads(CliRunner().invoke(app, unity_command).stdout)
    assert "cast" not in unity_report["schedule"] and unity_report["seconds"] > 0
    out.write_text(report["schedule"])
    assert CliRunner().invoke(app, ["check", str(out), "--model", str(model)]).exit_code == 0
    file.write_text(
        SCHEDULE_BEGUN.replace("blocks.*.up  shard(col", "blocks.*.down  shard(row, input=R")
    )
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 1 and "nothing that is legal fits\nrefused " in refused.stdout
    for options in (["--pin", "tp=2"], ["--dtype", "fp16"], ["--planner", "piper"]):
        result = CliRunner().invoke(app, [*command, *options])
        assert result.exit_code == 2 and "S109" in result.output
