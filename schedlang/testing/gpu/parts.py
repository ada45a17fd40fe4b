"""The parts of the examination in their order, and the seconds that each may take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """One part, in a process of its own.

    home     the module whose `cases(setup)` are run
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
        "programs",
        55,
        25,
    ),
    Part("ranks", "Several ranks on one device, through gloo", "ranks", 85, 30),
    Part("compiled", "Compiled regions", "compiled", 60, 35),
    Part("offload", "Offloading to pinned memory of the host, and back", "offload", 25, 10),
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
