"""Models that people write in one file, judged by a plain torch loop.

Each model trains three steps in a plain loop, on batches of different numbers of rows, and under a
schedule on rank threads: under what `init` writes for a mesh, or under a hand-written one.
Compared: losses, gradients and their norm, parameters and buffers, and outputs in evaluation.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from schedlang.diagnostics.source import Source
from schedlang.ir.plan import Plan
from schedlang.language.syntax import parse
from schedlang.passes.autoshard.propose import propose
from schedlang.passes.elaborate.state import Settings
from schedlang.passes.lower.build import build
from schedlang.passes.prove import Case
from schedlang.passes.verify.probe import check_parts
from schedlang.passes.verify.proof_case import prepare_case
from schedlang.runtime.lazy_logits.stand_in import to_full
from schedlang.schedule import Schedule
from tests.properties.user_models import (
    Seen,
    _to_float64,
    differences,
    loss_of,
    step_plainly,
    step_program,
)

Batch = dict[str, Any]
ROWS = (6, 7, 6)
CLIP = 0.5
MESHES: Mapping[str, Mapping[str, int]] = {
    "dp": {"dp": 2},
    "tp": {"tp": 2},
    "zero": {"fsdp": 2},
    "pp": {"pp": 2},
    "dp, tp": {"dp": 2, "tp": 2},
}


@dataclass(frozen=True)
class Written:
    """A model as its author wrote it.

    make    builds the module, batch makes a batch of a number of rows and a seed
    loss    of output and batch, for a model without its own; weight of a part of a batch
    sizes   the number of rows of the batch of each step
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    loss: Callable[[Any, Any], Tensor] | None = None
    weight: Callable[[Any], float] | None = None
    sizes: tuple[int, ...] = ROWS

    def model(self) -> nn.Module:
        """Build the module in float64, always with the same values."""
        torch.manual_seed(0)
        return self.make().double()

    def batches(self) -> list[Batch]:
        """Return a batch for each of three steps."""
        return [_to_float64(self.batch(rows, seed)) for seed, rows in enumerate(self.sizes)]


def hand_text(text: str) -> str:
    """Return the text of a schedule: a first line with the mesh, and rows."""
    mesh, *rows = text.strip().split("\n")
    return f'schedule 1\n\nmesh({mesh})\n\nstep "rows" {{\n' + "\n".join(rows) + "\n}\n"


def init_text(written: Written, mesh: str) -> str:
    """Return what `init` writes for a mesh."""
    with torch.device("meta"):
        model = written.make()
    batch = written.batch(8, 0)
    calls = written.loss, written.weight
    return propose(model, batch, MESHES[mesh], *calls, values=written.make).text


def optimizer_of(named: Any) -> torch.optim.Optimizer:
    """Return the optimizer of both loops."""
    parameters = [p for _, p in named if p.requires_grad]
    return torch.optim.AdamW(parameters, lr=0.02, eps=1e-4, weight_decay=0.1)


def outputs_of(output: Any) -> Seen:
    """Return the tensors of an output in order."""
    tensors = [to_full(leaf) for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    return {f"eval {k}": tensor.detach().clone() for k, tensor in enumerate(tensors)}


def train_plainly(written: Written) -> Seen:
    """Train in a plain loop; returns values of each step, the final state, an evaluation."""
    model, results = written.model().train(), Seen()
    names = inspect.signature(model.forward).parameters
    optimizer = optimizer_of(model.named_parameters())
    for step, batch in enumerate(written.batches()):
        output = model(**{name: batch[name] for name in names if name in batch})
        loss = written.loss(output, batch) if written.loss else loss_of(output)
        results |= step_plainly(step, model, loss, optimizer, CLIP)
    results |= {f"state {name}": value.clone() for name, value in model.state_dict().items()}
    model.eval()  # with gradients: a forward may take one itself
    batch = written.batches()[0]
    output = model(**{name: batch[name] for name in names if name in batch})
    return results | outputs_of(output)


def train_on_rank(plan: Plan, batches: Sequence[Batch], calls: tuple[Any, Any], ready: Any) -> Seen:
    """Train the program on this rank."""
    options = {"loss": calls[0], "weight": calls[1], "prepared": ready}
    program = build(plan, batches[0], optimizer=optimizer_of, clip=CLIP, **options)
    results: Seen = {}
    for step, batch in enumerate(batches):
        results |= step_program(step, program, batch)
    results |= {f"state {name}": value.clone() for name, value in program.state_dict().items()}
    return results | outputs_of(program.eval_step(batches[0]))


def judge(written: Written, text: str, ranks: Any, expected: Seen | None = None) -> str:
    """Return "" if a schedule trains as the plain loop, or "relaxed"; else what differs.

    Raises Refusal where the schedule, or its proof's check of the original, refuses.
    """
    batches, calls = written.batches(), (written.loss, written.weight)
    plan = Schedule(written.model(), parse(Source("hand.sched", text)), Settings()).plan()
    case = check_parts(prepare_case(Case(plan, tuple(batches), *calls)))
    if case.by_parts:
        return "relaxed"
    args = (case.plan, batches, calls, case.prepared)
    by_rank = ranks.run(train_on_rank, plan.mesh.world, *args, timeout=300.0)
    expected = expected or train_plainly(written)
    # an output of an early stage, or a part of it, is on no rank in full
    wanted = {name: v for name, v in expected.items() if name in by_rank[0] or name[:4] != "eval"}
    found = [differences(wanted, copy.copy(results), CLIP) for results in by_rank]
    return "; ".join(f"rank {r}: {len(b)}: {b[:5]}" for r, b in enumerate(found) if b)


# -- batches and losses that several models share ------------------------------------------------


def make_generator(seed: int) -> torch.Generator:
    """Return a generator of a seed."""
    return torch.Generator().manual_seed(seed)


def images(rows: int, seed: int) -> Batch:
    """Return images of 8 x 8 and labels."""
    g = make_generator(seed)
    return {
        "x": torch.randn(rows, 3, 8, 8, generator=g),
        "labels": torch.randint(0, 5, (rows,), generator=g),
    }


def pictures(rows: int, seed: int) -> Batch:
    """Return images alone."""
    return {"x": images(rows, seed)["x"]}


def first(output: Any, batch: Any) -> Tensor:
    """Return the first output, the loss."""
    loss: Tensor = output[0]
    return loss


def second(output: Any, batch: Any) -> Tensor:
    """Return the second output: the loss of models after nanoGPT."""
    loss: Tensor = output[1]
    return loss
