"""Random user models under random schedules: `python -m tests.properties.user_models N SEED`.

Each number of a seed is one fixed model and schedule.  It is judged twice: as by `verify`
(tests/drawn/judge.py), and by a plain torch loop in this file, independent of the library, which
compares losses, gradients, norms, parameters and buffers after three steps, and outputs of the
trained model.
"""

from __future__ import annotations

import argparse
import copy
import re
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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
from tests.drawn.models import Subject
from tests.drawn.rows import text as schedule_text
from tests.drawn.shrink_text import shrink_text
from tests.engine import Threads
from tests.properties.user_blocks import KINDS

Batch = dict[str, Any]
Seen = dict[str, Tensor]
VOCABULARY = 11
ROW = re.compile(r"\s+.*\w\(.*\)")
MESHES = (
    *("", "dp=2", "tp=2", "pp=2", "cp=2", "dp=3", "pp=3", "tp=4", "pp=4"),
    *("dp=2 tp=2", "dp=2 pp=2", "pp=2 tp=2", "dp=2 pp=2", "pp=2 tp=2", "dp=2 cp=2", "tp=2 cp=2"),
)

PAIR_MESHES = ("dp=2", "dp=2", "dp=3", "dp=2 tp=2", "tp=2", "dp=2 pp=2")  # of a loss over pairs


@dataclass
class Output:
    """The output of a model as an object."""

    loss: Tensor
    out: Tensor
    more: list[Tensor]


class User(nn.Module):
    """A model of random blocks; `rate` is the rate of all dropout and noise."""

    def __init__(self, rng: Random, rate: float) -> None:
        super().__init__()
        width = rng.choice([8, 8, 6, 12])
        self.words, self.masked = rng.random() < 0.6, rng.random() < 0.5
        self.returns = rng.choice(["loss", "dict", "object", "tuple", "out"])
        names = rng.choices(sorted(KINDS), k=rng.randint(1, 4))
        equal = rng.random() < 0.4
        names = names[:1] * rng.randint(2, 4) if equal else names
        shared_seed = rng.random()
        blocks = [KINDS[k](width, rate, Random(shared_seed) if equal else rng) for k in names]
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
            self.enter: nn.Module = nn.Embedding(
                VOCABULARY, width, padding_idx=rng.choice([None, 0])
            )
        else:
            self.enter = nn.Linear(4, width, bias=rng.random() < 0.5)
        self.places = nn.Parameter(torch.randn(16, width) / 4) if rng.random() < 0.5 else None
        self.drop = nn.Dropout(rate)

    def _leave(self, width: int, rng: Random) -> None:
        self.norm = rng.choice([nn.LayerNorm(width), nn.RMSNorm(width), nn.Identity()])
        self.head = nn.Linear(width, VOCABULARY if self.words else 3, bias=rng.random() < 0.5)
        self.tied = self.words and rng.random() < 0.4
        if self.tied:
            self.head.weight = self.enter.weight
        self.other = nn.Linear(width, 2) if rng.random() < 0.3 else None
        self.skip = rng.random() < 0.3
        self.by_rows = rng.random() < 0.5
        self.pooled = not self.words and rng.random() < 0.3
        # not by `rng`: numbers that were drawn before stay the same models
        names = sorted(WRITES) if self.words else ["nothing"]
        self.written = Random(f"{width} {self.by_rows} {rng.getstate()}").choice(names)
        compares = Random(f"pairs {width} {self.by_rows} {rng.getstate()}").random() < 0.15
        rowwise = self.returns != "out" and (self.by_rows or not self.words)
        self.pair = nn.Linear(width, 4) if compares and rowwise else None

    def _freeze(self, block: nn.Module) -> None:
        frozen_modules = {"": [], "enter": [self.enter], "block": [block], "norm": [self.norm]}[
            self.frozen
        ]
        for module in frozen_modules:
            module.requires_grad_(False)

    def layers(self) -> list[nn.Module]:
        """Return the blocks in the order of their calls."""
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
        h = embedded = self.drop(h)
        for layer in self.layers():
            h = layer(h, mask)
        if self.skip:
            h = torch.cat([h, embedded], -1).unflatten(-1, (2, -1)).mean(-2)
        h = self.norm(h)
        scores = WRITES[self.written](self.head(h.mean(1, keepdim=True) if self.pooled else h))
        extra_outputs = [h] if self.other is None else [h, self.other(h)]
        if self.returns == "out":
            return scores
        loss = (
            row_loss(scores, labels)
            if self.by_rows and self.words
            else token_loss(scores, labels, y)
        )
        each_row = self.by_rows or not self.words
        for layer in dict.fromkeys(self.layers()) if each_row else ():
            loss = loss + getattr(layer, "aux", 0.0)
        if self.other is not None and each_row:
            loss = loss + 0.1 * extra_outputs[1].square().flatten(1).mean(1).mean()
        if self.pair is not None:
            loss = loss + 0.1 * pair_loss(self.pair(h.mean(1)))
        if self.returns == "loss":
            return loss
        if self.returns == "object":
            return Output(loss, scores, extra_outputs)
        return (
            (loss, scores)
            if self.returns == "tuple"
            else {"loss": loss, "out": scores, "more": extra_outputs}
        )


def _measured(scores: Tensor) -> Tensor:
    with torch.no_grad():
        scores.argmax(-1)
    return scores


def _lowered(scores: Tensor) -> Tensor:
    scores[..., 0] -= 1.0
    return scores


# what a model does with its scores before the loss
WRITES: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda scores: scores,
    "again nothing": lambda scores: scores,
    "measured": _measured,
    "lowered": _lowered,
    "bounded": lambda scores: scores.clamp_(-2.0, 2.0),
    "scaled": lambda scores: scores.mul_(0.5),
}


def token_loss(scores: Tensor, labels: Tensor | None, y: Tensor | None) -> Tensor:
    """Return the mean loss over counted labels, or over rows."""
    if labels is not None:
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten())
    assert y is not None
    return (scores[..., 0] - y[:, : scores.shape[1]]).square().mean()


def pair_loss(features: Tensor) -> Tensor:
    """Return a loss over all pairs of rows, by which different rows repel each other."""
    return F.log_softmax(features @ features.t(), -1).diagonal().mean().neg()


def row_loss(scores: Tensor, labels: Tensor | None) -> Tensor:
    """Return the mean over rows of each row's mean over its labels."""
    assert labels is not None
    losses = F.cross_entropy(scores.mT, labels, reduction="none")
    return (losses.sum(1) / (labels >= 0).sum(1)).mean()


def count_rows(batch: Any) -> float:
    """Return the number of rows: the weight of a part whose loss is a mean over rows."""
    return float(len(batch["ids"]))


def outer_loss(output: Any, batch: Any) -> Tensor:
    """Return the loss of a model without loss."""
    return token_loss(output, batch.get("labels"), batch.get("y"))


def first_loss(output: Any, batch: Any) -> Tensor:
    """Return the first output, the loss."""
    loss: Tensor = output[0]
    return loss


@dataclass(frozen=True)
class Drawn:
    """A number of a seed: its model with a dropout rate, its batches and its schedule."""

    number: int
    seed: int

    @property
    def name(self) -> str:
        """The name for tests/drawn."""
        return f"user-{self.seed}-{self.number}"

    def model(self, rate: float) -> nn.Module:
        """Build the module in float32."""
        torch.manual_seed(self.number)
        model = User(Random(f"model {self.name}"), rate)
        with torch.no_grad():
            for parameter in {id(p): p for p in model.parameters()}.values():
                if parameter.dim() < 2:
                    parameter += 0.1 * torch.randn_like(parameter)
        return model

    def batch(self, seed: int) -> Batch:
        """Return a mostly ragged batch; its number of rows need not be divisible."""
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
            batch["ids"] = torch.randint(0, VOCABULARY, (rows, length), generator=g)
            batch["labels"] = batch["ids"].roll(-1, 1).masked_fill(~real, -100)
            batch["labels"][:, 0] = 1
        else:
            batch["x"] = torch.randn(rows, length, 4, generator=g)
            batch["y"] = torch.randn(rows, length, generator=g)
        return batch

    @property
    def _model(self) -> Any:
        return _model_without_dropout(self)

    def subject(self, rate: float = 0.2) -> Subject:
        """Return the subject for tests/drawn."""
        returns = self._model.returns
        loss = {"out": outer_loss, "tuple": first_loss}.get(returns)
        rowwise = self._model.by_rows and self._model.words and returns != "out"
        weight = count_rows if rowwise else None
        return Subject(self.name, lambda: self.model(rate), self.batch, loss, weight)

    @property
    def text(self) -> str:
        """The text of the schedule."""
        rng = Random(f"rows {self.name}")
        meshes = MESHES if self._model.pair is None else PAIR_MESHES
        axes = tuple((a.split("=")[0], int(a[-1])) for a in rng.choice(meshes).split())
        kinds = ("parts", "data", "stages", "memory", "memory")
        extra_kinds = ("kernels", "numbers") if rng.random() < 0.2 else ()
        text = schedule_text(self.name, rng, axes, (*kinds, *extra_kinds))
        if self._model.pair is None or not any(axis == "dp" for axis, _ in axes):
            return text
        return text.rstrip() + '\n\nstep "pairs" {\n  pair  gather_rows(over=dp)\n}\n'


@cache
def _model_without_dropout(drawn: Drawn) -> Any:
    return drawn.model(0.0)


def named_subject(name: str) -> Subject:
    """Return the subject of a name."""
    _, seed, number = name.split("-")
    return Drawn(int(number), int(seed)).subject()


# -- the judge that knows torch only ---------------------------------------------------------------


@dataclass(frozen=True)
class TrainingRecipe:
    """How a user trains: optimizer with parameter groups, scheduler, clipping."""

    kind: str
    clip: float | None
    scheduled: bool

    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        """Return an optimizer with two groups by name."""
        parameters = list(named_parameters)
        biases = [p for name, p in parameters if name.endswith("bias")]
        other_parameters = [p for name, p in parameters if not name.endswith("bias")]
        groups: list[dict[str, Any]] = [{"params": other_parameters, "weight_decay": 0.1}]
        if biases:
            groups.append({"params": biases, "weight_decay": 0.0, "lr": 0.01})
        if self.kind == "sgd":
            return torch.optim.SGD(groups, lr=0.03, momentum=0.9)
        return torch.optim.AdamW(groups, lr=0.02, eps=1e-4)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        """Return a scheduler with decreasing rates."""
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.7**step)


def recipe_of(drawn: Drawn) -> TrainingRecipe:
    """Return the training recipe of a number."""
    rng = Random(f"way {drawn.name}")
    return TrainingRecipe(rng.choice(["sgd", "adamw"]), rng.choice([None, 0.5]), rng.random() < 0.5)


def _to_float64(batch: Mapping[str, Any]) -> Batch:
    return {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}


def _scores_of(output: Any) -> Tensor | None:
    """Return the scores in an output of any form."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, tuple):
        return output[1]
    scores: Tensor | None = output["out"] if isinstance(output, dict) else output.out
    return scores


def step_plainly(
    step: int, model: nn.Module, loss: Tensor, optimizer: Any, clip: float | None
) -> Seen:
    """Take the step of a plain loop; returns its loss, its gradients and their norm."""
    loss.backward()
    results: Seen = {f"loss {step}": loss.detach().clone()}
    for name, p in model.named_parameters():
        if p.requires_grad and p.grad is not None:
            results[f"grad {step} {name}"] = p.grad.clone()
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))
    results[f"norm {step}"] = norm.detach().clone()
    optimizer.step()
    optimizer.zero_grad()
    return results


def step_program(step: int, program: Any, batch: Batch) -> Seen:
    """Take a step of a program; returns the same, with gradients as clipped."""
    results: Seen = {f"loss {step}": program.train_step(batch).clone()}
    results[f"norm {step}"] = torch.tensor(program.grad_norm, dtype=torch.float64)
    for name, grad in program.gradients().items():
        results[f"grad {step} {name}"] = grad.clone()
    return results


def train_plainly(tested_model: Subject, recipe: TrainingRecipe, batches: Sequence[Batch]) -> Seen:
    """Train in a plain loop; returns values of each step and the final state."""
    model = tested_model.model().double().train()
    optimizer = recipe.optimizer([(n, p) for n, p in model.named_parameters() if p.requires_grad])
    scheduler = recipe.scheduler(optimizer) if recipe.scheduled else None
    results: Seen = {}
    for step, batch in enumerate(batches):
        output = model(**batch)
        if tested_model.loss is not None:
            loss = tested_model.loss(output, batch)
        else:
            loss = loss_of(output)
        results |= step_plainly(step, model, loss, optimizer, recipe.clip)
        if scheduler is not None:
            scheduler.step()
    results |= {f"state {name}": value.clone() for name, value in model.state_dict().items()}
    model.eval()
    with torch.no_grad():
        scores = _scores_of(model(**batches[0]))
    return results | ({} if scores is None else {"out ": scores})


def loss_of(output: Any) -> Tensor:
    """Return the loss in an output that has one."""
    if isinstance(output, Tensor):
        return output
    loss: Tensor = output["loss"] if isinstance(output, dict) else output.loss
    return loss


def train_on_rank(
    plan: Plan,
    batches: Sequence[Batch],
    recipe: TrainingRecipe,
    loss: tuple[Any, Any],
    prepared: Prepared | None,
) -> Seen:
    """Train the program on this rank; returns the same values as the plain loop."""
    program = build(
        plan,
        batches[0],
        optimizer=recipe.optimizer,
        clip=recipe.clip,
        loss=loss[0],
        weight=loss[1],
        prepared=prepared,
    )
    scheduler = recipe.scheduler(program.optimizer) if recipe.scheduled else None
    results: Seen = {}
    for step, batch in enumerate(batches):
        results |= step_program(step, program, batch)
        if scheduler is not None:
            scheduler.step()
    results |= {f"state {name}": value.clone() for name, value in program.state_dict().items()}
    scores = _scores_of(program.eval_step(batches[0]))
    return results | ({} if scores is None else {"out ": scores.clone()})


def differences(expected: Seen, actual: Seen, clip: float | None) -> list[str]:
    """List names that differ, with relative errors; gradients are compared as clipped."""
    different = []
    for name, reference in expected.items():
        if name == "out " and name not in actual:
            continue  # exists on no rank in full
        if name not in actual:
            different.append(f"{name} missing")
            continue
        value, reference = actual[name].double(), reference.double()
        if name.startswith("grad") and clip is not None:
            norm = float(expected[f"norm {name.split()[1]}"])
            reference = reference * min(1.0, clip / (norm + 1e-6))
        if value.shape != reference.shape:
            different.append(f"{name} {tuple(value.shape)} is not {tuple(reference.shape)}")
            continue
        error = float((value - reference).norm())
        if not error <= 1e-8 * float(reference.norm()) + 1e-11:
            different.append(f"{name} {error / (float(reference.norm()) + 1e-30):.1e}")
    unexpected = [
        n for n in actual if n not in expected and float(actual[n].double().norm()) > 1e-11
    ]
    return different + [f"{name} is no name of the original's" for name in unexpected]


def legal_text(drawn: Drawn, text: str) -> tuple[str, list[Refusal]]:
    """Remove rows until the text is not refused; returns it and the refusals."""
    rng, refusals = Random(f"mended {drawn.name}"), list[Refusal]()
    while True:
        try:
            judge.checked_case(drawn.subject(0.0), text, 0)
        except Refusal as refusal:
            lines = text.split("\n")
            rows = [k for k, line in enumerate(lines) if ROW.match(line)]
            span = refusal.diagnostic.primary.span
            bad_line = span.line - 1 if span else -1
            if refusal.diagnostic.code == "S205":  # an unused axis gets a zero row
                axis = refusal.diagnostic.title.split("`")[1]
                row_lines = [k for k in rows if " pipeline(" in lines[k]] or [len(lines) - 2]
                lines.insert(row_lines[0], f"  zero(stage=0, over={axis})")
            elif len(rows) < 2 or len(refusals) > 9:
                return text, [*refusals, refusal]
            else:
                lines.pop(bad_line if bad_line in rows else rng.choice(rows))
                refusals.append(refusal)
            text = "\n".join(lines)
        else:
            return text, refusals


def plain_outcome(drawn: Drawn, text: str, ranks: Any) -> tuple[str, str]:
    """Compare with the plain loop without dropout; returns kind and reason."""
    tested_model, recipe = drawn.subject(0.0), recipe_of(drawn)
    batches = [_to_float64(tested_model.batch(step)) for step in range(3)]
    try:
        model = tested_model.model().double()
        plan = Schedule(model, parse(Source("user.sched", text)), Settings()).plan()
        if plan.gives_up - {"rounding"}:
            return PASSED, "relaxed"
        case = check_parts(
            prepare_case(Case(plan, tuple(batches), tested_model.loss, tested_model.weight))
        )
        if case.by_parts:
            return PASSED, "relaxed"
        args = (case.plan, batches, recipe, (tested_model.loss, tested_model.weight), case.prepared)
        results_by_rank = ranks.run(train_on_rank, plan.mesh.world, *args, timeout=judge.LIMIT)
    except Exception as error:
        return judge._error_outcome(error)
    expected = train_plainly(tested_model, recipe, copy.deepcopy(batches))
    differences_by_rank = [
        differences(expected, rank_results, recipe.clip) for rank_results in results_by_rank
    ]
    messages = [
        f"rank {rank}: {len(b)}: {b[:6]}" for rank, b in enumerate(differences_by_rank) if b
    ]
    return (FAILED, "; ".join(messages)) if messages else (PASSED, "")


def outcome(drawn: Drawn, ranks: Any, form: str = "quick", text: str = "") -> Outcome:
    """Judge twice and return the worse outcome."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = text or legal_text(drawn, drawn.text)[0]
        kind, reason = plain_outcome(drawn, text, ranks)
        if kind in (FAILED, BROKEN):
            return Outcome(
                drawn.number, drawn.seed, drawn.name, kind, f"plain: {reason}", "", 0, text
            )
        if kind != PASSED or form == "plain":
            return Outcome(drawn.number, drawn.seed, drawn.name, kind, reason, "", 0, text)
        judged_outcome = judge.judge_schedule(
            drawn.number, drawn.seed, ranks, form, text, drawn.name
        )
    return judged_outcome


def main() -> None:
    """Hunt for failures over many numbers, and print the smallest schedule of each."""
    parser = argparse.ArgumentParser(prog="tests.properties.user_models", description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=50)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--whole", action="store_true", help="prove as `verify` does")
    parser.add_argument("--refusals", action="store_true", help="print them in full")
    parser.add_argument("--plain", action="store_true", help="by the plain loop alone")
    parser.add_argument("--least", action="store_true", help="shrink each fault")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    form = "whole" if options.whole else "plain" if options.plain else "quick"
    with Threads() as ranks:
        for number in range(options.first, options.first + options.count):
            drawn = Drawn(number, options.seed)
            try:
                text, refusals = legal_text(drawn, drawn.text)
                judged_outcome = outcome(drawn, ranks, form, text)
            except Exception as error:
                reason = "".join(traceback.format_exception(error))[-4000:]
                judged_outcome, refusals = (
                    Outcome(number, options.seed, drawn.name, BROKEN, reason),
                    [],
                )
            for refusal in refusals if options.refusals else ():
                print(f"REFUSAL {refusal.render(100)}\n", flush=True)
            counts[judged_outcome.kind] += 1
            kinds = ",".join(type(b).__name__ for b in drawn._model.layers())
            last = judged_outcome.why.strip().split("\n")[-1][:150]
            print(
                f"{drawn.name} {kinds} {judged_outcome.seconds} s {judged_outcome.kind} {last}",
                flush=True,
            )
            if judged_outcome.kind in (FAILED, BROKEN):
                print(f"{judged_outcome.text}\n{judged_outcome.why}", flush=True)
                if options.least:
                    print(_smallest_failure(drawn, judged_outcome, ranks, form), flush=True)
    print(dict(counts))


def _smallest_failure(drawn: Drawn, found: Outcome, ranks: Any, form: str) -> str:
    last = found.why.strip().split("\n")[-1][:30]

    def same(text: str) -> bool:
        repeated = outcome(drawn, ranks, form, text)
        return repeated.kind == found.kind and (
            found.kind == FAILED or repeated.why.strip().split("\n")[-1][:30] == last
        )

    return shrink_text(found.text, same)


if __name__ == "__main__":
    main()
