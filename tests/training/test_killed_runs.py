"""Training runs killed again and again at random, under many schedules and two meshes."""

from __future__ import annotations

import math
import os
import random
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.nn import functional as F

import schedlang
from schedlang.runtime.launch.pool import RankDied
from tests import models
from tests.ranks import run_ranks
from tests.training.test_build import LLAMA, LLAMA_ENDS
from tests.training.test_trainer import LossFile, adamw, cosine

STEPS = 10
STAGES = "model.layers  pipeline_split(over=pp)\n"
LORA_Q = 'step "q" relax(model) {\n  model.layers.*.self_attn.q_proj  adapt(lora, rank=2)\n}\n'
BF16 = 'step "16" relax(dtype) {\n  cast(bf16)\n}\n'
FP16 = 'step "16" relax(dtype) {\n  cast(fp16, scale=1024, growth=3)\n}\n'
# rows, and those under which every second life goes on: the same losses up to rounding.  Casts
# round in places that hang on the layout: they go on under the same alone
CASES: dict[str, tuple[str, str]] = {
    "tp and sequence": (f"mesh(tp=2)\n{LLAMA}{LLAMA_ENDS}\n", "mesh(dp=2)\nzero(stage=2, over=dp)"),
    "interleaved": (
        f'mesh(pp=2)\n{STAGES}pipeline(order="Interleaved1F1B", micro=2, chunks=2)',
        f"mesh(tp=2)\n{LLAMA}{LLAMA_ENDS}\n",
    ),
    "zb-v": (
        f"mesh(pp=2)\n{STAGES}model.layers.**:Linear  split_backward()\n"
        'pipeline(order="ZBVZeroBubble", micro=4)',
        f'mesh(pp=2)\n{STAGES}pipeline(order="1F1B", micro=2)',
    ),
    "lora": (
        f"mesh(dp=2)\n{LORA_Q}zero(stage=2, over=dp)",
        f'mesh(pp=2)\n{LORA_Q}{STAGES}pipeline(order="1F1B", micro=2)',
    ),
    "zero 3 in stages": (
        f'mesh(dp=2, pp=2)\n{STAGES}zero(stage=3, over=dp)\npipeline(order="1F1B", micro=2)',
        "mesh(dp=4)\nzero(stage=1, over=dp)",
    ),
    "bf16": (f"mesh(dp=2)\n{BF16}\nzero(stage=3, over=dp)", ""),
    "fp16, scaled": (f'mesh(pp=2)\n{FP16}{STAGES}pipeline(order="1F1B", micro=2)', ""),
}
IDS = [models.tokens(rows=8, seed=seed)["input_ids"] for seed in range(4)]
DATA = [{"input_ids": ids} for ids in IDS]


def loss(output: Any, batch: Any) -> Tensor:
    """Return the mean over all tokens, in the model's dtype: transformers' own is in float32."""
    mean: Tensor = F.cross_entropy(
        output.logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten()
    )
    return mean


class Killer:
    """Kills some ranks a while after a step: in a forward, a save, or the next build."""

    def __init__(self, step: int, after: float, ranks: Sequence[int]) -> None:
        self.step, self.after, self.ranks = step, after, ranks
        self.timer = threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL))

    def on_begin(self, trainer: Any) -> None:
        """Start the timer before the first step of this run, if that is the one."""
        self.on_step(trainer)

    def on_step(self, trainer: Any) -> None:
        """Start the timer at its step."""
        is_victim = trainer.program.assembly.ranks.rank in self.ranks
        if is_victim and trainer.program.step >= self.step and not self.timer.ident:
            self.timer.start()


def train_once(
    rank: int, folder: Path | None, heard: Path, text: str, dies: Any, steps: int
) -> None:
    """Train until the end, or until a rank is killed."""
    end = Killer(*dies) if dies is not None else None
    model: Any = models.llama(4)
    schedlang.Trainer(
        schedule=f"schedule 1 for LlamaForCausalLM\n\n{text}\n",
        model=model.float() if " cast(" in text else model,
        data=DATA,
        steps=steps,
        optimizer=adamw,
        scheduler=cosine,
        loss=loss,
        clip=1.0,
        folder=folder,
        save_every=1 if folder is not None else 0,
        wait=bool(dies is not None and dies[0] % 2),
        log_every=1,
        callbacks=(LossFile(heard), *([end] if end is not None else [])),
        accept=True,
    ).fit()
    if end is not None:
        end.timer.cancel()


def train_with_kills(tmp_path: Path, name: str, kills: int, seed: int, steps: int = STEPS) -> int:
    """Kill a run so often and check its losses: return how many runs were killed."""
    primary, other_schedule = CASES[name]
    world = 4 if "dp=2, pp=2" in primary else 2
    run_ranks(world, train_once, None, tmp_path / "whole", primary, None, steps)
    expected = LossFile(tmp_path / "whole").losses
    assert len(expected) == steps and len({*expected.values()}) == steps
    for text in filter(None, (primary, other_schedule)):
        draw, died = random.Random(seed), 0
        folder, heard = tmp_path / f"{text == primary}", tmp_path / f"heard {text == primary}"
        for start in range(kills):
            ranks = draw.choice([[draw.randrange(world)], range(world)])
            dies = (draw.randrange(2 * start, 2 * start + 3), draw.uniform(0.0, 0.3), ranks)
            try:
                run_ranks(
                    world, train_once, folder, heard, primary if start % 2 else text, dies, steps
                )
            except RankDied:
                died += 1
        run_ranks(world, train_once, folder, heard, text, None, steps)
        losses = LossFile(heard).losses
        if text == primary:
            assert losses == expected
        assert losses.keys() == expected.keys() and died
        for step, value in expected.items():
            assert math.isclose(losses[step], value, rel_tol=1e-9), (step, died)
        print(
            f"{name}: {died} of {kills} lives killed, {'same' if text == primary else 'other'} mesh"
        )
    return died


@pytest.mark.parametrize("name", ["zero 3 in stages"])
def test_a_life_of_several(tmp_path: Path, name: str) -> None:
    """After one kill of some or all ranks the run goes on bit by bit, or under the other mesh."""
    train_with_kills(tmp_path, name, 1, 1, steps=5)


@pytest.mark.deep
@pytest.mark.parametrize("name", CASES)
def test_many_lives(tmp_path: Path, name: str) -> None:
    """Four kills each, under one mesh and under two in turn."""
    train_with_kills(tmp_path, name, 4, 2)
