"""The examination's parts in order, their cases, and the outcome of each case."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

OUTCOMES = ("ok", "wrong", "failed", "skipped", "late")


class Wrong(Exception):
    """Raised for a wrong result."""


class Skipped(Exception):
    """Raised for a case that cannot run on this machine, with the reason."""


@dataclass(frozen=True)
class Setup:
    """The device, and the size of its shapes: `full`, `quick`, or `tiny`."""

    device: str
    size: str = "full"

    @property
    def timed(self) -> bool:
        """Whether times are meaningful; elsewhere cases only run."""
        return self.device == "cuda"

    def pick(self, full: Any, quick: Any, tiny: Any) -> Any:
        """Return the value for the size."""
        return {"full": full, "quick": quick, "tiny": tiny}[self.size]


@dataclass(frozen=True)
class Told:
    """The result of a successful case: a note, and numbers by name."""

    note: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """One thing to show; `run` raises `Wrong`, `Skipped`, or any error."""

    name: str
    run: Callable[[], Told]


@dataclass(frozen=True)
class Found:
    """The outcome of a case.

    ok        it ran, and equals its reference
    wrong     it ran, and does not equal its reference
    failed    it raised, ended its process, or exceeded its time
    skipped   it was not run: this machine lacks what it needs
    late      it was not run, or not finished: the time of its part was up
    """

    part: str
    name: str
    outcome: str
    note: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def bad(self) -> bool:
        """Whether something has to be fixed."""
        return self.outcome in ("wrong", "failed")

    def plain(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Part:
    """One part, in its own process.

    home     the module whose `cases(setup)` are run, or `module.function`
    limit    seconds of the part; `quick` with small shapes
    each     seconds of one case, after which its process is ended
    timed    a benchmark: its numbers are shown for a GPU only
    """

    name: str
    title: str
    home: str
    limit: float
    quick: float
    each: float = 60.0
    timed: bool = False


# later parts may use the time that a part does not need; together under ten minutes (quick: three)
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
