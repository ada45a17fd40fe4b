"""Programs of other models than decoders: recommenders, teachers, contrasts; right and wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel

from schedlang import TrainingProgram, verify_program
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.report import Report
from schedlang.runtime.launch.pool import Pool
from tests.judging.catches.collectives import local_part, rank_sum, world_size
from tests.judging.net import batch_part

ROWS, WIDTH, TABLES, ITEMS = 8, 6, 4, 10


def numbers(seed: int) -> dict[str, Tensor]:
    """Return a batch of rows of floats, and targets of the same shape."""
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(ROWS, WIDTH, generator=draw) for name in ("x", "y")}


def squared(output: Any, batch: Any) -> Tensor:
    """Return the mean squared error of an output, or of the first of several."""
    first = next(iter(output.values())) if isinstance(output, dict) else output
    return F.mse_loss(first, batch["y"])


def average(module: nn.Module) -> None:
    """Average the gradients over ranks."""
    for p in module.parameters():
        if p.grad is not None:
            p.grad = rank_sum(p.grad) / world_size()


def judge_program(
    pool: Pool, program: Any, model: nn.Module, batch: Any = numbers, loss: Any = squared
) -> Report:
    """Return the verdict on two ranks."""
    torch.manual_seed(0)
    return verify_program(program, model=model, batch=batch, loss=loss, ranks=2, pool=pool)


def replicated(loss: Any = squared, **options: Any) -> Any:
    """Return a program with DDP, each rank with its rows."""

    def program(model: Any) -> TrainingProgram:
        module = DistributedDataParallel(model, **options)

        def step(batch: Any) -> Tensor:
            local = batch_part(batch, dist.get_rank(), world_size())
            value: Tensor = loss(module(local["x"]), local)
            value.backward()
            return value

        return TrainingProgram(module, step)

    return program


# ---- A recommender: each rank has some of the tables, for all rows.


class Score(nn.Linear):
    """A layer with one number for each row."""

    def __init__(self) -> None:
        super().__init__(2 * TABLES, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the numbers in one dim."""
        return super().forward(x)[:, 0]


class Recommender(nn.Module):
    """Tables of items and a top layer, with one score for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ITEMS, 2) for _ in range(TABLES))
        self.top = Score()

    def forward(self, items: Tensor) -> Tensor:
        """Return the scores."""
        scores: Tensor = self.top(
            torch.cat([t(items[:, k]) for k, t in enumerate(self.tables)], -1)
        )
        return scores


def items(seed: int) -> dict[str, Tensor]:
    """Return rows of items, and the score of each row."""
    draw = torch.Generator().manual_seed(seed)
    drawn = torch.randint(ITEMS, (ROWS, TABLES), generator=draw)
    return {"items": drawn, "y": torch.randn(ROWS, generator=draw)}


class Exchange(torch.autograd.Function):
    """Send rows to the ranks that have them, and receive other tables: an all-to-all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return this rank's rows, with the features of all ranks in the last dim."""
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x.contiguous())
        return torch.cat(received.chunk(world_size()), -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Return the gradient of all rows, for this rank's features."""
        sent = torch.cat(grad.chunk(world_size(), -1))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent.contiguous())
        return received


def divided_tables(mistake: str = "") -> Any:
    """Return a program that divides tables over ranks, and rows of the top layer."""

    def program(model: Any) -> TrainingProgram:
        rank, size = dist.get_rank(), world_size()
        every_other = range(rank, TABLES, size)
        block = range(rank * TABLES // size, (rank + 1) * TABLES // size)
        numbers = every_other if mistake == "every other table" else block
        own = nn.ModuleDict({str(k): model.tables[k] for k in numbers})
        holder = nn.ModuleDict({"tables": own, "top": model.top})

        def step(batch: Any) -> Tensor:
            found = [table(batch["items"][:, int(k)]) for k, table in own.items()]
            features = Exchange.apply(torch.cat(found, -1))
            value = F.mse_loss(model.top(features), local_part(batch["y"]))
            value.backward()
            average(model.top)
            for p in own.parameters():
                p.grad /= 1 if mistake == "tables are not averaged" else size
            return value

        return TrainingProgram(holder, step)

    return program


# ---- A teacher that follows, and statistics of all rows.


class Followed(nn.Module):
    """A student, a teacher that the forward moves after it, and a running mean of the teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.teacher.requires_grad_(False)
        self.register_buffer("centre", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Return the student's distance from the centred teacher."""
        taught = self.teacher(x)
        output = self.student(x) - (taught - self.centre)
        if self.training:
            with torch.no_grad():
                self.centre.lerp_(self.mean(taught), 0.1)
                for old, new in zip(self.teacher.parameters(), self.student.parameters()):
                    old.lerp_(new, 0.05)
        return output

    def mean(self, taught: Tensor) -> Tensor:
        """Return the mean over rows."""
        return taught.mean(0)


def following(all_rows: bool) -> Any:
    """Return a program whose centre is the mean over all rows, or over each rank's."""

    def program(model: Any) -> TrainingProgram:
        plain_mean = model.mean
        if all_rows:
            model.mean = lambda taught: rank_sum(plain_mean(taught)) / world_size()
        return TrainingProgram(model, averaged_step(model))

    return program


def averaged_step(model: Any) -> Any:
    """Return a step on this rank's rows that averages gradients."""

    def step(batch: Any) -> Tensor:
        local = batch_part(batch, dist.get_rank(), world_size())
        value = squared(model(local["x"]), local)
        value.backward()
        average(model)
        return value

    return step


class Distilled(nn.Module):
    """A student, and a teacher that stays in eval mode: it drops nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))
        self.teacher.requires_grad_(False)
        self.student = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1))

    def train(self, mode: bool = True) -> Distilled:
        """Set the mode of the student only."""
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Return the student's distance from the teacher."""
        return self.student(x) - self.teacher(x)


def taught(training: bool) -> Any:
    """Return a program that runs the teacher in one of the modes."""

    def program(model: Any) -> TrainingProgram:
        plain_step = averaged_step(model)

        def step(batch: Any) -> Tensor:
            model.teacher.train(training)
            value: Tensor = plain_step(batch)
            return value

        return TrainingProgram(model, step)

    return program


def evaluating(training: bool) -> Any:
    """Return a program that evaluates in one of the modes."""

    def program(model: Any) -> TrainingProgram:
        def evaluate(batch: Any) -> Tensor:
            output: Tensor = model.train(training)(batch["x"])
            return output

        return TrainingProgram(model, averaged_step(model), evaluate=evaluate)

    return program


def more_dropout(model: Any) -> TrainingProgram:
    """Wrong: drop in a model without dropout."""
    model[1].p = 0.5
    program: TrainingProgram = replicated()(model)
    return program


def layers(p: float = 0.0) -> nn.Module:
    """Return two layers with a dropout between them."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(p), nn.Linear(WIDTH, WIDTH))


def copied(renewed: bool) -> Any:
    """Return a program that computes with a copy of a weight, renewed in each step or not."""

    def program(model: Any) -> TrainingProgram:
        weight, copies = model[2].weight, list[Tensor]()

        def step(batch: Any) -> Tensor:
            if renewed or not copies:
                copies[:] = [weight.detach().clone()]
            held = {"inner.2.weight": weight + (copies[0] - weight).detach()}
            local = batch_part(batch, dist.get_rank(), world_size())
            value = squared(torch.func.functional_call(model, held, (local["x"],)), local)
            value.backward()
            average(model)
            return value

        return TrainingProgram(model, step)

    return program


class Rows(nn.Module):
    """Layers whose input has the name of the batches."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        """Run the layers."""
        return self.inner(x)

    def __getitem__(self, index: int) -> Any:
        """Return a layer."""
        return self.inner[index]  # type: ignore[index]


# ---- Two towers: every row is compared with all rows.


class Towers(nn.Module):
    """Two towers, and the temperature of their products."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return unit vectors and the temperature."""
        left, right = (F.normalize(v, dim=-1) for v in (self.left(x), self.right(y)))
        return left, right, self.temperature.exp()


def contrast(output: Any, batch: Any) -> Tensor:
    """Return the loss of each row against all rows."""
    left, right, scale = output
    return F.cross_entropy(scale * left @ right.T, torch.arange(len(left)))


def contrasting(mistake: str = "") -> Any:
    """Return a program whose ranks compare their rows with those of all ranks."""

    def program(model: Any) -> TrainingProgram:
        module = DistributedDataParallel(model)

        def step(batch: Any) -> Tensor:
            left, right, scale = module(**batch_part(batch, dist.get_rank(), world_size()))
            parts = list(all_gather(right))
            if mistake == "no gradient":
                parts = [right if k == dist.get_rank() else p.detach() for k, p in enumerate(parts)]
            gathered = torch.cat(parts)
            shift = 0 if mistake == "labels of rank 0" else dist.get_rank() * len(left)
            labels = torch.arange(len(left)) + shift
            value = F.cross_entropy(scale * left @ gathered.T, labels)
            value.backward()
            return value

        return TrainingProgram(module, step)

    return program


# ---- DDP's join, and a model that returns a dict.


class Named(nn.Module):
    """A layer whose outputs have names."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Return the output, and its mean."""
        output = self.layer(x)
        return {"output": output, "mean": output.mean()}


def joining(model: Any) -> TrainingProgram:
    """DDP inside of `join`, which returns one output without its name."""
    module = DistributedDataParallel(model)

    def step(batch: Any) -> tuple[Tensor, Tensor]:
        local = batch_part(batch, dist.get_rank(), world_size())
        with module.join():
            output = module(local["x"])
            value = squared(output, local)
            value.backward()
        return value, output["output"]

    return TrainingProgram(module, step)


# ---- Verdicts.

RIGHT: dict[str, tuple[Any, ...]] = {
    "tables on ranks": (divided_tables(), Recommender, items),
    "a teacher that follows": (following(all_rows=True), Followed),
    "a teacher in eval mode": (taught(training=False), Distilled),
    "an evaluation": (evaluating(training=False), lambda: Rows(layers(0.5))),
    "two towers": (contrasting(), Towers, numbers, contrast),
    "join, and outputs with names": (joining, Named),
    "a copy that is renewed": (copied(renewed=True), lambda: Rows(layers())),
    "a norm of weights": (
        replicated(),
        lambda: Rows(nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))),
    ),
}
WRONG: dict[str, tuple[tuple[Any, ...], str]] = {
    "every other table": (
        (divided_tables("every other table"), Recommender, items),
        "what it takes holds along dim 1 the places [0, 1, 4, 5, 2, 3, 6, 7] of what is right",
    ),
    "tables that are not averaged": (
        (divided_tables("tables are not averaged"), Recommender, items),
        "4 of 6 (`tables.3.weight`, `tables.2.weight`, `tables.1.weight`, `tables.0.weight`): "
        "ranks = 2 times the right value everywhere",
    ),
    "a centre of each rank's rows": ((following(all_rows=False), Followed), "`centre`: "),
    "a teacher that drops": (
        (taught(training=True), Distilled),
        "`teacher.1`: ranks drop there, and the original has it in eval mode",
    ),
    "an evaluation in training mode": (
        (evaluating(training=True), lambda: Rows(layers(0.5))),
        "`inner.1`: ranks drop there in `evaluate`, and the original drops nothing in evaluation",
    ),
    "dropout that the original does not have": (
        (more_dropout, lambda: Rows(layers())),
        "ranks drop there, and the original drops nothing",
    ),
    "a copy that is not renewed": (
        (copied(renewed=False), lambda: Rows(layers())),
        "step 1 computes with `inner.2.weight` as before step 0: what is gathered or copied",
    ),
    "rows of others without a gradient": (
        (contrasting("no gradient"), Towers, numbers, contrast),
        "2 of 5 (`right.bias`, `right.weight`)",
    ),
    "labels of the first rank": (
        (contrasting("labels of rank 0"), Towers, numbers, contrast),
        "the loss",
    ),
}


@pytest.mark.parametrize("case", RIGHT.values(), ids=RIGHT)
def test_another_model_passes(case: tuple[Any, ...], pool: Pool) -> None:
    """A right program passes."""
    program, model, *inputs = case
    report = judge_program(pool, program, model(), *inputs)
    assert report.ok, str(report)


@pytest.mark.parametrize("case, said", WRONG.values(), ids=WRONG)
def test_a_mistake_in_another_model(case: tuple[Any, ...], said: str, pool: Pool) -> None:
    """A wrong program fails, and the mistake is named."""
    program, model, *inputs = case
    report = judge_program(pool, program, model(), *inputs)
    messages = "; ".join(f"{kind}: {text}" for kind, text in report.localised)
    assert report.exit_code == 1 and said in messages, str(report)
    assert "the step itself changes" not in messages, messages


@pytest.mark.parametrize("code", ["S763", "S868"])
def test_weights_that_cannot_be_compared(code: str, pool: Pool) -> None:
    """Complex weights and sparse gradients are refused by name, before anything runs."""
    model = Rows(nn.Embedding(ITEMS, 2, sparse=True))
    if code == "S763":
        model.inner = nn.ParameterList([torch.ones(2, dtype=torch.complex64)])
    with pytest.raises(Refusal) as refused:
        judge_program(pool, replicated(), model)
    assert refused.value.diagnostic.code == code and "`inner." in str(refused.value)
