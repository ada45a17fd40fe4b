"""`Trainer`: stopped, killed and resumed runs have the losses of an uninterrupted one."""

from __future__ import annotations

import itertools
import math
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

import schedlang
from examples.custom.model import Watcher, loss
from schedlang.callbacks import Profile, TensorBoard, WandB
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime.launch.pool import RankDied
from tests.ranks import run_ranks

ONE_RANK = "schedule 1 for Watcher\n"
TWO_RANKS = "schedule 1 for Watcher\n\nmesh(dp=2)\n\nzero(stage=1, over=dp)\n"
PIPELINED = """schedule 1 for Watcher

mesh(pp=2)

blocks  pipeline_split(over=pp)
pipeline(order="1F1B", micro=2)
"""


class RandomRows(Dataset[dict[str, Tensor]]):
    """Nineteen series, each with random augmentation at every access."""

    def __len__(self) -> int:
        return 19

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(row)
        series = torch.randn(6, 7, generator=generator, dtype=torch.float64)
        noise = 0.01 * random.random() + 0.01 * torch.rand((), dtype=torch.float64)
        return {"series": series + noise, "lengths": torch.tensor(6)}


class LossFile:
    """Writes the loss of each step into a file that survives the process."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_log(self, trainer: Any, figures: dict[str, float]) -> None:
        """Append a line."""
        if trainer.program.assembly.ranks.rank == 0 and "loss" in figures:
            with self.file.open("a") as file:
                file.write(f"{int(figures['step'])} {figures['loss'].hex()}\n")

    @property
    def losses(self) -> dict[int, float]:
        """Return the loss of each step, as it was written last."""
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        return {int(step): float.fromhex(loss) for step, loss in map(str.split, lines)}


def adamw(named: Any) -> torch.optim.Optimizer:
    """Return AdamW over named parameters."""
    return torch.optim.AdamW(named, lr=3e-3)


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    """Return a scheduler whose learning rate differs in each step."""
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)


def make_trainer(
    folder: Path | None, heard: Path, steps: int = 14, **more: Any
) -> schedlang.Trainer:
    """Return a trainer of everything that has state: shuffled rows, random data, dropout, a
    learning rate schedule."""
    torch.manual_seed(0)
    random.seed(0)
    defaults: dict[str, Any] = dict(
        data=DataLoader(RandomRows(), batch_size=4, shuffle=True),
        schedule=ONE_RANK,
        scheduler=cosine,
        folder=folder,
        callbacks=(LossFile(heard),),
        save_every=3 if folder is not None else 0,
        log_every=1,
    )
    model = Watcher().double()
    return schedlang.Trainer(
        model=model, steps=steps, optimizer=adamw, loss=loss, **{**defaults, **more}
    )


def run_on_rank(
    rank: int, folder: Path | None, heard: Path, steps: int, more: dict[str, Any]
) -> Any:
    """Train, and kill this process after a while if asked."""
    more = dict(more)
    moment, victim = more.pop("dies", (None, 0))
    end = threading.Timer(moment or 0.0, os.kill, (os.getpid(), signal.SIGKILL))
    if moment is not None and rank == victim:
        end.start()
    program = make_trainer(folder, heard, steps, **more).fit()
    end.cancel()  # it was not killed: this rank runs the next job
    return program.step, program.state_dict()


def run_losses(
    ranks: int, folder: Path | None, heard: Path, steps: int = 14, **more: Any
) -> dict[int, float]:
    """Train on so many ranks, and return the losses."""
    run_ranks(ranks, run_on_rank, folder, heard, steps, more)
    return LossFile(heard).losses


def test_a_run_that_is_stopped_goes_on_bit_by_bit(tmp_path: Path) -> None:
    """Stopped in any step of an epoch, a run on one rank resumes the order of rows, the draws of
    the data, dropout and learning rate from the process's own generators."""
    expected = run_losses(1, None, tmp_path / "whole")
    assert len(expected) == 14 and len({*expected.values()}) == 14
    for stop in (2, 5, 9):
        heard = tmp_path / f"heard{stop}"
        run_losses(1, tmp_path / f"saved{stop}", heard, stop)
        assert run_losses(1, tmp_path / f"saved{stop}", heard) == expected


def test_another_state_gives_other_losses(tmp_path: Path) -> None:
    """Each part of the resumed state counts: without it the losses differ."""
    from schedlang.runtime.checkpointing import data_generators, data_position

    expected = run_losses(1, None, tmp_path / "whole", 8)
    for name in ("generators", "taken", "scheduler"):
        folder, heard = tmp_path / name, tmp_path / f"heard {name}"
        run_losses(1, folder, heard, 3)
        resumed = make_trainer(folder, heard, 8)
        go_to = data_position.BatchStream.restore

        def other(self: Any, position: Any, name: str = name, go_to: Any = go_to) -> None:
            changed = {"taken": 0} if name == "taken" else {}
            if name == "generators":
                changed = {"generators": data_generators.generator_states(self.data)}
            go_to(self, {**position, **changed})

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(data_position.BatchStream, "restore", other)
            if name == "scheduler":
                patched.setattr(data_position, "restore_scheduler", lambda *_: None)
            resumed.fit()
        assert LossFile(heard).losses != expected, name


def run_with_kills(
    tmp_path: Path, kills: int, ranks: int, text: str, seed: int
) -> tuple[int, Any, Any]:
    """Return how often a run was killed until it finished, its losses, and the expected ones."""
    draw = random.Random(seed)
    options = {"schedule": text, "save_every": 1}
    expected = run_losses(ranks, None, tmp_path / "whole", 14, schedule=text)
    heard, died = tmp_path / "heard", 0
    while died < kills:
        dies = (draw.uniform(0.05, 1.5), draw.randrange(ranks))
        try:
            run_losses(ranks, tmp_path / "saved", heard, 14, **options, dies=dies)
            break
        except RankDied:
            died += 1
    return died, run_losses(ranks, tmp_path / "saved", heard, 14, **options), expected


@pytest.mark.parametrize("text", [ONE_RANK, TWO_RANKS], ids=["one", "two"])
def test_a_run_that_is_killed_at_any_moment_has_the_same_losses(tmp_path: Path, text: str) -> None:
    """A process is killed at random: before the first save, within one, between two.

    Started again, the run has the losses of an uninterrupted one, step by step.
    """
    died, losses, expected = run_with_kills(tmp_path, 3, 1 if text == ONE_RANK else 2, text, 1)
    assert losses == expected


@pytest.mark.deep
@pytest.mark.parametrize("text", [ONE_RANK, TWO_RANKS, PIPELINED], ids=["one", "two", "piped"])
def test_many_kills(tmp_path: Path, text: str) -> None:
    """The same, 15 times for each layout."""
    for seed in range(5):
        folder = tmp_path / str(seed)
        folder.mkdir()
        died, losses, expected = run_with_kills(folder, 3, 1 if text == ONE_RANK else 2, text, seed)
        assert losses == expected, (seed, died)


def test_a_run_goes_on_under_another_layout(tmp_path: Path) -> None:
    """From two ranks with slices to a pipeline to one rank: losses equal up to rounding, with
    dropout masks that do not depend on the layout."""
    options: dict[str, Any] = {"build": {"dropout": "logical", "seed": 7}, "accept": True}
    draws: dict[str, Any] = {"data": fixed_batches()}
    expected = run_losses(1, None, tmp_path / "whole", 9, **options, **draws)
    folder, heard = tmp_path / "saved", tmp_path / "heard"
    for ranks, text, steps in ((2, TWO_RANKS, 4), (2, PIPELINED, 7), (1, ONE_RANK, 9)):
        losses = run_losses(ranks, folder, heard, steps, schedule=text, **options, **draws)
    assert losses.keys() == expected.keys()
    for step, value in expected.items():
        assert math.isclose(losses[step], value, rel_tol=1e-12), step
    assert losses != expected  # rounding differs: the layout was another one


def fixed_batches() -> list[dict[str, Tensor]]:
    """Return five batches, the last one smaller; all ranks get the same."""
    random.seed(0)
    rows = [RandomRows()[row] for row in range(19)]
    return [
        {key: torch.stack([row[key] for row in rows[start : start + 4]]) for key in rows[0]}
        for start in range(0, 19, 4)
    ]


class StreamedRows(IterableDataset[dict[str, Tensor]]):
    """The rows as a stream, which has no length."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        yield from (RandomRows()[row] for row in range(19))


def test_a_stream_of_rows(tmp_path: Path) -> None:
    """A loader of a data set without length begins again, and a stopped run resumes within it."""
    losses = []
    for stops in ((8,), (3, 8)):
        random.seed(0)
        torch.manual_seed(0)
        heard = LossFile(tmp_path / f"heard {len(stops)}")
        for steps in stops:
            data = DataLoader(StreamedRows(), batch_size=4)
            make_trainer(tmp_path / f"saved {len(stops)}", heard.file, steps, data=data).fit()
        losses.append(heard.losses)
    assert len(losses[0]) == 8 and losses[0] == losses[1]


class OwnDraws(RandomRows):
    """The same, with generators of its own."""

    def __init__(self) -> None:
        self.python, self.numpy = random.Random(1), np.random.default_rng(2)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        noise = 0.01 * self.python.random() + 0.01 * self.numpy.random()
        series = super().__getitem__(row)["series"] + noise
        return {"series": series, "lengths": torch.tensor(6)}


def falling(optimizer: torch.optim.Optimizer) -> Any:
    """Return a scheduler whose factors are numbers of numpy."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: np.exp(-step / 9))


def test_generators_of_the_data_set_and_rates_of_numpy(tmp_path: Path) -> None:
    """A run that is stopped in its second epoch resumes the draws of the data set, too."""
    losses = []
    for stops in ((9,), (7, 9)):
        heard = LossFile(tmp_path / f"heard {len(stops)}")
        for steps in stops:
            folder, data = tmp_path / f"saved {len(stops)}", DataLoader(OwnDraws(), 4, shuffle=True)
            make_trainer(folder, heard.file, steps, data=data, scheduler=falling).fit()
        losses.append(heard.losses)
    assert len(losses[0]) == 9 and losses[0] == losses[1]


# -- what is refused -------------------------------------------------------------------------------


def refusal_text(code: str, **more: Any) -> str:
    """Return the message of a run that is refused."""
    folder, steps = more.pop("folder", None), more.pop("steps", 3)
    with pytest.raises(Refusal) as caught:
        make_trainer(folder, Path(os.devnull), steps, **more).fit()
    assert caught.value.diagnostic.code == code, caught.value
    return str(caught.value)


def test_another_schedule_is_told_with_the_difference(tmp_path: Path) -> None:
    """S693 names the new rows; `accept` goes on; a folder of `program.save` has no position in the
    data."""
    make_trainer(tmp_path / "a", tmp_path / "heard", 3).fit()
    new_schedule = "schedule 1 for Watcher\n\nblocks.*  checkpoint()\n"
    message = refusal_text("S693", folder=tmp_path / "a", steps=5, schedule=new_schedule)
    assert "+ blocks.*  checkpoint()" in message and "accept=True" in message
    program = make_trainer(
        tmp_path / "a", tmp_path / "heard", 5, schedule=new_schedule, accept=True
    ).fit()
    assert program.step == 5
    program.save(tmp_path / "b")
    message = refusal_text("S693", folder=tmp_path / "b", steps=6, schedule=new_schedule)
    assert "does not record the place of its run" in message


def test_data_that_end(tmp_path: Path) -> None:
    """An iterator ends the run, empty data are refused, and a list begins again."""
    assert "after 2 of 3" in refusal_text("S692", data=iter(fixed_batches()[:2]))
    refusal_text("S692", data=[])
    assert make_trainer(None, tmp_path / "heard", 7, data=fixed_batches()).fit().step == 7


def test_wrong_arguments() -> None:
    """Each is named, with a legal value."""
    assert "optimizer=lambda" in refusal_text("S691", scheduler=3)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    assert "evaluation=" in refusal_text("S691", scheduler=plateau)
    assert "without `step`" in refusal_text("S691", scheduler=lambda optimizer: optimizer.defaults)
    refusal_text("S691", data=5)
    refusal_text("S691", save_every=3)
    assert "did you mean `skip`" in refusal_text("S691", on_spike="skp")
    refusal_text("S691", log_every=0)


def test_a_batch_that_is_none(tmp_path: Path) -> None:
    """The program refuses it before training begins."""
    refusal_text("S618", data=[torch.zeros(3)])


def test_a_full_disk_ends_the_run_at_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S631, from a save in the background; the earlier checkpoint is still there."""
    from schedlang.runtime.checkpointing import archive

    make_trainer(tmp_path / "a", tmp_path / "heard", 3).fit()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(archive, "write_file", full)
    assert "No space left" in refusal_text("S631", folder=tmp_path / "a", steps=9)
    last = schedlang.last_checkpoint(tmp_path / "a")
    assert last is not None and last.name == "step-00000003"


# -- losses that are not as they should be ---------------------------------------------------------


def bad_batches(index: int) -> list[dict[str, Tensor]]:
    """Return batches of which one has NaN values."""
    data = fixed_batches() + fixed_batches()
    data[index] = {**data[index], "series": data[index]["series"] * math.nan}
    return data


def skip_on_rank(rank: int, text: str) -> Any:
    """Return parameters and moments before and after a bad batch, on this rank."""
    data, states = bad_batches(3), []

    class Sees:
        def on_step(self, trainer: Any) -> None:
            if trainer.program.step in (3, 4, 5):
                state = trainer.program.optimizer_state()
                states.append((trainer.program.state_dict(), state))

    training = make_trainer(
        None, Path(os.devnull), 6, data=data, schedule=text, on_spike="skip", callbacks=(Sees(),)
    )
    training.fit()
    return training.skipped, states


@pytest.mark.parametrize("text", [ONE_RANK, TWO_RANKS, PIPELINED], ids=["one", "two", "piped"])
def test_a_bad_update_is_skipped_alike_on_all_ranks(text: str) -> None:
    """Parameters and moments do not change in that step; the next step updates them."""
    ranks = 1 if text == ONE_RANK else 2
    for skipped, (
        (earlier, moments),
        (skipped_state, later_moments),
        (stepped_state, _),
    ) in run_ranks(ranks, skip_on_rank, text):
        assert skipped == 1
        assert all(torch.equal(earlier[name], skipped_state[name]) for name in earlier)
        for name, state in moments.items():
            for key, value in state.items():
                assert torch.equal(
                    torch.as_tensor(value), torch.as_tensor(later_moments[name][key])
                )
        assert any(
            not torch.equal(skipped_state[name], stepped_state[name]) for name in skipped_state
        )
        assert all(value.isfinite().all() for value in stepped_state.values())


def test_a_run_stops_or_rolls_back(tmp_path: Path) -> None:
    """S694 at the step; or the last checkpoint is loaded and the batch is skipped."""
    message = refusal_text("S694", data=bad_batches(3), steps=6)
    assert "step 4 is nan" in message and 'on_spike="skip"' in message
    heard = tmp_path / "heard"
    training = make_trainer(
        tmp_path / "a", heard, 8, data=bad_batches(3), on_spike="roll back", save_every=2
    )
    program = training.fit()
    assert program.step == 8 and training.rolled_back == 0
    assert all(value.isfinite().all() for value in program.state_dict().values())
    assert all(map(math.isfinite, LossFile(heard).losses.values()))
    always = itertools.repeat(bad_batches(3)[3])
    assert "came back 3 times" in refusal_text(
        "S694", data=always, folder=tmp_path / "b", on_spike="roll back"
    )


def test_a_spike_counts_from_the_mean(tmp_path: Path) -> None:
    """A loss that is finite, and far above the earlier ones."""
    refusal_text("S694", spike=1e-3, steps=6)
    training = make_trainer(None, tmp_path / "heard", 6, spike=1e-3, on_spike="skip")
    training.fit()
    assert training.skipped == 5  # the first has no mean to compare with


# -- callbacks and costs ---------------------------------------------------------------------------


def test_evaluation_is_the_mean_of_the_untouched_model(tmp_path: Path) -> None:
    """Batches are weighed by their rows, as in one batch of all."""
    data = fixed_batches()
    training = make_trainer(None, tmp_path / "heard", 1, evaluation=data, data=data)
    program = training.fit()
    model = Watcher().double()
    model.load_state_dict(program.state_dict())
    model.eval()
    joined = {key: torch.cat([batch[key] for batch in data]) for key in data[0]}
    with torch.no_grad():
        expected = float(loss(model(**joined), joined))
    assert math.isclose(training.evaluate()["evaluation loss"], expected, rel_tol=1e-12)


def test_callbacks_that_need_what_is_not_there(tmp_path: Path) -> None:
    """S691 names the missing package; if it is installed the figures are written."""
    for callback, module in ((TensorBoard(tmp_path / "tb"), "tensorboard"), (WandB(), "wandb")):
        try:
            __import__(module)
        except ImportError:
            assert module in refusal_text("S691", callbacks=(callback,), data=fixed_batches())


def test_the_profiler_runs_between_two_steps(tmp_path: Path) -> None:
    """A trace covers the steps that were asked for."""
    profile = Profile(tmp_path / "traces", 1, 2)
    make_trainer(None, tmp_path / "heard", 3, data=fixed_batches(), callbacks=(profile,)).fit()
    (trace,) = (tmp_path / "traces").iterdir()
    assert trace.name == "rank0-step2.json" and "aten::addmm" in trace.read_text()


def count_calls(act: Any) -> int:
    """Return the calls of Python and C functions that `act` makes."""
    import cProfile

    profile = cProfile.Profile()
    profile.enable()
    act()
    profile.disable()
    return sum(entry.callcount for entry in profile.getstats())


def test_a_step_costs_nothing_beside_the_programs(tmp_path: Path) -> None:
    """Ten more steps of the loop, without logging, add the calls of ten `train_step` calls over the
    same batches, and fewer than 30 more for each."""
    data = fixed_batches()
    training = make_trainer(None, tmp_path / "heard", 10, data=data, log_every=1000, scheduler=None)
    training.fit()
    program = training.program
    stream, counts = training._stream, {}
    counts["program"] = count_calls(lambda: [program.train_step(data[k % 5]) for k in range(10)])
    training.steps = program.step + 10
    training.callbacks = ()
    counts["loop"] = count_calls(training._train)
    assert stream.epoch >= 3
    assert 0 <= counts["loop"] - counts["program"] < 300 + 500, counts  # the logging at the end
    training.steps, earlier = program.step + 20, counts["loop"]
    counts["longer"] = count_calls(training._train)
    program_calls = counts["program"]
    assert counts["longer"] - earlier - program_calls < 30 * 10, counts


def run_on_device(rank: int, folder: str) -> Any:
    """Run on a simulated device: return the host's waits by step, and whether the saved state is
    right."""
    from schedlang.testing.accelerator import current

    torch.manual_seed(0)
    device, text = current(), TWO_RANKS if folder else ONE_RANK
    waits: list[int] = []

    class Counts:
        def on_step(self, trainer: Any) -> None:
            waits.append(len(device.synchronisations()))

    training = schedlang.Trainer(
        model=Watcher().to("sim"),
        schedule=text,
        data=[
            {
                key: value.float() if value.is_floating_point() else value
                for key, value in batch.items()
            }
            for batch in fixed_batches()
        ],
        steps=12,
        optimizer=adamw,
        scheduler=cosine,
        loss=loss,
        folder=folder,
        save_every=4,
        log_every=4,
        callbacks=(Counts(),),
    )
    program = training.fit()
    device.check()
    final = program.state_dict()
    program.load(folder)
    loaded = program.state_dict()
    return waits, all(torch.equal(final[name], loaded[name]) for name in final)


def test_the_host_waits_only_where_it_looks(tmp_path: Path) -> None:
    """On a simulated accelerator, whose pinned memory is NaN until a copy is waited for, steps
    without logging never wait for the device; background saves have the device's values."""
    from schedlang.testing.accelerator import spawn

    for waits, equal in spawn(run_on_device, 0, str(tmp_path / "a"), ranks=2, timeout=300):
        assert equal
        # steps 4, 8 and 12 log: between the others nothing waits
        assert waits[5] == waits[6] == waits[7] and waits[9] == waits[10] == waits[11], waits
