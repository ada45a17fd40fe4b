"""transformers' own `Trainer` under a schedule: one argument more, and the same losses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from schedlang.diagnostics.diagnostic import Refusal
from tests.ranks import run_ranks

ONE = "schedule 1\n"
FOUR = """schedule 1

mesh(dp=2, pp=2)

transformer.h  pipeline_split(over=pp)
zero(stage=1, over=dp)
pipeline(order="1F1B", micro=2)
"""
TWO = "schedule 1\n\nmesh(dp=2)\n\nzero(stage=1, over=dp)\n"


def _rows() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 64, (24, 12), generator=generator)
    # the first token is nobody's label: transformers' loop would divide by it, too, where it counts
    # labels before the model shifts them
    return [{"input_ids": row, "labels": torch.cat([torch.tensor([-100]), row[1:]])} for row in ids]


def _trainer(folder: Path, rows: int, schedule: str | None, **more: Any) -> Any:
    from schedlang.hf import Trainer

    torch.manual_seed(0)
    sizes = dict(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    config = transformers.GPT2Config(
        **sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False
    )
    given: dict[str, Any] = dict(max_steps=7, save_strategy="no")
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=rows,
        learning_rate=1e-2,
        weight_decay=0.1,
        warmup_steps=2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **{**given, **more},
    )
    kind, mine = (
        (transformers.Trainer, {}) if schedule is None else (Trainer, {"schedule": schedule})
    )
    model = transformers.GPT2LMHeadModel(config)
    return kind(model=model, args=args, train_dataset=_rows(), eval_dataset=_rows()[:8], **mine)


def _losses(trainer: Any) -> list[tuple[float, float, float]]:
    names = ("loss", "grad_norm", "learning_rate")
    history = [one for one in trainer.state.log_history if "loss" in one]
    return [tuple(float(one[name]) for name in names) for one in history]  # type: ignore[misc]


def _scheduled(rank: int, folder: Path, rows: int, text: str, again: bool = False) -> Any:
    more: dict[str, Any] = dict(save_strategy="steps", save_steps=2) if again else {}
    if again:
        trainer = _trainer(folder, rows, text, **{**more, "max_steps": 4})
        trainer.args.max_steps = 4
        trainer.train()
    trainer = _trainer(folder, rows, text, **more)
    trainer.train(resume_from_checkpoint=again)
    return _losses(trainer), trainer.model.state_dict()


def test_losses_are_those_of_transformers_own_loop(tmp_path: Path) -> None:
    """On one rank, on two, and on four in two stages, over more than an epoch: loss, norm and rate
    of every step, and the trained weights."""
    plain = _trainer(tmp_path, 8, None)
    plain.train()
    expected, weights = _losses(plain), plain.model.state_dict()
    assert len(expected) == 7
    for ranks, rows, text in ((1, 8, ONE), (2, 4, TWO), (4, 4, FOUR)):
        for found, state in run_ranks(ranks, _scheduled, tmp_path, rows, text):
            for mine, theirs in zip(found, expected, strict=True):
                assert mine == pytest.approx(theirs, rel=2e-4, abs=1e-7), (mine, theirs)
            for name, value in weights.items():
                torch.testing.assert_close(state[name], value, rtol=1e-3, atol=1e-3)


def test_what_is_not_followed_is_refused(tmp_path: Path) -> None:
    """S691: mixed precision is a row's matter; an earlier run is not gone on with unasked."""
    with pytest.raises(Refusal, match="bf16"):
        _trainer(tmp_path, 8, ONE, bf16=True).train()
    trainer = _trainer(tmp_path, 8, ONE, save_strategy="steps", save_steps=5)
    assert trainer.train().global_step == 7
    assert not math.isnan(trainer.train(resume_from_checkpoint=True).training_loss)
    with pytest.raises(Refusal, match="earlier run"):
        _trainer(tmp_path, 8, ONE, save_strategy="steps").train()


def _evaluating(rank: int, folder: Path, rows: int, text: str | None) -> Any:
    """The evaluations of a run, as callbacks and logs are told them."""
    heard: list[float] = []

    class Hears(transformers.TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **_: Any) -> None:
            heard.append(metrics["eval_loss"])

    strategy = dict(eval_strategy="steps", eval_steps=3, per_device_eval_batch_size=rows)
    trainer = _trainer(folder, rows, text, **strategy)
    trainer.add_callback(Hears())
    trainer.train()
    logged = [
        (one["step"], one["eval_loss"]) for one in trainer.state.log_history if "eval_loss" in one
    ]
    assert [loss for _, loss in logged] == heard
    return logged


@pytest.mark.parametrize("ranks", [1, 4])
def test_evaluation_while_it_trains(tmp_path: Path, ranks: int) -> None:
    """At the steps that `args` say, the losses of transformers' own loop, on one rank and four."""
    own = _evaluating(0, tmp_path / "own", 4, None)
    assert [step for step, _ in own] == [3, 6, 7]
    text, rows = (ONE, 4) if ranks == 1 else (FOUR, 2)
    for told in run_ranks(ranks, _evaluating, tmp_path / "ours", rows, text):
        assert [step for step, _ in told] == [3, 6, 7]
        for (_, loss), (_, other) in zip(told, own):
            assert math.isclose(loss, other, rel_tol=1e-5)


def test_what_cannot_be_evaluated(tmp_path: Path) -> None:
    """Metrics of one's own need outputs of all rows: refused before anything is trained."""
    trainer = _trainer(tmp_path, 4, ONE, eval_strategy="steps", eval_steps=3)
    trainer.compute_metrics = lambda _: {}
    with pytest.raises(Refusal, match="compute_metrics") as caught:
        trainer.train()
    assert caught.value.diagnostic.code == "S691"
