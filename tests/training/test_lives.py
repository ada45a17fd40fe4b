"""Runs that are killed again and again at random, under schedules of many kinds and two meshes."""

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
from tests.training.test_trainer import Heard, adamw, cosine

STEPS = 10
STAGES = "model.layers  pipeline_split(over=pp)\n"
Q = 'step "q" relax(model) {\n  model.layers.*.self_attn.q_proj  adapt(lora, rank=2)\n}\n'
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
        f"mesh(dp=2)\n{Q}zero(stage=2, over=dp)",
        f'mesh(pp=2)\n{Q}{STAGES}pipeline(order="1F1B", micro=2)',
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
    """The mean over all tokens, in the dtype of the model: transformers' own is in float32."""
    found: Tensor = F.cross_entropy(
        output.logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten()
    )
    return found


class Dies:
    """Ends some ranks at a step, so many seconds later: in a forward, a save, the next build."""

    def __init__(self, step: int, after: float, ranks: Sequence[int]) -> None:
        self.step, self.after, self.ranks = step, after, ranks
        self.timer = threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL))

    def on_begin(self, trainer: Any) -> None:
        """Before the first step of this life, if that is it."""
        self.on_step(trainer)

    def on_step(self, trainer: Any) -> None:
        """Wind it up."""
        own = trainer.program.assembly.ranks.rank in self.ranks
        if own and trainer.program.step >= self.step and not self.timer.ident:
            self.timer.start()


def _life(rank: int, folder: Path | None, heard: Path, text: str, dies: Any, steps: int) -> None:
    """A run, until its end or that of a rank."""
    end = Dies(*dies) if dies is not None else None
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
        callbacks=(Heard(heard), *([end] if end is not None else [])),
        accept=True,
    ).fit()
    if end is not None:
        end.timer.cancel()


def _killed(tmp_path: Path, name: str, kills: int, seed: int, steps: int = STEPS) -> int:
    """Kill a run so often; check its losses; how often a rank was ended by it."""
    own, other = CASES[name]
    world = 4 if "dp=2, pp=2" in own else 2
    run_ranks(world, _life, None, tmp_path / "whole", own, None, steps)
    whole = Heard(tmp_path / "whole").losses
    assert len(whole) == steps and len({*whole.values()}) == steps
    for text in filter(None, (own, other)):
        draw, died = random.Random(seed), 0
        folder, heard = tmp_path / f"{text == own}", tmp_path / f"heard {text == own}"
        for life in range(kills):
            ranks = draw.choice([[draw.randrange(world)], range(world)])
            dies = (draw.randrange(2 * life, 2 * life + 3), draw.uniform(0.0, 0.3), ranks)
            try:
                run_ranks(world, _life, folder, heard, own if life % 2 else text, dies, steps)
            except RankDied:
                died += 1
        run_ranks(world, _life, folder, heard, text, None, steps)
        found = Heard(heard).losses
        if text == own:
            assert found == whole
        assert found.keys() == whole.keys() and died
        for step, value in whole.items():
            assert math.isclose(found[step], value, rel_tol=1e-9), (step, died)
        print(f"{name}: {died} of {kills} lives killed, {'same' if text == own else 'other'} mesh")
    return died


@pytest.mark.parametrize("name", ["zero 3 in stages"])
def test_a_life_of_several(tmp_path: Path, name: str) -> None:
    """One kill of some or all ranks, and the run goes on bit by bit, or under the other mesh."""
    _killed(tmp_path, name, 1, 1, steps=5)


@pytest.mark.deep
@pytest.mark.parametrize("name", CASES)
def test_many_lives(tmp_path: Path, name: str) -> None:
    """Four lives each, under one mesh and under two that take turns."""
    _killed(tmp_path, name, 4, 2)
