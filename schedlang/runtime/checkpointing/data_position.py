"""The position of a run besides its parameters: in the data, and of its random generators.

`Trainer` saves it beside a checkpoint, and restores it.
"""

from __future__ import annotations

import difflib
import platform
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import schedlang
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime.checkpointing.data_generators import (
    PersistentLoader,
    generator_states,
    restore_generators,
)

PlainData = dict[str, Any]
_LINES = 20  # lines of a difference of schedules in a message


class DataEnded(Exception):
    """Raised if the data have no further batch, and cannot be started again, or are empty."""


class BatchStream:
    """The batches of an iterable, started again at each end, and the position in it.

    data    any iterable. One with `state_dict` and `load_state_dict` (torchdata's
            StatefulDataLoader)
            stores its position itself; with others, the consumed batches are skipped, from the
            states
            that generators had at the start of the epoch
    epoch   how often it was started again; passed to `set_epoch` of the data or of its sampler
    taken   batches of this epoch so far
    """

    def __init__(self, data: Iterable[Any]) -> None:
        self.epoch, self.taken = 0, 0
        self.data: Any = data
        self.stateful = hasattr(data, "state_dict") and hasattr(data, "load_state_dict")
        self._loader = None if self.stateful else PersistentLoader.of(data)
        self._began: PlainData = {}
        self._it: Iterator[Any] | None = None
        self._peeked: list[Any] = []  # the batch that `peek` has returned
        self._peeked_state: PlainData = {}  # the state before that batch

    def __next__(self) -> Any:
        """Return the next batch, of a new epoch after the end of one. Raises Ended."""
        if self._peeked:
            return self._peeked.pop()
        # never by its truth: that asks an iterator for a length, which may be 0 or missing
        batch = next(self._begin() if self._it is None else self._it, self)
        if batch is self:  # the end of an epoch
            if not self.taken or self._it is self.data:
                raise DataEnded
            self.epoch, self.taken = self.epoch + 1, 0
            batch = next(self._begin(), self)
            if batch is self:
                raise DataEnded
        self.taken += 1
        return batch

    def peek(self) -> Any:
        """Return the next batch without consuming it. Raises Ended."""
        if not self._peeked:
            self._peeked_state = self.state()
            self._peeked.append(next(self))
        return self._peeked[0]

    def state(self) -> PlainData:
        """Return the position, with all generators: plain data, if the state of the data is."""
        if self._peeked:
            return self._peeked_state
        return {
            "epoch": self.epoch,
            "taken": self.taken,
            "began": self._began,
            "data": self.data.state_dict() if self.stateful else None,
            "generators": generator_states(self.data),
        }

    def restore(self, saved: Mapping[str, Any], generators_too: bool = True) -> None:
        """Restore the position of `state`, and the generators. Raises Ended."""
        self.epoch, self._peeked, self._it = saved["epoch"], [], None
        self.taken, self._began = 0, saved["began"]
        current = generator_states(self.data)
        if saved["data"] is not None and self.stateful:
            self.data.load_state_dict(saved["data"])
            self.taken = saved["taken"]
            if self.taken:  # start now: an iterator draws a seed for its workers at its start
                self._begin()
        elif saved["taken"]:
            restore_generators(self.data, saved["began"])
            if self._loader is not None:
                self._loader.restore(saved["began"].get("workers"))
            self._begin()
            for _ in range(saved["taken"]):
                next(self)
        restore_generators(self.data, saved["generators"] if generators_too else current)

    def _begin(self) -> Iterator[Any]:
        if not self.stateful:
            self._began = generator_states(self.data)
        if self._loader is not None:
            self._began["workers"] = self._loader.state()
        for source in (self.data, getattr(self.data, "sampler", None)):
            if (set_epoch := getattr(source, "set_epoch", None)) is not None:
                set_epoch(self.epoch)
        self._it = iter(self.data if self._loader is None else self._loader)
        return self._it


# -- checks of a run -------------------------------------------------------------------------------


def library_versions() -> PlainData:
    """Return the versions of schedlang, torch and Python, as saved in a checkpoint."""
    versions = {"schedlang": schedlang.__version__, "python": platform.python_version()}
    return {
        **versions,
        "torch": str(torch.__version__),
    }  # torch's class for versions is no plain text


def check_schedule(saved: Mapping[str, Any] | None, schedule: str, checkpoint: Path) -> None:
    """Refuse a schedule that differs from that of a checkpoint, and a checkpoint of no run (S693).

    schedule  the text under which the run continues
    """
    if saved is None:
        message = f"`{checkpoint}` does not record the place of its run in the data"
        helps = (
            "start the data again, with these parameters: `Trainer(..., accept=True)`",
            "or give another folder: checkpoints of `Trainer` record this place",
        )
        raise Refusal.of("S693", message, helps=helps)
    if saved["schedule"] == schedule:
        return
    old_lines, new_lines = saved["schedule"].splitlines(), schedule.splitlines()
    compared = difflib.ndiff(old_lines, new_lines)
    changed = [line for line in compared if line[:1] in "-+" and line[2:]]
    message = f"`{checkpoint}` was saved under another schedule"
    helps = (
        "continue with this one: `Trainer(..., accept=True)`; a checkpoint fits any layout",
        "or give the previous schedule, or another folder",
    )
    raise Refusal.of("S693", message, notes=tuple(changed[:_LINES]), helps=helps)


def check_parts(saved: Mapping[str, Any], parts: int, path: Path) -> None:
    """Refuse to continue if each rank has its own data and their number of parts has changed
    (S693).

    No position in one division is a position in the other.
    """
    if saved["parts"] != parts:
        message = f"`{path}` was saved with data in {saved['parts']} parts, but here are {parts}"
        helps = ("give full batches (`local=False`): their place fits any layout",)
        raise Refusal.of("S693", message, helps=helps)


def restore_scheduler(scheduler: Any, saved: Mapping[str, Any] | None) -> None:
    """Restore the state of a scheduler from a checkpoint.

    Lists by group of the optimizer keep this rank's values if it has another number of groups than
    the rank that saved: the current rates are in the optimizer's state.
    """
    if scheduler is None or saved is None:
        return
    current = {
        key: value
        for key, value in scheduler.state_dict().items()
        if isinstance(value, list) and len(value) != len(saved.get(key) or value)
    }
    scheduler.load_state_dict({**saved, **current})
