"""tune: every setting is tried, priced as alone, and the quickest that fits is named first."""

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
    return written(tmp_path)


def written(folder: Path) -> Path:
    (folder / "model.py").write_text(MODEL)
    (folder / "my.sched").write_text(SCHEDULE)
    return folder / "my.sched"


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `tune` finds for it on four ranks."""
    return tuned(written(tmp_path_factory.mktemp("every")), "--gpus", 4, "--on", "a100")


def tuned(*words: object, code: int = 0) -> dict[str, Any]:
    """What `tune` found."""
    ran = CliRunner().invoke(app, ["tune", *map(str, words), "--json"])
    assert ran.exit_code == code, ran.output
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def test_every_setting_is_tried() -> None:
    """All values of choices and flags; powers of two of an interval; no knob that is set."""
    tree = parse(Source("my.sched", SCHEDULE))
    assert len(settings_of(tree, {}, {})) == 2 * 2 * 3
    assert settings_of(tree, {"tp": "2", "again": "true"}, {}) == [
        {"micro": 1},
        {"micro": 2},
        {"micro": 4},
    ]
    named = settings_of(tree, {"tp": "2"}, {"micro": ["3"]})
    assert named == [{"again": False, "micro": "3"}, {"again": True, "micro": "3"}]


def test_too_many_settings_are_refused() -> None:
    """And the message says which knob is the longest."""
    wide = SCHEDULE.replace("in 1..4", f"in [{', '.join(map(str, range(1, 500)))}]")
    with pytest.raises(Refusal, match="1996 settings"):
        settings_of(parse(Source("my.sched", wide)), {}, {})


def test_the_first_is_the_quickest_that_fits(file: Path, every: dict[str, Any]) -> None:
    """With a limit between the peaks those above it are left out, whatever they take."""
    assert len(every["fit"]) == 12
    seconds = [one["time"]["seconds"] for one in every["fit"]]
    assert seconds == sorted(seconds)
    peaks = sorted(one["peak"] for one in every["fit"])
    limit = (peaks[5] + peaks[6]) // 2
    fewer = tuned(file, "--gpus", 4, "--on", "a100", "--memory", f"{limit / 1024}KiB")
    assert fewer["fit"] == [one for one in every["fit"] if one["peak"] <= limit]
    assert len(fewer["too_large"]) == 12 - len(fewer["fit"]) > 0


def test_a_price_is_that_of_the_plan_alone(file: Path, every: dict[str, Any]) -> None:
    """The peak is what `plan` says of the same setting; recomputing takes longer, and less room."""
    found = {
        (one["given"]["tp"], one["given"]["again"], one["given"]["micro"]): one
        for one in every["fit"]
    }
    mine = found[2, True, 2]
    words = ["--knob", "tp=2", "--knob", "again=true", "--knob", "micro=2", "--mesh", "dp=2,tp=2"]
    ran = CliRunner().invoke(app, ["plan", str(file), *words, "--json"])
    assert mine["mesh"] == {"dp": 2, "tp": 2}
    assert max(one["peak"] for one in json.loads(ran.stdout)["account"]["memory"]) == mine["peak"]
    assert mine["time"]["computing"] > found[2, False, 2]["time"]["computing"]
    assert found[1, True, 1]["peak"] < found[1, False, 1]["peak"]


def test_the_command_it_ends_with_can_be_pasted(file: Path) -> None:
    """The table names the best, and `plan` takes it."""
    words = ["--gpus", "4", "--on", "a100", "--top", "2", "--knob", "again=false"]
    ran = CliRunner().invoke(app, ["tune", str(file), *words])
    assert ran.exit_code == 0 and "4 more fit" in ran.output
    said = next(line for line in ran.output.splitlines() if line.startswith("next: schedlang "))
    again = CliRunner().invoke(app, shlex.split(said)[2:])
    assert again.exit_code == 0, again.output


def test_what_cannot_be_is_told_beside_the_others(file: Path) -> None:
    """16 rows do not fill 4 x 8 parts: refused alone; where nothing fits the end is 1."""
    words = (file, "--gpus", 4, "--on", "a100", "--knob", "tp=1", "--knob", "again=false")
    found = tuned(*words, "--try", "micro=4,8")
    assert [one["given"]["micro"] for one in found["fit"]] == ["4"]
    assert [one["refusal"]["code"] for one in found["refused"]] == ["S103"]
    tuned(*words, "--memory", "1KiB", code=1)


# -- a model, for which a schedule is searched -----------------------------------------------------


def searched(model: Path, *words: object, code: int = 0) -> dict[str, Any]:
    """What a search gives for a model that computes as it is stored, on two ranks."""
    if "--on" not in words:
        words = ("--on", "h100", *words)
    return tuned(model, "--gpus", 2, "--dtype", "none", *words, code=code)


def test_a_model_is_searched_and_its_schedule_runs(file: Path) -> None:
    """What is written has the peak that was told, names what was rejected, and is the model."""
    model, best = file.parent / "model.py", file.parent / "best.sched"
    found = searched(model, "-o", best, "--pin", "pp=2", "--why", "pp=1")
    assert found["best"]["setting"]["pp"] == 2 and found["done"]
    assert best.read_text() == found["schedule"] and "# Rejected: " in found["schedule"]
    assert [one["kind"] for one in found["asked"]] == ["pp = 1"]
    ran = CliRunner().invoke(app, ["plan", str(best), "--model", str(model), "--json"])
    assert ran.exit_code == 0, ran.output
    told = json.loads(ran.stdout)["account"]["memory"]
    assert max(one["peak"] for one in told) == found["peak"]
    ran = CliRunner().invoke(app, ["verify", str(best), "--model", str(model)])
    assert ran.exit_code == 0, ran.output


def test_a_step_of_more_rows_is_planned(file: Path) -> None:
    """A schedule for more rows than the model file's batch has is planned with so many.

    Each is as the first row, in nested batches too; the peak is the one that the search told.
    """
    model, best = file.parent / "model.py", file.parent / "best.sched"
    nested = MODEL.replace('{"x": torch.randn(', '{"side": {"x": [torch.randn(')
    nested = nested.replace("manual_seed(seed))}", "manual_seed(seed))]}}")
    head, _, body = nested.rpartition("forward(self, x):")
    model.write_text(f"{head}forward(self, side):\n        x = side['x'][0].mul_(2){body}")
    found = searched(model, "--rows", 64, "-o", best, "--pin", "rows=1")
    assert found["best"]["setting"]["micro"] == 32
    words = ["plan", str(best), "--model", str(model), "--json"]
    ran = CliRunner().invoke(app, words)
    assert ran.exit_code == 2 and "--rows N" in ran.output, ran.output
    ran = CliRunner().invoke(app, [*words, "--rows", "64"])
    assert ran.exit_code == 0, ran.output
    told = json.loads(ran.stdout)["account"]["memory"]
    assert max(one["peak"] for one in told) == found["peak"]
    ran = CliRunner().invoke(app, [*words, "--rows", "64", "--lock"])
    assert ran.exit_code == 2 and "S109" in ran.output, ran.output


def test_a_search_on_unlike_nodes_deals_rows_and_its_schedule_runs(file: Path) -> None:
    """The quick rank gets more rows; figures of all ranks, and more ranks, are refused."""
    model, best, on = (file.parent / name for name in ("model.py", "best.sched", "two.toml"))
    slow = SHEET.replace("[sheet]", "[slow]").replace("= 989e12", "= 200e12")
    slow = slow.replace("3350e9", "800e9").replace("80 GiB", "32 GiB")
    nodes = "".join(f'[[node]]\ndevice = "{one}"\nranks = 1\n' for one in ("slow", "sheet"))
    on.write_text(nodes + SHEET + slow)
    words = (model, "--on", on, "--dtype", "none", "--pin", "pp=1", "--pin", "tp=1", "-o", best)
    found = tuned(*words)
    few, many = map(int, re.findall(r"rows=\[(\d+), (\d+)\]", found["schedule"])[0])
    assert found["ranks"] == 2 and few < many
    assert "on 1 slow of 32 GiB, 1 sheet of 80 GiB" in found["schedule"]
    ran = CliRunner().invoke(app, ["verify", str(best), "--model", str(model)])
    assert ran.exit_code == 0, ran.output
    text = best.read_text().replace("mesh(dp=2)", 'mesh(dp=2) on "two.toml"')
    best.write_text(text)
    (again,) = tuned(best, "--model", model)["fit"]
    assert again["time"]["seconds"] == pytest.approx(found["seconds"])
    best.write_text(text.replace(f"[{few}, {many}]", "[1, 1]"))
    (even,) = tuned(best, "--model", model)["fit"]
    assert even["time"]["seconds"] > again["time"]["seconds"]
    for more, said in (
        (("--memory", "1GiB"), "has unlike nodes"),
        (("--gpus", "3"), "`two` has 2 ranks, not 3"),
    ):
        ran = CliRunner().invoke(app, ["tune", *map(str, words), *more])
        assert ran.exit_code == 2 and said in ran.output, ran.output


def test_a_schedule_binds_a_search(file: Path) -> None:
    """By its lines of `search`, beside what options say; other rows of it are not read."""
    model, mine = file.parent / "model.py", file.parent / "mine.sched"
    mine.write_text(
        "schedule 1\n\nsearch forbid pp = 2\nsearch pin zero = 1\n\nmesh(dp=2) on h100x2\n"
    )
    found = tuned(mine, "--model", model, "--dtype", "none")
    assert found["best"]["setting"]["pp"] == 1 and found["best"]["setting"]["zero"] == 1
    assert found["ranks"] == 2
    tuned(mine, "--model", model, "--dtype", "none", "--pin", "dp=1", "--pin", "tp=1", code=1)


def test_the_choice_of_guides_is_found(file: Path) -> None:
    """A model that fits is replicated; where its state does not fit, parameters are sliced.

    By a data sheet alone, as guides count: of a model so small starts of operators decide.
    """
    model, sheet = file.parent / "model.py", file.parent / "sheet.toml"
    sheet.write_text(SHEET)
    model.write_text(MODEL.replace("torch.randn(16, 16", "torch.randn(4096, 16"))
    words = ("--on", sheet, "--pin", "rows=2048")
    every = searched(model, *words, "--pin", "zero=0")
    assert every["best"]["setting"]["dp"] == 2
    fewer = searched(model, *words, "--memory", f"{every['peak'] - 1}B")
    assert fewer["peak"] < every["peak"] and fewer["best"]["setting"]["zero"] > 0


def test_nothing_fits(file: Path) -> None:
    """The end is 1, nothing is written, and what needs least is told."""
    best = file.parent / "best.sched"
    found = searched(file.parent / "model.py", "--memory", "1KiB", "-o", best, code=1)
    assert found["best"] is None and not best.exists()
    (one,) = found["rejected"]
    assert one["kind"] == "what needs least"
    assert re.fullmatch(r"needs at least .* of 1 KiB: dp = 2,.* zero = 3.*", one["reason"])


def test_a_model_without_ways_says_why(file: Path) -> None:
    """What is wrong with the model is refused, as anywhere; it is not that nothing fits."""
    model = file.parent / "model.py"
    model.write_text(MODEL.partition("def loss")[0])
    ran = CliRunner().invoke(app, ["tune", str(model), "--gpus", "2", "--on", "h100"])
    assert ran.exit_code == 2 and "S615" in ran.output, ran.output


def test_a_planner_is_asked_by_name(file: Path) -> None:
    """Its setting is written with whose it is, what its model says, and how far from the best."""
    model, best = file.parent / "model.py", file.parent / "best.sched"
    found = searched(model, "--planner", "pipedream", "--pin", "pp=2", "-o", best)
    assert found["best"]["setting"]["pp"] == 2 and best.read_text() == found["schedule"]
    assert "# Planner pipedream: PipeDream (" in found["schedule"]
    assert "for a microbatch in the slowest stage" in found["by"][1]
    assert found["rejected"][0]["kind"] == "the best of the whole search"
    none = searched(model, "--planner", "ptd-p", "--memory", "1KiB", code=1)
    assert none["best"] is None and "nothing fits" in none["rejected"][0]["reason"]
    ran = CliRunner().invoke(app, ["tune", str(model), "--planner", "list"])
    assert ran.exit_code == 0 and "Alpa (Zheng" in ran.output and "leaves out" in ran.output


def test_a_schedule_searches_as_the_verb_does(file: Path) -> None:
    """In Python: the same schedule, which is then this one's; where nothing fits it stays."""
    model = load_model_file(str(file.parent / "model.py"), None)
    sch = create_schedule(model.model())
    asked = dict(loss=model.loss, dtype="", pin={"pp": 2})
    made = sch.search(model.batch(0), "h100", 2, **asked)
    verb = searched(file.parent / "model.py", "--pin", "pp=2")
    rows = [line for line in verb["schedule"].splitlines() if not line.startswith("#")]
    assert made.best is not None and made.best.setting.pp == 2
    assert [line for line in str(sch).splitlines() if line] == [line for line in rows if line]
    tiny = replace(CLUSTERS["h100"], memory=1024)
    before = str(sch)
    assert sch.search(model.batch(0), tiny, 2, **asked).best is None and str(sch) == before
    for on, ranks, said in (("abacus", 2, "unknown cluster"), ("h100", None, "is missing")):
        with pytest.raises(Refusal, match=said):
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
    """Refused with what would be legal, before anything is searched."""
    model = str(file.parent / "model.py")
    ran = CliRunner().invoke(app, ["tune", model, "--gpus", "2", "--on", "h100", *words])
    assert ran.exit_code == 2 and said in ran.output, ran.output


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
    """Before any model is made."""
    ran = CliRunner().invoke(app, ["tune", str(file), *words])
    assert ran.exit_code == 2
    assert said in ran.output


BEGUN = """schedule 1 for Net

mesh(dp=1, tp=2) on a100x2

step "all" {
  blocks.*.up  shard(col, over=tp)
  verify(train, steps=2)
}
"""


def test_every_operator_is_laid_out_and_rows_of_a_schedule_stay(tmp_path: Path) -> None:
    """A row is completed where it stands; a model alone gets a schedule that `check` takes."""
    model, file, out = (tmp_path / name for name in ("model.py", "begun.sched", "done.sched"))
    model.write_text(MODEL)
    file.write_text(BEGUN)
    asked = ["tune", str(file), "--layouts", "--model", str(model)]
    done = CliRunner().invoke(app, [*asked, "-o", str(out)])
    assert done.exit_code == 0, done.output
    row = "  blocks.*.down  shard(row, over=tp)\n"
    assert out.read_text().replace("blocks.*.up    ", "blocks.*.up  ") == BEGUN.replace(
        "  blocks.*.up", f"{row}  blocks.*.up"
    )
    alone = ["tune", str(model), "--layouts", "--gpus", "2", "--on", "a100", "--json"]
    told = json.loads(CliRunner().invoke(app, alone).stdout)
    assert told["seconds"] > 0 and told["init"] > 0 and told["mesh"] == {"inner": 2}
    assert "cast(bf16, params=true)" in told["schedule"]
    walk = json.loads(CliRunner().invoke(app, [*alone, "--planner", "flexflow"]).stdout)
    assert (walk["schedule"], walk["solved"]) == (told["schedule"], told["solved"])
    united = ["tune", str(model), "--planner", "unity", *alone[3:], "--dtype", "none"]
    other = json.loads(CliRunner().invoke(app, united).stdout)
    assert "cast" not in other["schedule"] and other["seconds"] > 0
    out.write_text(told["schedule"])
    assert CliRunner().invoke(app, ["check", str(out), "--model", str(model)]).exit_code == 0
    file.write_text(BEGUN.replace("blocks.*.up  shard(col", "blocks.*.down  shard(row, input=R"))
    refused = CliRunner().invoke(app, asked)
    assert refused.exit_code == 1 and "nothing that is legal fits\nrefused " in refused.stdout
    for more in (["--pin", "tp=2"], ["--dtype", "fp16"], ["--planner", "piper"]):
        bad = CliRunner().invoke(app, [*asked, *more])
        assert bad.exit_code == 2 and "S109" in bad.output
