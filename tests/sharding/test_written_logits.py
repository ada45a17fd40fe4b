"""Models that write into logits that no rank has in full: as in torch, through views too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.ir.plan import Plan
from schedlang.passes.lower.build import build
from tests.engine import Threads
from tests.proofs import make_plan, sgd

WORDS = 10
SPLIT = ("head  shard(vocab, over=tp)", "tp=2")
FUSED = ("head  replace_kernel(linear_cross_entropy)", "")
THIRD = torch.arange(WORDS) == 3
Batch = dict[str, Tensor]


def _hook(z: Any) -> None:
    if z.requires_grad:
        z.register_hook(lambda grad: grad * 0.5)


def _scaled_behind_a_view(z: Any) -> Any:
    flat = z.view(-1, WORDS)
    z *= 0.5
    return flat


def _scaled(z: Any) -> Any:
    z *= 0.25
    z /= 2
    return z


def _read(z: Any) -> None:
    with torch.no_grad():
        z.argmax(-1)


def _read_and_added(z: Any) -> Any:
    _read(z)
    return z + 1


def _written_without_gradients(z: Any) -> None:
    with torch.no_grad():
        z.clamp_(-0.1, 0.1)


def _arithmetic(z: Any) -> Any:
    return 1 - z + 2 * (-z) ** 2 - (z > 0) * 0.1 + (z == 0) * 1.0 + abs(z + 1) * len(z)


# what a model's forward does with its logits; a function without a result changes them
WRITES: dict[str, Callable[[Any], Any]] = {
    "a method": lambda z: [z.masked_fill_(THIRD, -30.0), None][1],
    "an index": lambda z: z.__setitem__((..., 3), -30.0),
    "a function": lambda z: [F.relu(z, inplace=True), None][1],
    "a view of rows": lambda z: [z[0].zero_(), None][1],
    "a flat view": lambda z: [z.view(-1, WORDS).mul_(0.5), None][1],
    "another view": lambda z: [z.transpose(0, 1).clamp_(-0.1, 0.1), None][1],
    "a detached view": lambda z: [z.detach().mul_(0.5), None][1],
    "data": lambda z: [z.data.mul_(0.5), None][1],
    "a hook": _hook,
    "scaled": _scaled,
    "scaled behind a view": _scaled_behind_a_view,
    "arithmetic": _arithmetic,
    "read": _read,
    "read and added": _read_and_added,
    "written without gradients": _written_without_gradients,
}


class Writer(nn.Module):
    """A head whose logits are changed before the loss and, with `late`, returned after it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head, self.how = nn.Embedding(WORDS, 6), nn.Linear(6, WORDS), how
        self.double()

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        logits = self.head(self.embed(ids))
        changed = WRITES[self.how](logits)
        logits = logits if changed is None else changed
        return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.flatten()), logits


def first_loss(output: Any, batch: Any) -> Tensor:
    """Return the first output."""
    loss: Tensor = output[0]
    return loss


def _train(plan: Plan, batch: Batch) -> dict[str, Tensor]:
    program = build(plan, batch, loss=first_loss, optimizer=sgd)
    results = {"loss": program.train_step(batch)}
    results |= {f"grad {name}": grad.clone() for name, grad in program.gradients().items()}
    return results | {"out": program.eval_step(batch)[1], **program.state_dict()}


def _train_plainly(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    optimizer = sgd(model.named_parameters())
    loss = model(**batch)[0]
    loss.backward()
    results = {"loss": loss.detach(), **{n: p.grad.clone() for n, p in _graded(model)}}
    optimizer.step()
    with torch.no_grad():
        return results | {"out": model.eval()(**batch)[1], **model.state_dict()}


def _graded(model: nn.Module) -> list[tuple[str, Any]]:
    return [(f"grad {name}", p) for name, p in model.named_parameters() if p.grad is not None]


@pytest.mark.parametrize("rows, mesh", [SPLIT, FUSED])
@pytest.mark.parametrize("how", WRITES)
def test_what_a_model_writes_into_its_logits_holds(
    threads: Threads, how: str, rows: str, mesh: str
) -> None:
    """Loss, gradients, parameters after a step and the evaluated output are those of torch."""
    generator = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(0, WORDS, (2, 4, 5), generator=generator)
    batch = {"ids": ids, "labels": labels}
    expected = _train_plainly(Writer(how), batch)
    plan = make_plan(Writer(how), rows, mesh)
    for results in threads.run(_train, plan.mesh.world, plan, batch):
        for name, value in results.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-11, msg=name)
