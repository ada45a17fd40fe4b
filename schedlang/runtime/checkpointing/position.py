"""The place of a run beside its parameters: in the data, and of its random generators."""

from __future__ import annotations

import difflib
import platform
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import schedlang
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime import device as devices

Plain = dict[str, Any]
_LINES = 20  # of a difference of schedules that are shown
# where loaders and samplers of torch keep generators of their own
_HELD = ("", "sampler", "batch_sampler", "batch_sampler.sampler", "dataset")


class Ended(Exception):
    """The data give no further batch, and cannot be begun again, or are empty."""


class Stream:
    """The batches of an iterable, begun again each time that it ends, and the place in it.

    data    any iterable.  One with `state_dict` and `load_state_dict` (torchdata's
            StatefulDataLoader) tells its place itself; of others those batches are passed over
            that were taken, from the state that generators had where the epoch began
    epoch   how often it has been begun again; given to a `set_epoch` of it or of its sampler
    taken   batches of this epoch so far
    """

    def __init__(self, data: Iterable[Any]) -> None:
        self.epoch, self.taken = 0, 0
        self.data: Any = data
        self.stateful = hasattr(data, "state_dict") and hasattr(data, "load_state_dict")
        self._began: Plain = {}
        self._it: Iterator[Any] | None = None
        self._ahead: list[Any] = []  # a batch that was looked at before its turn
        self._before: Plain = {}  # the place of what was looked at

    def __next__(self) -> Any:
        """The next batch, of a new epoch where one ends.  Raises Ended."""
        if self._ahead:
            return self._ahead.pop()
        batch = next(self._it or self._begin(), self)
        if batch is self:  # the end of an epoch
            if not self.taken or self._it is self.data:
                raise Ended
            self.epoch, self.taken = self.epoch + 1, 0
            batch = next(self._begin(), self)
            if batch is self:
                raise Ended
        self.taken += 1
        return batch

    def look(self) -> Any:
        """The next batch, which is still the next one.  Raises Ended."""
        if not self._ahead:
            self._before = self.state()
            self._ahead.append(next(self))
        return self._ahead[0]

    def state(self) -> Plain:
        """Return the place, with all generators: plain data, if that of the data is."""
        if self._ahead:
            return self._before
        return {
            "epoch": self.epoch,
            "taken": self.taken,
            "began": self._began,
            "data": self.data.state_dict() if self.stateful else None,
            "generators": generators(self.data),
        }

    def go_to(self, saved: Mapping[str, Any], generators_too: bool = True) -> None:
        """Stand where `state` has been asked for; generators, too.  Raises Ended."""
        self.epoch, self._ahead, self._it = saved["epoch"], [], None
        self.taken, self._began = 0, saved["began"]
        kept = generators(self.data)
        if saved["data"] is not None and self.stateful:
            self.data.load_state_dict(saved["data"])
            self.taken = saved["taken"]
            if self.taken:  # now: an iterator draws a seed for its workers when it begins
                self._begin()
        elif saved["taken"]:
            put_back(self.data, saved["began"])
            self._begin()
            for _ in range(saved["taken"]):
                next(self)
        put_back(self.data, saved["generators"] if generators_too else kept)

    def _begin(self) -> Iterator[Any]:
        if not self.stateful:
            self._began = generators(self.data)
        for one in (self.data, getattr(self.data, "sampler", None)):
            if (set_epoch := getattr(one, "set_epoch", None)) is not None:
                set_epoch(self.epoch)
        self._it = iter(self.data)
        return self._it


# -- what a run is under ---------------------------------------------------------------------------


def versions() -> Plain:
    """Return those of schedlang, torch and Python, as a checkpoint keeps them."""
    kept = {"schedlang": schedlang.__version__, "python": platform.python_version()}
    return {**kept, "torch": str(torch.__version__)}  # a class of its own is no plain text


def check_same(saved: Mapping[str, Any] | None, schedule: str, last: Path) -> None:
    """Refuse another schedule than a checkpoint's with their difference, or one of no run (S693).

    schedule  the text under which the run goes on
    """
    if saved is None:
        title = f"`{last}` does not tell where its run stood in the data"
        helps = (
            "begin the data anew, with these parameters: `Trainer(..., accept=True)`",
            "or give another folder: `Trainer` keeps that in those that it saves",
        )
        raise Refusal.of("S693", title, helps=helps)
    if saved["schedule"] == schedule:
        return
    before, now = saved["schedule"].splitlines(), schedule.splitlines()
    compared = difflib.ndiff(before, now)
    changed = [line for line in compared if line[:1] in "-+" and line[2:]]
    title = f"`{last}` was saved under another schedule"
    helps = (
        "go on under this one: `Trainer(..., accept=True)`; a checkpoint fits any layout",
        "or give the schedule of before, or another folder",
    )
    raise Refusal.of("S693", title, notes=tuple(changed[:_LINES]), helps=helps)


def check_parts(saved: Mapping[str, Any], parts: int, last: Path) -> None:
    """Refuse to go on where each rank has rows of its own, and they are dealt to another number of
    parts: no place in one is a place in the other (S693)."""
    if saved["parts"] != parts:
        title = f"`{last}` was saved where data were in {saved['parts']} parts, and here in {parts}"
        helps = ("give whole batches (`local=False`): their place fits any layout",)
        raise Refusal.of("S693", title, helps=helps)


def scheduled_on(scheduler: Any, saved: Mapping[str, Any] | None) -> None:
    """Put a scheduler where a checkpoint has it.

    Lists by group of the optimizer stay this rank's own where it has another number of groups than
    the rank that saved: the rates of now are in the optimizer's state.
    """
    if scheduler is None or saved is None:
        return
    own = {
        key: value
        for key, value in scheduler.state_dict().items()
        if isinstance(value, list) and len(value) != len(saved.get(key) or value)
    }
    scheduler.load_state_dict({**saved, **own})


# -- generators ------------------------------------------------------------------------------------


def generators(data: Any = None) -> Plain:
    """The states of torch's, Python's and numpy's generators, and of those that a loader holds."""
    kind = devices.accelerator()
    found: Plain = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": None,
        "device": None if kind is None else devices.default_generator(kind).get_state(),
        "loader": [one.get_state() for one in _held(data)],
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        saved = numpy.random.get_state(legacy=False)
        state = {key: _listed(value) for key, value in saved["state"].items()}
        found["numpy"] = {**saved, "state": state}
    return found


def put_back(data: Any, saved: Mapping[str, Any]) -> None:
    """Give generators the states that `generators` has given; others stay as they are."""
    torch.set_rng_state(saved["torch"])
    version, numbers, gauss = saved["python"]
    random.setstate((version, tuple(numbers), gauss))
    if saved["numpy"] is not None and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(saved["numpy"])
    kind = devices.accelerator()
    if saved["device"] is not None and kind is not None:
        devices.default_generator(kind).set_state(saved["device"])
    for one, state in zip(_held(data), saved["loader"]):
        one.set_state(state)


def _listed(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _held(data: Any) -> list[torch.Generator]:
    """The generators that a loader and its samplers hold, each once."""
    found: dict[int, torch.Generator] = {}
    for path in _HELD:
        one = data
        for name in filter(None, path.split(".")):
            one = getattr(one, name, None)
        generator = getattr(one, "generator", None)
        if isinstance(generator, torch.Generator):
            found[id(generator)] = generator
    return list(found.values())
