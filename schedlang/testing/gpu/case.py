"""Cases of the examination: its parts in order, their cases, and the outcome of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

OUTCOMES = ("ok", "wrong", "failed", "skipped", "late")


class Wrong(Exception):
    """Raised where a result is not what it should be."""


class Skipped(Exception):
    """Raised where a case cannot be run on this machine; the text says why."""


@dataclass(frozen=True)
class Setup:
    """The device of a part, and the size of its shapes: `full`, `quick`, or `tiny`."""

    device: str
    size: str = "full"

    @property
    def timed(self) -> bool:
        """True where times mean anything; elsewhere cases only run."""
        return self.device == "cuda"

    def pick(self, full: Any, quick: Any, tiny: Any) -> Any:
        """Choose the value for the size."""
        return {"full": full, "quick": quick, "tiny": tiny}[self.size]


@dataclass(frozen=True)
class Told:
    """The result of a case that went well: a few words, and numbers by name."""

    note: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """One thing to be shown; `run` raises `Wrong`, `Skipped`, or whatever goes wrong."""

    name: str
    run: Callable[[], Told]


@dataclass(frozen=True)
class Found:
    """The outcome of a case.

    ok        it ran, and equals what it is compared with
    wrong     it ran, and does not
    failed    it raised, ended its process, or was not done in time
    skipped   it was not tried: this machine has not what it needs
    late      it was not tried, or not done: the time of its part was up
    """

    part: str
    name: str
    outcome: str
    note: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def bad(self) -> bool:
        """True where something has to be mended."""
        return self.outcome in ("wrong", "failed")

    def plain(self) -> dict[str, Any]:
        """Return plain values, as JSON has them."""
        return asdict(self)


@dataclass(frozen=True)
class Part:
    """One part, in a process of its own.

    home     the module whose `cases(setup)` are run, or `module.function`
    limit    seconds of all of it; `quick` with small shapes
    each     seconds of one case, after which its process is ended
    timed    it is a benchmark: elsewhere than on a GPU its numbers are not told
    """

    name: str
    title: str
    home: str
    limit: float
    quick: float
    each: float = 60.0
    timed: bool = False


# what a part leaves of its time the later ones may use; together under ten minutes, and three
PARTS = (
    Part("kernels", "Kernels against their torch reference", "correctness", 85, 30),
    Part(
        "programs",
        "Programs of one rank, in a world of the device's own library",
        "programs.on_one_rank",
        55,
        25,
    ),
    Part("ranks", "Several ranks on one device, through gloo", "programs.on_ranks", 85, 30),
    Part("compiled", "Compiled regions", "programs.compiled", 60, 35),
    Part(
        "offload", "Offloading to pinned memory of the host, and back", "programs.offloaded", 25, 10
    ),
    Part(
        "contests",
        "Kernels beside eager, torch.compile, Liger and the floor of the device",
        "contests",
        135,
        25,
        75.0,
        timed=True,
    ),
    Part("layers", "Training layers of the shape of Llama-8B", "steps", 130, 17, 90.0, timed=True),
)
