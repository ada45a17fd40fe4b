"""transformers' own `Trainer` under a schedule: one more argument, and the same losses."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from schedlang.diagnostics.diagnostic import Refusal
from tests.ranks import run_ranks

ONE_RANK = "schedule 1\n"
FOUR_RANKS = """schedule 1

mesh(dp=2, pp=2)

transformer.h  pipeline_split(over=pp)
zero(stage=1, over=dp)
pipeline(order="1F1B", micro=2)
"""
TWO_RANKS = "schedule 1\n\nmesh(dp=2)\n\nzero(stage=1, over=dp)\n"


def token_rows() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 64, (24, 12), generator=generator)
    # the first token is no label: transformers' loop would divide by it too, since it counts
    # labels before the model shifts them
    return [{"input_ids": row, "labels": torch.cat([torch.tensor([-100]), row[1:]])} for row in ids]


def make_trainer(folder: Path, rows: int, schedule: str | None, **options: Any) -> Any:
    from schedlang.hf import Trainer

    torch.manual_seed(0)
    sizes = dict(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    config = transformers.GPT2Config(
        **sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False
    )
    defaults: dict[str, Any] = dict(max_steps=7, save_strategy="no", learning_rate=1e-2)
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=rows,
        weight_decay=0.1,
        warmup_steps=2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **{**defaults, **options},
    )
    kind, schedule_args = (
        (transformers.Trainer, {}) if schedule is None else (Trainer, {"schedule": schedule})
    )
    model = transformers.GPT2LMHeadModel(config)
    return kind(
        model=model,
        args=args,
        train_dataset=token_rows(),
        eval_dataset=token_rows()[:8],
        **schedule_args,
    )


def logged_steps(trainer: Any) -> list[tuple[float, float, float]]:
    names = ("loss", "grad_norm", "learning_rate")
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [tuple(float(entry[name]) for name in names) for entry in history]  # type: ignore[misc]


def train_on_rank(rank: int, folder: Path, rows: int, text: str, resume: bool = False) -> Any:
    options: dict[str, Any] = dict(save_strategy="steps", save_steps=2) if resume else {}
    if resume:
        trainer = make_trainer(folder, rows, text, **{**options, "max_steps": 4})
        trainer.args.max_steps = 4
        trainer.train()
    trainer = make_trainer(folder, rows, text, **options)
    trainer.train(resume_from_checkpoint=resume)
    return logged_steps(trainer), trainer.model.state_dict()


def test_losses_are_those_of_transformers_own_loop(tmp_path: Path) -> None:
    """On one rank, on two, and on four in two stages, over more than an epoch: loss, norm and
    learning rate of every step, and the trained weights."""
    trainer = make_trainer(tmp_path, 8, None)
    trainer.train()
    expected, weights = logged_steps(trainer), trainer.model.state_dict()
    assert len(expected) == 7
    for ranks, rows, text in ((1, 8, ONE_RANK), (2, 4, TWO_RANKS), (4, 4, FOUR_RANKS)):
        for steps, state in run_ranks(ranks, train_on_rank, tmp_path, rows, text):
            for step, expected_step in zip(steps, expected, strict=True):
                assert step == pytest.approx(expected_step, rel=2e-4, abs=1e-7), (
                    step,
                    expected_step,
                )
            for name, value in weights.items():
                torch.testing.assert_close(state[name], value, rtol=1e-3, atol=1e-3)


def test_what_is_not_followed_is_refused(tmp_path: Path) -> None:
    """S691: mixed precision belongs in the schedule; an earlier run is resumed only if asked."""
    with pytest.raises(Refusal, match="bf16"):
        make_trainer(tmp_path, 8, ONE_RANK, bf16=True).train()
    trainer = make_trainer(tmp_path, 8, ONE_RANK, save_strategy="steps", save_steps=5)
    assert trainer.train().global_step == 7
    assert not math.isnan(trainer.train(resume_from_checkpoint=True).training_loss)
    with pytest.raises(Refusal, match="earlier run"):
        make_trainer(tmp_path, 8, ONE_RANK, save_strategy="steps").train()


def test_every_setting_is_followed_or_refused() -> None:
    """S691: no field of `TrainingArguments`, of this version or a later one, is left out in
    silence."""
    from schedlang import hf

    names = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    assert names >= hf._FOLLOWED
    trainer = make_trainer(Path("unused"), 8, ONE_RANK)
    assert trainer._find_unsupported() is None
    for name in names - hf._FOLLOWED:
        args = copy.copy(trainer.args)
        args.__dict__[name] = object()
        other = copy.copy(trainer)
        other.args = args
        mistake = other._find_unsupported()
        assert mistake is not None and name in mistake[0], name


def assert_refused(trainer: Any, match: str, **how: Any) -> None:
    """A trainer refuses (S691) to train, with a text that matches."""
    with pytest.raises(Refusal, match=match) as caught:
        trainer.train(**how)
    assert caught.value.diagnostic.code == "S691"


def test_losses_and_optimizers_that_would_not_be_used_are_refused(tmp_path: Path) -> None:
    """S691: a loss of the user's own, in a derived class or as a function; an optimizer and a
    scheduler of parameters that no rank trains."""
    from schedlang.hf import Trainer

    class Doubled(Trainer):  # type: ignore[valid-type, misc]
        def compute_loss(self, *args: Any, **options: Any) -> Any:
            return 2 * super().compute_loss(*args, **options)

    trainer = make_trainer(tmp_path, 8, ONE_RANK)
    trainer.__class__ = Doubled
    assert_refused(trainer, "compute_loss")
    trainer = make_trainer(tmp_path, 8, ONE_RANK)
    trainer.compute_loss_func = lambda output, labels, **_: output.loss
    assert_refused(trainer, "compute_loss_func")
    trainer = make_trainer(tmp_path, 8, ONE_RANK)
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    assert_refused(trainer, "optimizers")
    trainer = make_trainer(tmp_path, 8, ONE_RANK, optim="lomo")
    trainer.optimizer_cls_and_kwargs = (torch.optim.SGD, {"lr": 0.1, "params": []})
    assert_refused(trainer, "whole model")


def test_resuming_from_nothing_is_refused(tmp_path: Path) -> None:
    """S691: where nothing was saved, or from another place than the run's own, as transformers'
    loop raises an error; and `save_strategy="epoch"` saves."""
    assert_refused(make_trainer(tmp_path, 8, ONE_RANK), "nothing", resume_from_checkpoint=True)
    saving = dict(save_strategy="epoch", max_steps=4)
    trainer = make_trainer(tmp_path, 8, ONE_RANK, **saving)
    assert_refused(trainer, "no checkpoint", resume_from_checkpoint=True)
    trainer.train()
    steps = sorted(path.name for path in (tmp_path / "schedlang").glob("step-*"))
    assert steps == ["step-00000003", "step-00000004"]
    elsewhere = str(tmp_path / "checkpoint-3")
    assert_refused(trainer, "not the last", resume_from_checkpoint=elsewhere)


def test_a_second_call_has_a_scheduler_of_its_own(tmp_path: Path) -> None:
    """A run that goes on in the same `Trainer` has the learning rates of one that never stopped."""
    saving = dict(save_strategy="steps", save_steps=2)
    expected = make_trainer(tmp_path / "whole", 8, ONE_RANK)
    expected.train()
    trainer = make_trainer(tmp_path, 8, ONE_RANK, **saving)
    trainer.create_scheduler = functools.partial(_of_seven, trainer)  # the schedule of 7 steps
    trainer.args.max_steps = 4
    trainer.train()
    trainer.args.max_steps = 7
    trainer.train(resume_from_checkpoint=True)
    assert logged_steps(trainer) == logged_steps(expected)


def _of_seven(trainer: Any, _: int, optimizer: Any) -> Any:
    return type(trainer).create_scheduler(trainer, 7, optimizer)


class Listener(transformers.TrainerCallback):
    """Notes the events that it gets."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int, float]] = []

    def _note(self, name: str, state: Any) -> None:
        self.events.append((name, state.global_step, round(state.epoch, 9)))

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(("begin", state.global_step, state.max_steps))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._note("step", state)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._note("epoch", state)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._note("evaluation", state)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._note("end", state)


def stop_early(rank: int, folder: Path, rows: int, text: str | None) -> Any:
    """Return the events and losses of a run that stops when its evaluations get no better."""
    options = dict(eval_strategy="steps", eval_steps=1, metric_for_best_model="loss")
    trainer = make_trainer(
        folder, rows, text, **options, greater_is_better=False, learning_rate=0.5, max_steps=12
    )
    listener = Listener()
    trainer.add_callback(listener)
    trainer.add_callback(transformers.EarlyStoppingCallback(early_stopping_patience=2))
    trainer.train()
    return listener.events, trainer.state.best_metric


@pytest.mark.parametrize("ranks", [1, 2])
def test_callbacks_hear_what_transformers_tells_and_stop_the_run(
    tmp_path: Path, ranks: int
) -> None:
    """The events of transformers' own loop, in their order, with its steps and epochs, until
    `EarlyStoppingCallback` ends the run; the same best evaluation."""
    expected, best = stop_early(0, tmp_path / "own", 8, None)
    assert expected[-1][1] < 12  # it does stop early
    text = ONE_RANK if ranks == 1 else TWO_RANKS
    for events, metric in run_ranks(ranks, stop_early, tmp_path / "ours", 8 // ranks, text):
        assert events == expected
        assert metric == pytest.approx(best, rel=1e-5)


def stop_by_epochs(rank: int, folder: Path, rows: int, text: str | None, strategy: str) -> Any:
    """Return the events of a run that a callback stops at the end of its second epoch."""

    class Stops(Listener):
        def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            super().on_epoch_end(args, state, control)
            control.should_training_stop |= state.epoch >= 2

    options = dict(eval_strategy=strategy, logging_strategy=strategy, eval_steps=2, max_steps=12)
    trainer = make_trainer(folder, rows, text, **options)
    trainer.add_callback(listener := Stops())
    trainer.train()
    return listener.events


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_a_callback_stops_the_run_at_the_end_of_an_epoch(tmp_path: Path, strategy: str) -> None:
    """At that step, and evaluations come before the end of an epoch, or after it, as there."""
    expected = stop_by_epochs(0, tmp_path / "own", 8, None, strategy)
    assert stop_by_epochs(0, tmp_path / "ours", 8, ONE_RANK, strategy) == expected


def test_the_last_evaluation_comes_before_the_end(tmp_path: Path) -> None:
    """A callback that has closed its files hears nothing more."""
    trainer = make_trainer(tmp_path, 8, ONE_RANK, eval_strategy="steps", eval_steps=2, max_steps=5)
    trainer.add_callback(listener := Listener())
    trainer.train()
    assert [name for name, *_ in listener.events[-3:]] == ["evaluation", "epoch", "end"]


@dataclasses.dataclass
class OwnArguments(transformers.TrainingArguments):
    """Settings of a script, beside transformers'."""

    corpus: str = ""
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.corpus


def test_arguments_of_a_class_of_the_user(tmp_path: Path) -> None:
    """Its own fields are the user's; a default that it changes is a setting as any other."""
    trainer = make_trainer(tmp_path, 8, ONE_RANK)
    options = dict(save_strategy="no", max_steps=1, use_cpu=True, report_to=[])
    trainer.args = OwnArguments(output_dir=str(tmp_path), corpus="a.txt", **options)
    trainer.train()

    @dataclasses.dataclass
    class Checkpoints(OwnArguments):
        gradient_checkpointing: bool = True

    trainer.args = Checkpoints(output_dir=str(tmp_path), corpus="a.txt", **options)
    with pytest.raises(Refusal, match="checkpointing"):
        trainer.train()


def test_columns_that_the_model_does_not_take_are_left_out(tmp_path: Path) -> None:
    """As transformers' loop leaves them out, unless `remove_unused_columns` is off."""
    expected, trainer = (make_trainer(tmp_path, 8, ONE_RANK) for _ in range(2))
    trainer.train_dataset = [{**row, "number": n} for n, row in enumerate(trainer.train_dataset)]
    trainer.train()
    expected.train()
    assert logged_steps(trainer) == logged_steps(expected)


def evaluate_on_rank(rank: int, folder: Path, rows: int, text: str | None) -> Any:
    """Return the evaluations of a run, as callbacks and logs receive them."""
    heard: list[float] = []

    class Hears(transformers.TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **_: Any) -> None:
            heard.append(metrics["eval_loss"])

    strategy = dict(eval_strategy="steps", eval_steps=3, per_device_eval_batch_size=rows)
    trainer = make_trainer(folder, rows, text, **strategy)
    trainer.add_callback(Hears())
    trainer.train()
    logged = [
        (entry["step"], entry["eval_loss"])
        for entry in trainer.state.log_history
        if "eval_loss" in entry
    ]
    assert [loss for _, loss in logged] == heard
    return logged


@pytest.mark.parametrize("ranks", [1, 4])
def test_evaluation_while_it_trains(tmp_path: Path, ranks: int) -> None:
    """At the steps of `args`, the losses of transformers' own loop, on one rank and four."""
    expected = evaluate_on_rank(0, tmp_path / "own", 4, None)
    assert [step for step, _ in expected] == [3, 6, 7]
    text, rows = (ONE_RANK, 4) if ranks == 1 else (FOUR_RANKS, 2)
    for evaluations in run_ranks(ranks, evaluate_on_rank, tmp_path / "ours", rows, text):
        assert [step for step, _ in evaluations] == [3, 6, 7]
        for (_, loss), (_, expected_loss) in zip(evaluations, expected):
            assert math.isclose(loss, expected_loss, rel_tol=1e-5)


def test_what_cannot_be_evaluated(tmp_path: Path) -> None:
    """User-defined metrics need outputs of all rows: refused before training begins."""
    trainer = make_trainer(tmp_path, 4, ONE_RANK, eval_strategy="steps", eval_steps=3)
    trainer.compute_metrics = lambda _: {}
    with pytest.raises(Refusal, match="compute_metrics") as caught:
        trainer.train()
    assert caught.value.diagnostic.code == "S691"
