"""Runs of `Trainer`: stopped, killed and gone on with, their losses are those of an undisturbed
one."""

from __future__ import annotations

import itertools
import math
import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import schedlang
from examples.custom.model import Watcher, loss
from schedlang.callbacks import Profile, TensorBoard, WandB
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime.launch.pool import RankDied
from tests.ranks import run_ranks

ONE = "schedule 1 for Watcher\n"
TWO = "schedule 1 for Watcher\n\nmesh(dp=2)\n\nzero(stage=1, over=dp)\n"
PIPED = """schedule 1 for Watcher

mesh(pp=2)

blocks  pipeline_split(over=pp)
pipeline(order="1F1B", micro=2)
"""


class Rows(Dataset[dict[str, Tensor]]):
    """Nineteen series, a part of each drawn anew each time that it is asked for."""

    def __len__(self) -> int:
        return 19

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(row)
        series = torch.randn(6, 7, generator=generator, dtype=torch.float64)
        noise = 0.01 * random.random() + 0.01 * torch.rand((), dtype=torch.float64)
        return {"series": series + noise, "lengths": torch.tensor(6)}


class Heard:
    """Keeps the loss of each step, in a file that survives whoever writes it."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_log(self, trainer: Any, figures: dict[str, float]) -> None:
        """Add a line."""
        if trainer.program.assembly.ranks.rank == 0 and "loss" in figures:
            with self.file.open("a") as file:
                file.write(f"{int(figures['step'])} {figures['loss'].hex()}\n")

    @property
    def losses(self) -> dict[int, float]:
        """The loss of each step, as it was told last."""
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        return {int(step): float.fromhex(loss) for step, loss in map(str.split, lines)}


def adamw(named: Any) -> torch.optim.Optimizer:
    """AdamW."""
    return torch.optim.AdamW(named, lr=3e-3)


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    """A rate that is another one in each step."""
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)


def trainer(folder: Path | None, heard: Path, steps: int = 14, **more: Any) -> schedlang.Trainer:
    """A run of everything that has a state: shuffled rows, draws, dropout, a moving rate."""
    torch.manual_seed(0)
    random.seed(0)
    given: dict[str, Any] = dict(
        data=DataLoader(Rows(), batch_size=4, shuffle=True),
        schedule=ONE,
        scheduler=cosine,
        folder=folder,
        callbacks=(Heard(heard),),
        save_every=3 if folder is not None else 0,
        log_every=1,
    )
    model = Watcher().double()
    return schedlang.Trainer(
        model=model, steps=steps, optimizer=adamw, loss=loss, **{**given, **more}
    )


def _run(rank: int, folder: Path | None, heard: Path, steps: int, more: dict[str, Any]) -> Any:
    """Train, and end at a moment if one is given."""
    more = dict(more)
    moment, who = more.pop("dies", (None, 0))
    end = threading.Timer(moment or 0.0, os.kill, (os.getpid(), signal.SIGKILL))
    if moment is not None and rank == who:
        end.start()
    program = trainer(folder, heard, steps, **more).fit()
    end.cancel()  # who came through lives: this rank runs the next job
    return program.step, program.state_dict()


def run(
    ranks: int, folder: Path | None, heard: Path, steps: int = 14, **more: Any
) -> dict[int, float]:
    """The losses of a run."""
    run_ranks(ranks, _run, folder, heard, steps, more)
    return Heard(heard).losses


def test_a_run_that_is_stopped_goes_on_bit_by_bit(tmp_path: Path) -> None:
    """In any step of an epoch, on one rank, which draws from the process's own generators: order of
    the rows, what the data draw, dropout and learning rate are those of the run that was not."""
    whole = run(1, None, tmp_path / "whole")
    assert len(whole) == 14 and len({*whole.values()}) == 14
    for stop in (2, 5, 9):
        heard = tmp_path / f"heard{stop}"
        run(1, tmp_path / f"saved{stop}", heard, stop)
        assert run(1, tmp_path / f"saved{stop}", heard) == whole


def test_another_state_gives_other_losses(tmp_path: Path) -> None:
    """Each thing that a run goes on from counts: without it the losses are others."""
    from schedlang.runtime.checkpointing import data_position

    whole = run(1, None, tmp_path / "whole", 8)
    for name in ("generators", "taken", "scheduler"):
        folder, heard = tmp_path / name, tmp_path / f"heard {name}"
        run(1, folder, heard, 3)
        resumed = trainer(folder, heard, 8)
        go_to = data_position.BatchStream.restore

        def other(self: Any, told: Any, name: str = name, go_to: Any = go_to) -> None:
            changed = {"taken": 0} if name == "taken" else {}
            if name == "generators":
                changed = {"generators": data_position.generator_states(self.data)}
            go_to(self, {**told, **changed})

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(data_position.BatchStream, "restore", other)
            if name == "scheduler":
                patched.setattr(data_position, "restore_scheduler", lambda *_: None)
            resumed.fit()
        assert Heard(heard).losses != whole, name


def _killed(tmp_path: Path, kills: int, ranks: int, text: str, seed: int) -> tuple[int, Any, Any]:
    """How often a run was killed until it came through; its losses, and an undisturbed one's."""
    draw = random.Random(seed)
    more = {"schedule": text, "save_every": 1}
    whole = run(ranks, None, tmp_path / "whole", 14, schedule=text)
    heard, died = tmp_path / "heard", 0
    while died < kills:
        dies = (draw.uniform(0.05, 1.5), draw.randrange(ranks))
        try:
            run(ranks, tmp_path / "saved", heard, 14, **more, dies=dies)
            break
        except RankDied:
            died += 1
    return died, run(ranks, tmp_path / "saved", heard, 14, **more), whole


@pytest.mark.parametrize("text", [ONE, TWO], ids=["one", "two"])
def test_a_run_that_is_killed_at_any_moment_has_the_same_losses(tmp_path: Path, text: str) -> None:
    """A process dies at random: before the first save, within one, between two; started again the
    run has, step by step, the losses of one that was left alone."""
    died, losses, whole = _killed(tmp_path, 3, 1 if text == ONE else 2, text, 1)
    assert losses == whole


@pytest.mark.deep
@pytest.mark.parametrize("text", [ONE, TWO, PIPED], ids=["one", "two", "piped"])
def test_many_kills(tmp_path: Path, text: str) -> None:
    """The same, 15 times for each layout."""
    for seed in range(5):
        folder = tmp_path / str(seed)
        folder.mkdir()
        died, losses, whole = _killed(folder, 3, 1 if text == ONE else 2, text, seed)
        assert losses == whole, (seed, died)


def test_a_run_goes_on_under_another_layout(tmp_path: Path) -> None:
    """From two ranks with slices to a pipeline to one rank: losses equal within rounding, where
    dropout's masks do not hang on the layout."""
    more: dict[str, Any] = {"build": {"dropout": "logical", "seed": 7}, "accept": True}
    draws: dict[str, Any] = {"data": _plain()}
    whole = run(1, None, tmp_path / "whole", 9, **more, **draws)
    folder, heard = tmp_path / "saved", tmp_path / "heard"
    for ranks, text, steps in ((2, TWO, 4), (2, PIPED, 7), (1, ONE, 9)):
        found = run(ranks, folder, heard, steps, schedule=text, **more, **draws)
    assert found.keys() == whole.keys()
    for step, value in whole.items():
        assert math.isclose(found[step], value, rel_tol=1e-12), step
    assert found != whole  # sums of another order: it was another layout


def _plain() -> list[dict[str, Tensor]]:
    """Five batches; the last is smaller.  Ranks draw the same: with others they are refused."""
    random.seed(0)
    rows = [Rows()[row] for row in range(19)]
    return [
        {key: torch.stack([row[key] for row in rows[at : at + 4]]) for key in rows[0]}
        for at in range(0, 19, 4)
    ]


# -- what is refused -------------------------------------------------------------------------------


def refused(code: str, **more: Any) -> str:
    """The message of a run that is refused."""
    folder, steps = more.pop("folder", None), more.pop("steps", 3)
    with pytest.raises(Refusal) as caught:
        trainer(folder, Path(os.devnull), steps, **more).fit()
    assert caught.value.diagnostic.code == code, caught.value
    return str(caught.value)


def test_another_schedule_is_told_with_the_difference(tmp_path: Path) -> None:
    """S693 names the rows that are new; `accept` goes on; a folder of `program.save` tells no place
    in the data."""
    trainer(tmp_path / "a", tmp_path / "heard", 3).fit()
    new = "schedule 1 for Watcher\n\nblocks.*  checkpoint()\n"
    said = refused("S693", folder=tmp_path / "a", steps=5, schedule=new)
    assert "+ blocks.*  checkpoint()" in said and "accept=True" in said
    done = trainer(tmp_path / "a", tmp_path / "heard", 5, schedule=new, accept=True).fit()
    assert done.step == 5
    done.save(tmp_path / "b")
    said = refused("S693", folder=tmp_path / "b", steps=6, schedule=new)
    assert "does not record the place of its run" in said


def test_data_that_end(tmp_path: Path) -> None:
    """An iterator that ends, nothing at all; a list begins again."""
    assert "after 2 of 3" in refused("S692", data=iter(_plain()[:2]))
    refused("S692", data=[])
    assert trainer(None, tmp_path / "heard", 7, data=_plain()).fit().step == 7


def test_wrong_arguments() -> None:
    """Each is named, with what is right."""
    assert "optimizer=lambda" in refused("S691", scheduler=3)
    refused("S691", data=5)
    refused("S691", save_every=3)
    assert "did you mean `skip`" in refused("S691", on_spike="skp")
    refused("S691", log_every=0)


def test_a_batch_that_is_none(tmp_path: Path) -> None:
    """What is no batch is refused by the program, before anything is trained."""
    refused("S618", data=[torch.zeros(3)])


def test_a_full_disk_ends_the_run_at_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S631, from a save in the background, and the checkpoint before is there."""
    from schedlang.runtime.checkpointing import archive

    trainer(tmp_path / "a", tmp_path / "heard", 3).fit()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(archive, "write_file", full)
    assert "No space left" in refused("S631", folder=tmp_path / "a", steps=9)
    last = schedlang.last_checkpoint(tmp_path / "a")
    assert last is not None and last.name == "step-00000003"


# -- losses that are not as they should be ---------------------------------------------------------


def _bad(place: int) -> list[dict[str, Tensor]]:
    """Batches of which one has a value that is no number."""
    data = _plain() + _plain()
    data[place] = {**data[place], "series": data[place]["series"] * math.nan}
    return data


def _skipping(rank: int, text: str) -> Any:
    """Parameters and moments before and after a bad batch, as the first rank sees them."""
    data, seen = _bad(3), []

    class Sees:
        def on_step(self, trainer: Any) -> None:
            if trainer.program.step in (3, 4, 5):
                state = trainer.program.optimizer_state()
                seen.append((trainer.program.state_dict(), state))

    run = trainer(
        None, Path(os.devnull), 6, data=data, schedule=text, on_spike="skip", callbacks=(Sees(),)
    )
    run.fit()
    return run.skipped, seen


@pytest.mark.parametrize("text", [ONE, TWO, PIPED], ids=["one", "two", "piped"])
def test_a_bad_update_is_skipped_alike_on_all_ranks(text: str) -> None:
    """Parameters and moments are bit by bit those before the step; the next step moves them."""
    ranks = 1 if text == ONE else 2
    for skipped, ((before, moments), (after, same), (later, _)) in run_ranks(
        ranks, _skipping, text
    ):
        assert skipped == 1
        assert all(torch.equal(before[name], after[name]) for name in before)
        for name, state in moments.items():
            for key, value in state.items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(same[name][key]))
        assert any(not torch.equal(after[name], later[name]) for name in after)
        assert all(value.isfinite().all() for value in later.values())


def test_a_run_stops_or_rolls_back(tmp_path: Path) -> None:
    """S694 at the step; or the last checkpoint is loaded and the batch is not met again."""
    said = refused("S694", data=_bad(3), steps=6)
    assert "step 4 is nan" in said and 'on_spike="skip"' in said
    heard = tmp_path / "heard"
    run = trainer(tmp_path / "a", heard, 8, data=_bad(3), on_spike="roll back", save_every=2)
    program = run.fit()
    assert program.step == 8 and run.rolled_back == 0
    assert all(value.isfinite().all() for value in program.state_dict().values())
    assert all(map(math.isfinite, Heard(heard).losses.values()))
    always = itertools.repeat(_bad(3)[3])
    assert "came back 3 times" in refused(
        "S694", data=always, folder=tmp_path / "b", on_spike="roll back"
    )


def test_a_spike_counts_from_the_mean(tmp_path: Path) -> None:
    """A loss that is finite, and far above those before."""
    refused("S694", spike=1e-3, steps=6)
    run = trainer(None, tmp_path / "heard", 6, spike=1e-3, on_spike="skip")
    run.fit()
    assert run.skipped == 5  # the first has no mean to be measured by


# -- callbacks and costs ---------------------------------------------------------------------------


def test_evaluation_is_the_mean_of_the_untouched_model(tmp_path: Path) -> None:
    """Each batch by its rows, as one batch of all would have it."""
    data = _plain()
    run = trainer(None, tmp_path / "heard", 1, evaluation=data, data=data)
    program = run.fit()
    model = Watcher().double()
    model.load_state_dict(program.state_dict())
    model.eval()
    every = {key: torch.cat([one[key] for one in data]) for key in data[0]}
    with torch.no_grad():
        expected = float(loss(model(**every), every))
    assert math.isclose(run.evaluate()["evaluation loss"], expected, rel_tol=1e-12)


def test_callbacks_that_need_what_is_not_there(tmp_path: Path) -> None:
    """S691 names the package; where it is installed the figures are written."""
    for callback, module in ((TensorBoard(tmp_path / "tb"), "tensorboard"), (WandB(), "wandb")):
        try:
            __import__(module)
        except ImportError:
            assert module in refused("S691", callbacks=(callback,), data=_plain())


def test_the_profiler_runs_between_two_steps(tmp_path: Path) -> None:
    """A trace of the steps that were asked for."""
    profile = Profile(tmp_path / "traces", 1, 2)
    trainer(None, tmp_path / "heard", 3, data=_plain(), callbacks=(profile,)).fit()
    (trace,) = (tmp_path / "traces").iterdir()
    assert trace.name == "rank0-step2.json" and "aten::addmm" in trace.read_text()


def _calls(act: Any) -> int:
    """Calls of Python and C functions of the fourth step."""
    import cProfile

    profile = cProfile.Profile()
    profile.enable()
    act()
    profile.disable()
    return sum(entry.callcount for entry in profile.getstats())


def test_a_step_costs_nothing_beside_the_programs(tmp_path: Path) -> None:
    """Ten more steps of the loop without a look make ten times as many calls as ten of
    `train_step` over the same batches, and fewer than 30 more for each."""
    data = _plain()
    run = trainer(None, tmp_path / "heard", 10, data=data, log_every=1000, scheduler=None)
    run.fit()
    program = run.program
    stream, counts = run._stream, {}
    counts["program"] = _calls(lambda: [program.train_step(data[k % 5]) for k in range(10)])
    run.steps = program.step + 10
    run.callbacks = ()
    counts["loop"] = _calls(run._train)
    assert stream.epoch >= 3
    assert 0 <= counts["loop"] - counts["program"] < 300 + 500, counts  # the look at the end
    run.steps, before = program.step + 20, counts["loop"]
    counts["longer"] = _calls(run._train)
    plain = counts["program"]
    assert counts["longer"] - before - plain < 30 * 10, counts


def _on_device(rank: int, folder: str) -> Any:
    """A run on a simulated device: waits of the host in steps that are not looked at, and what of
    its memory was not ordered."""
    from schedlang.testing.accelerator import current

    torch.manual_seed(0)
    seen, text = current(), TWO if folder else ONE
    found: list[int] = []

    class Counts:
        def on_step(self, trainer: Any) -> None:
            found.append(len(seen.synchronisations()))

    run = schedlang.Trainer(
        model=Watcher().to("sim"),
        schedule=text,
        data=[
            {
                key: value.float() if value.is_floating_point() else value
                for key, value in one.items()
            }
            for one in _plain()
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
    program = run.fit()
    seen.check()
    whole = program.state_dict()
    program.load(folder)
    again = program.state_dict()
    return found, all(torch.equal(whole[name], again[name]) for name in whole)


def test_the_host_waits_only_where_it_looks(tmp_path: Path) -> None:
    """On a simulated accelerator, whose pinned memory is NaN until a copy is waited for: a step of
    the loop waits for the device as often as the program does, which is never; what was saved in
    the background is what the device held."""
    from schedlang.testing.accelerator import spawn

    for found, same in spawn(_on_device, 0, str(tmp_path / "a"), ranks=2, timeout=300):
        assert same
        # a look follows the steps 4, 8 and 12: between the others nothing is waited for
        assert found[5] == found[6] == found[7] and found[9] == found[10] == found[11], found
