"""What schedlang sends, in each of the ways that reach another wait for a message or a sum.

Each returns how far training on the devices is from plain training on the CPU.
"""

from __future__ import annotations

from typing import Any

import torch

from schedlang.passes.lower.build import build
from tests.accelerator import test_features_run as features
from tests.accelerator.copied_ways import apart, program
from tests.accelerator.test_features_run import CUT, EXPERTS, MIXED, RING, STEPS
from tests.expert_models import tiny
from tests.proofs import planned

SPLIT = "blocks  pipeline_split(over=pp)\n"
STAGES = SPLIT + 'pipeline(order="1F1B", micro=4)'


def trained(mesh: str, text: str, make: Any = features.words, count: int = features.WORDS) -> float:
    """Some steps of a program, and the same of the model alone."""
    plan = planned(make().to("sim"), text, mesh, relax="lossy")
    made = build(plan, features.batch(0, count), optimizer=features.sgd)
    for step in range(STEPS):
        made.train_step({k: v.to("sim") for k, v in features.batch(step, count).items()})
    state, wanted = made.state_dict(), features.alone(make, count)[2]
    return apart([state[name] for name in wanted], list(wanted.values()))


def stages() -> float:
    return program(STAGES, "pp=2")


def parked_on_a_peer(device: torch.device | None = None) -> float:
    text = "blocks.*  offload(activations, to=peer, over=pp)\n" + STAGES
    return program(text, "pp=2", device)


def state_on_a_peer(device: torch.device | None = None) -> float:
    return program("blocks[0]  offload(optimizer, to=peer, over=pp)\n" + STAGES, "pp=2", device)


def sums() -> float:
    return program("zero(stage=0, over=dp)", "dp=2")


def early_sums() -> float:
    return program("zero(stage=0, over=dp, bucket=1KiB)\noverlap(gradients)", "dp=2")


def slices() -> float:
    """Whole tensors are put together where the state is asked for."""
    return program("zero(stage=3, over=dp)", "dp=2")


def ring() -> float:
    return trained("cp=2", RING.format("ring", "cp", "cp"))


def zigzag() -> float:
    return trained("cp=2", RING.format("ring, layout=zigzag", "cp", "cp"))


def experts_in_chunks() -> float:
    _, text, _ = EXPERTS["in chunks, of which some stay"]
    return trained("ep=2", text, tiny, MIXED)


def double_ring() -> float:
    return trained("r=2, c=2", RING.format("double_ring", "(r, c)", "(r, c)"))


def nbody() -> float:
    return trained("r=2, c=2", RING.format("nbody", "(r, c)", "(r, c)"))


def breadth_first() -> float:
    """Stages whose slices are gathered once for several microbatches."""
    text = CUT + 'zero(stage=3, over=dp)\npipeline(order="BFS", micro=4, chunks=2)'
    return trained("dp=2, pp=2", text)


def ring_of_four() -> float:
    return trained("cp=4", RING.format("ring", "cp", "cp"))


def nbody_of_eight() -> float:
    """Each member of a team meets two of the teams."""
    return trained("r=4, c=2", RING.format("nbody", "(r, c)", "(r, c)"))


TWO = (stages, sums, early_sums, slices, ring, experts_in_chunks)
TWO += (state_on_a_peer, parked_on_a_peer, zigzag)
FOUR = (ring_of_four, double_ring, nbody, breadth_first)
EIGHT = (nbody_of_eight,)
