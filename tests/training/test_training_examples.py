"""The examples `examples/finetune` and `examples/pretrain` run, resume and export."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from schedlang.runtime.checkpointing import archive
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]
MAX_LINES = 120  # lines of an example


def run_example(rank: int, name: str, *arguments: str) -> str:
    """Run the example's program as torchrun does, on this rank: return its output."""
    output = io.StringIO()
    folder = ROOT / "examples" / name
    sys.modules.pop("model", None)
    with (
        patch.object(sys, "argv", ["train.py", *arguments]),
        patch.object(sys, "path", [str(folder), *sys.path]),
        patch.object(dist, "destroy_process_group", lambda: None),  # the pool ends it
        contextlib.redirect_stdout(output),
    ):
        runpy.run_path(str(folder / "train.py"), run_name="__main__")
    return output.getvalue()


def parse_losses(output: str) -> dict[int, float]:
    """Return the loss of each step in an output."""
    matches = re.findall(r"^step (\d+)  loss ([\d.]+)", output, re.MULTILINE)
    return {int(step): float(loss) for step, loss in matches}


@pytest.mark.parametrize("name", ["finetune", "pretrain"])
def test_it_is_short(name: str) -> None:
    """Program, model and data together."""
    folder = ROOT / "examples" / name
    assert sum(len(path.read_text().splitlines()) for path in folder.glob("*.py")) <= MAX_LINES


@pytest.mark.parametrize("schedule", ["dp", "lora"])
def test_fine_tuning_gives_weights_that_transformers_reads(tmp_path: Path, schedule: str) -> None:
    """Two ranks, a model and a text from folders: the loss falls, and `from_pretrained` reads the
    weights of the last checkpoint; started again it has nothing left to do."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer

    sys.path.insert(0, str(ROOT))
    from examples.finetune.model import model

    model().save_pretrained(tmp_path / "model")
    ByT5Tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "my.txt").write_text("How much wood would a woodchuck chuck? " * 60)
    arguments = (
        *("--model", str(tmp_path / "model"), "--text", str(tmp_path / "my.txt")),
        *("--schedule", str(ROOT / "examples" / "finetune" / f"{schedule}.sched")),
        *("--steps", "20", "--saved", str(tmp_path / "saved"), "--out", str(tmp_path / "out")),
    )
    outputs = run_ranks(2, run_example, "finetune", *arguments)
    assert outputs[1] == "" and "evaluation loss" in outputs[0]
    early, last = parse_losses(outputs[0])[10], parse_losses(outputs[0])[20]
    assert last < early < 6.0  # log(384), and some randomness
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    AutoTokenizer.from_pretrained(tmp_path / "out")
    initial = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert tuned.keys() == initial.keys()
    trained = {key for key in tuned if not torch.equal(tuned[key], initial[key])}
    if schedule == "lora":  # merged into the projections
        assert trained == {key for key in tuned if key.endswith("_proj.weight")}
    assert trained
    assert parse_losses(run_ranks(2, run_example, "finetune", *arguments)[0]) == {}


def test_pretraining_goes_on(tmp_path: Path) -> None:
    """Four ranks in a pipeline of split layers: ten steps, and ten more after a restart, have the
    losses of twenty."""
    uninterrupted = run_ranks(4, run_example, "pretrain", str(tmp_path / "whole"), "20")[0]
    run_ranks(4, run_stopped, str(tmp_path / "saved"))
    assert archive.read_beside(tmp_path / "saved") is not None
    resumed = run_ranks(4, run_example, "pretrain", str(tmp_path / "saved"), "20")[0]
    assert parse_losses(resumed) == {
        step: loss for step, loss in parse_losses(uninterrupted).items() if step > 10
    }
    assert parse_losses(uninterrupted).keys() == {5, 10, 15, 20}


class _Stop(Exception):
    pass


def run_stopped(rank: int, saved: str) -> None:
    """The same run of twenty steps, stopped by an error after the save of the tenth."""
    from schedlang.trainer import Trainer

    save = Trainer.save

    def stops(trainer: Trainer) -> None:
        save(trainer)
        trainer.program.saved()
        if trainer.program.step == 10:
            raise _Stop

    with patch.object(Trainer, "save", stops), contextlib.suppress(_Stop):
        run_example(rank, "pretrain", saved, "20")


def test_a_packed_row_is_its_texts_one_by_one() -> None:
    """Logits of a packed row equal those of each text in its own row."""
    sys.path.insert(0, str(ROOT))
    from examples.pretrain.model import END, model, packed

    torch.manual_seed(0)
    network = model().double().eval()
    (row,) = packed([b"To be", b"or not to be"], 6 + 13)
    assert row["labels"].tolist()[0] == row["labels"].tolist()[6] == -100
    with torch.no_grad():
        packed_logits = network(
            row["input_ids"][None], position_ids=row["position_ids"][None]
        ).logits[0]
        text_logits = [
            network(torch.tensor([[*text, END]])).logits[0] for text in (b"To be", b"or not to be")
        ]
    torch.testing.assert_close(packed_logits, torch.cat(text_logits), rtol=1e-9, atol=1e-9)
