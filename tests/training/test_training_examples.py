"""The examples that people copy: `examples/finetune` and `examples/pretrain`, played."""

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
MOST = 120  # lines of an example


def _played(rank: int, name: str, *words: str) -> str:
    """Run the example's program as torchrun does, on this rank; what it prints."""
    said = io.StringIO()
    folder = ROOT / "examples" / name
    sys.modules.pop("model", None)
    with (
        patch.object(sys, "argv", ["train.py", *words]),
        patch.object(sys, "path", [str(folder), *sys.path]),
        patch.object(dist, "destroy_process_group", lambda: None),  # the ranks are the pool's
        contextlib.redirect_stdout(said),
    ):
        runpy.run_path(str(folder / "train.py"), run_name="__main__")
    return said.getvalue()


def losses(said: str) -> dict[int, float]:
    """Of each step that was told."""
    found = re.findall(r"^step (\d+)  loss ([\d.]+)", said, re.MULTILINE)
    return {int(step): float(loss) for step, loss in found}


@pytest.mark.parametrize("name", ["finetune", "pretrain"])
def test_it_is_short(name: str) -> None:
    """Program, model and data together."""
    folder = ROOT / "examples" / name
    assert sum(len(path.read_text().splitlines()) for path in folder.glob("*.py")) <= MOST


@pytest.mark.parametrize("schedule", ["dp", "lora"])
def test_fine_tuning_gives_weights_that_transformers_reads(tmp_path: Path, schedule: str) -> None:
    """Two ranks, a model and a text from folders: the loss falls, and `from_pretrained` reads the
    weights of the last checkpoint; started again there is nothing left to do."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer

    sys.path.insert(0, str(ROOT))
    from examples.finetune.model import model

    model().save_pretrained(tmp_path / "model")
    ByT5Tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "my.txt").write_text("How much wood would a woodchuck chuck? " * 60)
    words = (
        *("--model", str(tmp_path / "model"), "--text", str(tmp_path / "my.txt")),
        *("--schedule", str(ROOT / "examples" / "finetune" / f"{schedule}.sched")),
        *("--steps", "20", "--saved", str(tmp_path / "saved"), "--out", str(tmp_path / "out")),
    )
    said = run_ranks(2, _played, "finetune", *words)
    assert said[1] == "" and "evaluation loss" in said[0]
    first, last = losses(said[0])[10], losses(said[0])[20]
    assert last < first < 6.0  # log 384 and what is drawn
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    AutoTokenizer.from_pretrained(tmp_path / "out")
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert tuned.keys() == before.keys()
    trained = {key for key in tuned if not torch.equal(tuned[key], before[key])}
    if schedule == "lora":  # merged into the projections
        assert trained == {key for key in tuned if key.endswith("_proj.weight")}
    assert trained
    assert losses(run_ranks(2, _played, "finetune", *words)[0]) == {}


def test_pretraining_goes_on(tmp_path: Path) -> None:
    """Four ranks in a pipeline of split layers: ten steps, and ten more in another start, have the
    losses of twenty; packed rows keep their texts apart."""
    whole = run_ranks(4, _played, "pretrain", str(tmp_path / "whole"), "20")[0]
    run_ranks(4, _stopped, str(tmp_path / "saved"))
    assert archive.read_beside(tmp_path / "saved") is not None
    rest = run_ranks(4, _played, "pretrain", str(tmp_path / "saved"), "20")[0]
    assert losses(rest) == {step: loss for step, loss in losses(whole).items() if step > 10}
    assert losses(whole).keys() == {5, 10, 15, 20}


class _Stop(Exception):
    pass


def _stopped(rank: int, saved: str) -> None:
    """The same run of twenty steps, stopped by an error after the save of the tenth."""
    from schedlang.trainer import Trainer

    save = Trainer.save

    def stops(trainer: Trainer) -> None:
        save(trainer)
        trainer.program.saved()
        if trainer.program.step == 10:
            raise _Stop

    with patch.object(Trainer, "save", stops), contextlib.suppress(_Stop):
        _played(rank, "pretrain", saved, "20")


def test_a_packed_row_is_its_texts_one_by_one() -> None:
    """Logits of a row are those that each text has alone."""
    sys.path.insert(0, str(ROOT))
    from examples.pretrain.model import END, model, packed

    torch.manual_seed(0)
    network = model().double().eval()
    (row,) = packed([b"To be", b"or not to be"], 6 + 13)
    assert row["labels"].tolist()[0] == row["labels"].tolist()[6] == -100
    with torch.no_grad():
        both = network(row["input_ids"][None], position_ids=row["position_ids"][None]).logits[0]
        alone = [
            network(torch.tensor([[*text, END]])).logits[0] for text in (b"To be", b"or not to be")
        ]
    torch.testing.assert_close(both, torch.cat(alone), rtol=1e-9, atol=1e-9)
