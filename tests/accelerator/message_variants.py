"""Programs that communicate, one for each wait for a message or a sum of schedlang.

Each returns the largest difference between training on the devices and on the CPU.
"""

from __future__ import annotations

from typing import Any

import torch

from schedlang.passes.lower.build import build
from tests.accelerator import test_features_run as features
from tests.accelerator.offload_variants import max_error, program_error
from tests.accelerator.test_features_run import EXPERTS, MIXED, RING, STAGE_SPLIT, STEPS
from tests.expert_models import tiny_model
from tests.proofs import make_plan

SPLIT = "blocks  pipeline_split(over=pp)\n"
STAGES = SPLIT + 'pipeline(order="1F1B", micro=4)'


def training_error(
    mesh: str, text: str, make: Any = features.language_model, count: int = features.VOCAB_SIZE
) -> float:
    """Train a program for some steps; return its difference from the model in one process."""
    plan = make_plan(make().to("sim"), text, mesh, relax="lossy")
    program = build(plan, features.batch(0, count), optimizer=features.sgd)
    for step in range(STEPS):
        program.train_step({k: v.to("sim") for k, v in features.batch(step, count).items()})
    state, expected = program.state_dict(), features.single_process(make, count)[2]
    return max_error([state[name] for name in expected], list(expected.values()))


def stages() -> float:
    return program_error(STAGES, "pp=2")


def activations_on_a_peer(device: torch.device | None = None) -> float:
    text = "blocks.*  offload(activations, to=peer, over=pp)\n" + STAGES
    return program_error(text, "pp=2", device)


def state_on_a_peer(device: torch.device | None = None) -> float:
    return program_error(
        "blocks[0]  offload(optimizer, to=peer, over=pp)\n" + STAGES, "pp=2", device
    )


def gradient_sums() -> float:
    return program_error("zero(stage=0, over=dp)", "dp=2")


def overlapped_sums() -> float:
    return program_error("zero(stage=0, over=dp, bucket=1KiB)\noverlap(gradients)", "dp=2")


def sharded_parameters() -> float:
    """Tensors are put together when the state is read."""
    return program_error("zero(stage=3, over=dp)", "dp=2")


def ring() -> float:
    return training_error("cp=2", RING.format("ring", "cp", "cp"))


def zigzag() -> float:
    return training_error("cp=2", RING.format("ring, layout=zigzag", "cp", "cp"))


def experts_in_chunks() -> float:
    _, text, _ = EXPERTS["in chunks, of which some stay"]
    return training_error("ep=2", text, tiny_model, MIXED)


def double_ring() -> float:
    return training_error("r=2, c=2", RING.format("double_ring", "(r, c)", "(r, c)"))


def nbody() -> float:
    return training_error("r=2, c=2", RING.format("nbody", "(r, c)", "(r, c)"))


def breadth_first() -> float:
    """Stages whose shards are gathered once for several microbatches."""
    text = STAGE_SPLIT + 'zero(stage=3, over=dp)\npipeline(order="BFS", micro=4, chunks=2)'
    return training_error("dp=2, pp=2", text)


def sharded_stages() -> float:
    """Stages that gather at the beginning of a step, and whose sums end at its end."""
    text = STAGE_SPLIT + 'zero(stage=2, over=dp)\npipeline(order="1F1B", micro=4)'
    return training_error("dp=2, pp=2", text)


def ring_of_four() -> float:
    return training_error("cp=4", RING.format("ring", "cp", "cp"))


def nbody_of_eight() -> float:
    """Each member of a team meets two of the teams."""
    return training_error("r=4, c=2", RING.format("nbody", "(r, c)", "(r, c)"))


TWO = (stages, gradient_sums, overlapped_sums, sharded_parameters, ring, experts_in_chunks)
TWO += (state_on_a_peer, activations_on_a_peer, zigzag)
FOUR = (ring_of_four, double_ring, nbody, breadth_first, sharded_stages)
EIGHT = (nbody_of_eight,)
