"""Random user models under random schedules: `python -m tests.properties.user_models N SEED`.

Each number of a seed is one model and one schedule, the same every time.  It is judged twice: by
the rules of `verify` (tests/drawn/judge.py), and by a plain torch loop of this file, which knows
nothing of the library: losses, all gradients, norms, parameters and buffers after three steps, and
outputs of the trained model.
"""

from __future__ import annotations

import argparse
import copy
import re
import traceback
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import Source
from schedlang.ir.plan import Plan
from schedlang.language.syntax import parse
from schedlang.passes.analyze.prepare import Prepared
from schedlang.passes.elaborate.state import Settings
from schedlang.passes.lower.build import build
from schedlang.passes.prove import Case
from schedlang.passes.verify.probe import check_parts
from schedlang.passes.verify.proof_case import prepare_case
from schedlang.schedule import Schedule
from tests.drawn import judge
from tests.drawn.judge import BROKEN, FAILED, PASSED, Outcome
from tests.drawn.least import least
from tests.drawn.models import Subject
from tests.drawn.rows import text as schedule_text
from tests.engine import Threads
from tests.properties.user_blocks import KINDS

Batch = dict[str, Any]
Seen = dict[str, Tensor]
WORDS = 11
ROW = re.compile(r"\s+.*\w\(.*\)")
MESHES = (
    *("", "dp=2", "tp=2", "pp=2", "cp=2", "dp=3", "pp=3", "tp=4", "pp=4"),
    *("dp=2 tp=2", "dp=2 pp=2", "pp=2 tp=2", "dp=2 pp=2", "pp=2 tp=2", "dp=2 cp=2", "tp=2 cp=2"),
)


@dataclass
class Output:
    """What a model gives, in a class of its own."""

    loss: Tensor
    out: Tensor
    more: list[Tensor]


class User(nn.Module):
    """A model of random blocks; `rate` is that of all that is drawn in its forward."""

    def __init__(self, rng: Random, rate: float) -> None:
        super().__init__()
        width = rng.choice([8, 8, 6, 12])
        self.words, self.masked = rng.random() < 0.6, rng.random() < 0.5
        self.returns = rng.choice(["loss", "dict", "object", "tuple", "out"])
        names = rng.choices(sorted(KINDS), k=rng.randint(1, 4))
        alike = rng.random() < 0.4
        names = names[:1] * rng.randint(2, 4) if alike else names
        one = rng.random()
        blocks = [KINDS[k](width, rate, Random(one) if alike else rng) for k in names]
        if rng.random() < 0.12:
            blocks.insert(rng.randint(1, len(blocks)), blocks[0])  # one module in two places
        self._enter(width, rng, rate)
        self.form = rng.choice(["list", "list", "dict", "named"])
        if self.form == "list":
            self.blocks: nn.Module = nn.ModuleList(blocks)
        elif self.form == "dict":
            self.blocks = nn.ModuleDict({f"layer{k}": block for k, block in enumerate(blocks)})
        else:
            self.trunk = nn.Module()
            self.trunk.layers = nn.ModuleList(blocks)
        self._leave(width, rng)
        self.frozen = rng.choice(["", "", "", "enter", "block", "norm"])
        self._freeze(blocks[0])

    def _enter(self, width: int, rng: Random, rate: float) -> None:
        if self.words:
            self.enter: nn.Module = nn.Embedding(WORDS, width, padding_idx=rng.choice([None, 0]))
        else:
            self.enter = nn.Linear(4, width, bias=rng.random() < 0.5)
        self.places = nn.Parameter(torch.randn(16, width) / 4) if rng.random() < 0.5 else None
        self.drop = nn.Dropout(rate)

    def _leave(self, width: int, rng: Random) -> None:
        self.norm = rng.choice([nn.LayerNorm(width), nn.RMSNorm(width), nn.Identity()])
        self.head = nn.Linear(width, WORDS if self.words else 3, bias=rng.random() < 0.5)
        self.tied = self.words and rng.random() < 0.4
        if self.tied:
            self.head.weight = self.enter.weight
        self.other = nn.Linear(width, 2) if rng.random() < 0.3 else None
        self.skip = rng.random() < 0.3
        self.by_rows = rng.random() < 0.5
        self.pooled = not self.words and rng.random() < 0.3

    def _freeze(self, block: nn.Module) -> None:
        given = {"": [], "enter": [self.enter], "block": [block], "norm": [self.norm]}[self.frozen]
        for module in given:
            module.requires_grad_(False)

    def layers(self) -> list[nn.Module]:
        """The blocks, in the order in which they are called."""
        if self.form == "list":
            return list(self.blocks)
        return list(self.blocks.values() if self.form == "dict" else self.trunk.layers)

    def forward(
        self,
        ids: Tensor | None = None,
        x: Tensor | None = None,
        mask: Tensor | None = None,
        labels: Tensor | None = None,
        y: Tensor | None = None,
    ) -> Any:
        h = self.enter(x if ids is None else ids)
        if self.places is not None:
            h = h + self.places[: h.shape[1]]
        h = first = self.drop(h)
        for layer in self.layers():
            h = layer(h, mask)
        if self.skip:
            h = torch.cat([h, first], -1).unflatten(-1, (2, -1)).mean(-2)
        h = self.norm(h)
        out = self.head(h.mean(1, keepdim=True) if self.pooled else h)
        more = [h] if self.other is None else [h, self.other(h)]
        if self.returns == "out":
            return out
        loss = row_loss(out, labels) if self.by_rows and self.words else loss_of(out, labels, y)
        each_row = self.by_rows or not self.words
        for layer in dict.fromkeys(self.layers()) if each_row else ():
            loss = loss + getattr(layer, "aux", 0.0)
        if self.other is not None and each_row:
            loss = loss + 0.1 * more[1].square().flatten(1).mean(1).mean()
        if self.returns == "loss":
            return loss
        if self.returns == "object":
            return Output(loss, out, more)
        return (loss, out) if self.returns == "tuple" else {"loss": loss, "out": out, "more": more}


def loss_of(out: Tensor, labels: Tensor | None, y: Tensor | None) -> Tensor:
    """The mean over the labels that count, or over rows."""
    if labels is not None:
        return F.cross_entropy(out.flatten(0, 1), labels.flatten())
    assert y is not None
    return (out[..., 0] - y[:, : out.shape[1]]).square().mean()


def row_loss(out: Tensor, labels: Tensor | None) -> Tensor:
    """The mean over rows of the mean over each one's labels."""
    assert labels is not None
    each = F.cross_entropy(out.mT, labels, reduction="none")
    return (each.sum(1) / (labels >= 0).sum(1)).mean()


def rows_of(batch: Any) -> float:
    """The weight of a part whose loss is a mean over rows."""
    return float(len(batch["ids"]))


def outer_loss(output: Any, batch: Any) -> Tensor:
    """The loss beside the model."""
    return loss_of(output, batch.get("labels"), batch.get("y"))


def first_loss(output: Any, batch: Any) -> Tensor:
    """The loss that a model puts first."""
    found: Tensor = output[0]
    return found


@dataclass(frozen=True)
class Drawn:
    """The number of a seed: its model at a rate of what it draws, its batches and schedule."""

    number: int
    seed: int

    @property
    def name(self) -> str:
        """As tests/drawn calls it."""
        return f"user-{self.seed}-{self.number}"

    def model(self, rate: float) -> nn.Module:
        """The module, in float32."""
        torch.manual_seed(self.number)
        model = User(Random(f"model {self.name}"), rate)
        with torch.no_grad():
            for parameter in {id(p): p for p in model.parameters()}.values():
                if parameter.dim() < 2:
                    parameter += 0.1 * torch.randn_like(parameter)
        return model

    def batch(self, seed: int) -> Batch:
        """Ragged rows, mostly; their number need not divide."""
        model, rng = self._model, Random(f"batch {self.name} {seed}")
        g = torch.Generator().manual_seed(seed)
        rows, length = Random(self.name).choice([8, 8, 9, 7, 12]) + seed % 2, rng.choice([5, 6, 8])
        if Random(self.name + "even").random() < 0.5:
            length = 8
        lengths = torch.randint(1, length + 1, (rows, 1), generator=g)
        lengths[0] = length
        real = torch.arange(length) < lengths
        batch: Batch = {"mask": real} if model.masked else {}
        if model.words:
            batch["ids"] = torch.randint(0, WORDS, (rows, length), generator=g)
            batch["labels"] = batch["ids"].roll(-1, 1).masked_fill(~real, -100)
            batch["labels"][:, 0] = 1
        else:
            batch["x"] = torch.randn(rows, length, 4, generator=g)
            batch["y"] = torch.randn(rows, length, generator=g)
        return batch

    @property
    def _model(self) -> Any:
        return _plain(self)

    def subject(self, rate: float = 0.2) -> Subject:
        """As tests/drawn takes it."""
        returns = self._model.returns
        loss = {"out": outer_loss, "tuple": first_loss}.get(returns)
        rowwise = self._model.by_rows and self._model.words and returns != "out"
        weight = rows_of if rowwise else None
        return Subject(self.name, lambda: self.model(rate), self.batch, loss, weight)

    @property
    def text(self) -> str:
        """The schedule."""
        rng = Random(f"rows {self.name}")
        axes = tuple((a.split("=")[0], int(a[-1])) for a in rng.choice(MESHES).split())
        kinds = ("parts", "data", "stages", "memory", "memory")
        more = ("kernels", "numbers") if rng.random() < 0.2 else ()
        return schedule_text(self.name, rng, axes, (*kinds, *more))


@cache
def _plain(drawn: Drawn) -> Any:
    return drawn.model(0.0)


def named_subject(name: str) -> Subject:
    """The subject of a name."""
    _, seed, number = name.split("-")
    return Drawn(int(number), int(seed)).subject()


# -- the judge that knows torch only ---------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """How a user trains: the optimizer with groups, a scheduler, a bound of the norm."""

    kind: str
    clip: float | None
    scheduled: bool

    def optimizer(self, named: Any) -> torch.optim.Optimizer:
        """Two groups, by name."""
        held = list(named)
        plain = [p for name, p in held if name.endswith("bias")]
        others = [p for name, p in held if not name.endswith("bias")]
        groups: list[dict[str, Any]] = [{"params": others, "weight_decay": 0.1}]
        if plain:
            groups.append({"params": plain, "weight_decay": 0.0, "lr": 0.01})
        if self.kind == "sgd":
            return torch.optim.SGD(groups, lr=0.03, momentum=0.9)
        return torch.optim.AdamW(groups, lr=0.02, eps=1e-4)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        """Falling rates."""
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.7**step)


def way_of(drawn: Drawn) -> Way:
    """The way of a number."""
    rng = Random(f"way {drawn.name}")
    return Way(rng.choice(["sgd", "adamw"]), rng.choice([None, 0.5]), rng.random() < 0.5)


def _wide(batch: Mapping[str, Any]) -> Batch:
    return {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}


def _out(output: Any) -> Tensor | None:
    """The scores of an output, in whatever form they come."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, tuple):
        return output[1]
    found: Tensor | None = output["out"] if isinstance(output, dict) else output.out
    return found


def plainly(one: Subject, way: Way, batches: Sequence[Batch]) -> Seen:
    """A plain loop: what each step and the last state are."""
    model = one.model().double().train()
    optimizer = way.optimizer([(n, p) for n, p in model.named_parameters() if p.requires_grad])
    scheduler = way.scheduler(optimizer) if way.scheduled else None
    seen: Seen = {}
    for step, batch in enumerate(batches):
        output = model(**batch)
        if one.loss is not None:
            loss = one.loss(output, batch)
        else:
            loss = output if isinstance(output, Tensor) else _loss(output)
        loss.backward()
        seen[f"loss {step}"] = loss.detach().clone()
        for name, p in model.named_parameters():
            if p.requires_grad and p.grad is not None:
                seen[f"grad {step} {name}"] = p.grad.clone()
        norm = nn.utils.clip_grad_norm_(model.parameters(), way.clip or float("inf"))
        seen[f"norm {step}"] = norm.detach().clone()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    seen |= {f"state {name}": value.clone() for name, value in model.state_dict().items()}
    model.eval()
    with torch.no_grad():
        out = _out(model(**batches[0]))
    return seen | ({} if out is None else {"out ": out})


def _loss(output: Any) -> Tensor:
    found: Tensor = output["loss"] if isinstance(output, dict) else output.loss
    return found


def on_rank(
    plan: Plan,
    batches: Sequence[Batch],
    way: Way,
    loss: tuple[Any, Any],
    prepared: Prepared | None,
) -> Seen:
    """The same on one of the ranks, by the program; the loss with its weight, where there are."""
    program = build(
        plan,
        batches[0],
        optimizer=way.optimizer,
        clip=way.clip,
        loss=loss[0],
        weight=loss[1],
        prepared=prepared,
    )
    scheduler = way.scheduler(program.optimizer) if way.scheduled else None
    seen: Seen = {}
    for step, batch in enumerate(batches):
        seen[f"loss {step}"] = program.train_step(batch).clone()
        seen[f"norm {step}"] = torch.tensor(program.grad_norm, dtype=torch.float64)
        for name, grad in program.gradients().items():  # as clipped
            seen[f"grad {step} {name}"] = grad.clone()
        if scheduler is not None:
            scheduler.step()
    seen |= {f"state {name}": value.clone() for name, value in program.state_dict().items()}
    out = _out(program.eval_step(batches[0]))
    return seen | ({} if out is None else {"out ": out.clone()})


def unequal(expected: Seen, actual: Seen, clip: float | None) -> list[str]:
    """The names that differ, each with its relative error; gradients are compared as clipped."""
    bad = []
    for name, reference in expected.items():
        if name == "out " and name not in actual:
            continue  # exists on no rank in full
        if name not in actual:
            bad.append(f"{name} missing")
            continue
        value, reference = actual[name].double(), reference.double()
        if name.startswith("grad") and clip is not None:
            norm = float(expected[f"norm {name.split()[1]}"])
            reference = reference * min(1.0, clip / (norm + 1e-6))
        if value.shape != reference.shape:
            bad.append(f"{name} {tuple(value.shape)} is not {tuple(reference.shape)}")
            continue
        error = float((value - reference).norm())
        if not error <= 1e-8 * float(reference.norm()) + 1e-11:
            bad.append(f"{name} {error / (float(reference.norm()) + 1e-30):.1e}")
    more = [n for n in actual if n not in expected and float(actual[n].double().norm()) > 1e-11]
    return bad + [f"{name} is no name of the original's" for name in more]


def mended(drawn: Drawn, text: str) -> tuple[str, list[Refusal]]:
    """The text without the rows that are refused, and their refusals."""
    rng, refusals = Random(f"mended {drawn.name}"), list[Refusal]()
    while True:
        try:
            judge.checked_case(drawn.subject(0.0), text, 0)
        except Refusal as refusal:
            lines = text.split("\n")
            rows = [k for k, line in enumerate(lines) if ROW.match(line)]
            span = refusal.diagnostic.primary.span
            place = span.line - 1 if span else -1
            if refusal.diagnostic.code == "S205":  # an axis that no row is left for splits rows
                axis = refusal.diagnostic.title.split("`")[1]
                at = [k for k in rows if " pipeline(" in lines[k]] or [len(lines) - 2]
                lines.insert(at[0], f"  zero(stage=0, over={axis})")
            elif len(rows) < 2 or len(refusals) > 9:
                return text, [*refusals, refusal]
            else:
                lines.pop(place if place in rows else rng.choice(rows))
                refusals.append(refusal)
            text = "\n".join(lines)
        else:
            return text, refusals


def plain_outcome(drawn: Drawn, text: str, ranks: Any) -> tuple[str, str]:
    """PASSED, FAILED with what differs, or what `judge` makes of an error; no draws."""
    one, way = drawn.subject(0.0), way_of(drawn)
    batches = [_wide(one.batch(step)) for step in range(3)]
    try:
        model = one.model().double()
        plan = Schedule(model, parse(Source("user.sched", text)), Settings()).plan()
        if plan.gives_up - {"rounding"}:
            return PASSED, "relaxed"
        case = check_parts(prepare_case(Case(plan, tuple(batches), one.loss, one.weight)))
        if case.by_parts:
            return PASSED, "relaxed"
        args = (case.plan, batches, way, (one.loss, one.weight), case.prepared)
        seen = ranks.run(on_rank, plan.mesh.world, *args, timeout=judge.LIMIT)
    except Exception as error:
        return judge._raised(error)
    expected = plainly(one, way, copy.deepcopy(batches))
    found = [unequal(expected, each, way.clip) for each in seen]
    bad = [f"rank {rank}: {len(b)}: {b[:6]}" for rank, b in enumerate(found) if b]
    return (FAILED, "; ".join(bad)) if bad else (PASSED, "")


def outcome(drawn: Drawn, ranks: Any, form: str = "quick", text: str = "") -> Outcome:
    """What both judges say; the worse of the two."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = text or mended(drawn, drawn.text)[0]
        kind, why = plain_outcome(drawn, text, ranks)
        if kind in (FAILED, BROKEN):
            return Outcome(drawn.number, drawn.seed, drawn.name, kind, f"plain: {why}", "", 0, text)
        if kind != PASSED or form == "plain":
            return Outcome(drawn.number, drawn.seed, drawn.name, kind, why, "", 0, text)
        found = judge.judged(drawn.number, drawn.seed, ranks, form, text, drawn.name)
    return found


def main() -> None:
    """Hunt: the outcomes of many numbers, and the fewest rows of each fault."""
    parser = argparse.ArgumentParser(prog="tests.properties.user_models", description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=50)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--whole", action="store_true", help="prove as `verify` does")
    parser.add_argument("--refusals", action="store_true", help="print them in full")
    parser.add_argument("--plain", action="store_true", help="by the plain loop alone")
    parser.add_argument("--least", action="store_true", help="shrink each fault")
    asked = parser.parse_args()
    counts: Counter[str] = Counter()
    form = "whole" if asked.whole else "plain" if asked.plain else "quick"
    with Threads() as ranks:
        for number in range(asked.first, asked.first + asked.count):
            drawn = Drawn(number, asked.seed)
            try:
                text, refusals = mended(drawn, drawn.text)
                found = outcome(drawn, ranks, form, text)
            except Exception as error:
                why = "".join(traceback.format_exception(error))[-4000:]
                found, refusals = Outcome(number, asked.seed, drawn.name, BROKEN, why), []
            for refusal in refusals if asked.refusals else ():
                print(f"REFUSAL {refusal.render(100)}\n", flush=True)
            counts[found.kind] += 1
            kinds = ",".join(type(b).__name__ for b in drawn._model.layers())
            last = found.why.strip().split("\n")[-1][:150]
            print(f"{drawn.name} {kinds} {found.seconds} s {found.kind} {last}", flush=True)
            if found.kind in (FAILED, BROKEN):
                print(f"{found.text}\n{found.why}", flush=True)
                if asked.least:
                    print(_least(drawn, found, ranks, form), flush=True)
    print(dict(counts))


def _least(drawn: Drawn, found: Outcome, ranks: Any, form: str) -> str:
    last = found.why.strip().split("\n")[-1][:30]

    def same(text: str) -> bool:
        again = outcome(drawn, ranks, form, text)
        return again.kind == found.kind and (
            found.kind == FAILED or again.why.strip().split("\n")[-1][:30] == last
        )

    return least(found.text, same)


if __name__ == "__main__":
    main()
