"""`plan`, `verify`, `run` and `build` agree: all accept a model, or all refuse it with one code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import Source
from schedlang.ir.plan import Plan
from schedlang.language.syntax import parse
from schedlang.passes.analyze.prepare import prepare
from schedlang.passes.lower.train import TrainingRun, train
from schedlang.passes.prove import Case, prove
from schedlang.passes.simulate.account import account
from schedlang.passes.verify import probe
from schedlang.passes.verify.probe import check_if_cheap
from schedlang.schedule import Schedule
from schedlang.verbs.run import trace_course
from tests import expert_models
from tests.engine import Threads

Batch = Mapping[str, Any]
WIDTH = 6


class Layered(nn.Module):
    """Blocks and a head; subclasses define inputs and loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)
        self.double()

    def logits(self, x: Tensor) -> Tensor:
        """Return the scores."""
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        scores: Tensor = self.head(x)
        return scores

    def forward(self, x: Tensor) -> Any:
        return self.logits(x)


class WithLoss(Layered):
    """Returns its loss."""

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return {"loss": F.cross_entropy(self.logits(x), labels)}


@dataclass
class Answer:
    """An output class that is not registered in pytree."""

    loss: Tensor
    logits: Tensor


class Pair(NamedTuple):
    """A named tuple whose first field is the loss."""

    loss: Tensor
    logits: Tensor


class AttributeDict(dict[str, Tensor]):
    """A dict subclass with attributes, as outputs of transformers and diffusers."""

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


CLASSES: dict[str, Callable[..., Any]] = {
    "a dataclass": Answer,
    "a named tuple": Pair,
    "a mapping": dict,
    "a mapping of its own class": AttributeDict,
}


class AnyOutput(Layered):
    """Returns loss and logits in a given class."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.logits(x)
        return CLASSES[self.kind](loss=F.cross_entropy(logits, labels), logits=logits)


class SumLoss(Layered):
    """Its loss is a sum over rows instead of a mean."""

    def forward(self, x: Tensor) -> Any:
        return {"loss": self.logits(x).square().sum()}


class StdLoss(Layered):
    """Its loss is the standard deviation of all rows."""

    def forward(self, x: Tensor) -> Any:
        return {"loss": self.logits(x).std()}


class HingeLoss(Layered):
    """Its loss contains a hinge on the standard deviation of all rows."""

    def forward(self, x: Tensor) -> Any:
        scores = self.logits(x)
        return {"loss": scores.square().mean() + torch.relu(0.55 - scores.std())}


class VmapLoss(Layered):
    """Its loss is the standard deviation of a `vmap` output, whose inner tensors have no rows."""

    def forward(self, x: Tensor) -> Any:
        return {"loss": torch.vmap(torch.tanh)(self.logits(x)).std()}


class MaxNorm(Layered):
    """Uses an embedding with max_norm, which changes its rows in place."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, WIDTH, max_norm=0.5)

    def forward(self, x: Tensor) -> Any:
        rows = self.table(x.detach().abs().argmax(-1) % 4)
        return {"loss": self.logits(x + rows).square().mean()}


class CallCounter(Layered):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        if self.training:
            self.calls += 1
        return {"loss": self.logits(x).square().mean()}


class DroppingCounter(CallCounter):
    """Counts its calls, and applies dropout after its blocks."""

    def logits(self, x: Tensor) -> Tensor:
        """Return the scores, with dropout."""
        for block in self.blocks:
            x = x + F.dropout(torch.tanh(block(x)), 0.5, self.training)
        scores: Tensor = self.head(x)
        return scores


class BatchNormed(Layered):
    """Uses batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(2)
        )
        self.double()

    def forward(self, x: Tensor) -> Any:
        return {"loss": self.logits(x).square().mean()}


class AddInPlace(nn.Linear):
    """Adds its result to its input in place."""

    def forward(self, x: Tensor) -> Tensor:
        x += super().forward(x.clone())
        return x


class Overwriting(Layered):
    """Has blocks that change their argument in place."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(AddInPlace(WIDTH, WIDTH) for _ in range(2))
        self.double()

    def forward(self, x: Tensor) -> Any:
        x = x.clone()
        return {"loss": self.head(self.blocks[1](self.blocks[0](x))).square().mean()}


class Echo(Layered):
    """Adds outputs of the previous forward, kept in a buffer or in an object."""

    last: Tensor

    def __init__(self, hidden: bool) -> None:
        super().__init__()
        self.kept = Memory()
        self.register_buffer("last", torch.zeros(WIDTH, dtype=torch.float64))
        self.hidden = hidden

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = x + torch.tanh(block(x + (self.kept.last if self.hidden else self.last)))
        if self.training and self.hidden:
            self.kept.last = x.detach().mean(0)
        elif self.training:
            self.last.copy_(x.detach().mean(0))
        return {"loss": self.head(x).square().mean()}


class Memory:
    """State of a model in a plain object."""

    def __init__(self) -> None:
        self.last = torch.zeros(WIDTH, dtype=torch.float64)


class RandomOrder(Layered):
    """Uses randperm, which has no logical form."""

    def forward(self, x: Tensor) -> Any:
        order = torch.randperm(WIDTH, device=x.device)
        return {"loss": self.logits(x[:, order]).square().mean()}


class ListInput(Layered):
    """Takes a list of samples of different lengths."""

    def forward(self, images: list[Tensor]) -> Any:
        losses = [self.logits(image).square().mean() for image in images]
        return {"loss": torch.stack(losses).mean()}


class GraphModel(Layered):
    """Rows exchange values along edges."""

    def forward(self, x: Tensor, edges: Tensor) -> Any:
        h = self.logits(x)
        return {
            "loss": (h + torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])).square().mean()
        }


class Graphs:
    """Several graphs in one object, as in graph libraries."""

    def __init__(self, x: Tensor, edges: Tensor) -> None:
        self.stored = {"x": x, "edges": edges}
        self.num_graphs = 2


class GraphInput(Layered):
    """Takes a graph object, or a list of them, and labels."""

    def forward(self, data: Any, labels: Tensor | None = None) -> Any:
        graphs = data if isinstance(data, list) else [data]
        logits = torch.cat([self.logits(graph.stored["x"]) for graph in graphs]).mean(0)
        return {"loss": logits.square().mean() if labels is None else (logits - labels).std()}


def _inputs(seed: int) -> dict[str, Any]:
    return {"x": torch.randn(8, WIDTH, dtype=torch.float64, generator=_generator(seed))}


def _with_labels(seed: int) -> dict[str, Any]:
    return _inputs(seed) | {"labels": torch.randint(3, (8,), generator=_generator(seed))}


def _with_names(seed: int) -> dict[str, Any]:
    return _with_labels(seed) | {"names": torch.arange(8)}


def _image_lists(seed: int) -> dict[str, Any]:
    g = _generator(seed)
    return {"images": [torch.randn(n, WIDTH, dtype=torch.float64, generator=g) for n in (2, 3)]}


def _graph(seed: int) -> dict[str, Any]:
    edges = torch.stack([torch.arange(8), torch.arange(8).roll(1)])
    return _inputs(seed) | {"edges": edges}


def _graph_object(seed: int) -> dict[str, Any]:
    return {"data": Graphs(**_graph(seed))}


def _graph_list(seed: int) -> dict[str, Any]:
    return {"data": [Graphs(**_graph(seed)), Graphs(**_graph(seed + 1))]}


def _graph_with_labels(seed: int) -> dict[str, Any]:
    return _graph_object(seed) | {"labels": torch.ones(2, 3, dtype=torch.float64)}


def _graphs_with_labels(seed: int) -> dict[str, Any]:
    return _graph_list(seed) | {"labels": torch.ones(2, 3, dtype=torch.float64)}


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def label_loss(output: Tensor, batch: Batch) -> Tensor:
    """Return a loss with labels that forward does not take."""
    return F.cross_entropy(output, batch["labels"])


class RunningLoss:
    """A loss divided by its running mean."""

    def __init__(self) -> None:
        self.mean = torch.zeros(())

    def __call__(self, output: Tensor, batch: Batch) -> Tensor:
        loss = label_loss(output, batch)
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        return loss / (1 + self.mean)


DP = "zero(stage=1, over=dp)"
DP_TP = f"blocks.*  shard(col, output=R, over=tp)\n{DP}"
PP = 'blocks  pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)'
ONE_MICRO = PP.replace("micro=2", "micro=1")
LAYERS = PP.replace("blocks", "layers")
MICRO = 'pipeline(order="GPipe", micro=2)'
CHECKPOINT = "blocks.*  checkpoint()"
RELAX = "relax(batch_stats) "


@dataclass(frozen=True)
class Scenario:
    """A model and rows, and the code with which all commands refuse it ("": all accept it).

    `late`: only a run on values shows it, so `plan` accepts it.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    rows: str
    code: str = ""
    loss: Callable[..., Any] | None = None
    relax: str = ""
    late: bool = False

    @property
    def mesh(self) -> str:
        """The axes that the rows use."""
        return ", ".join(f"{axis}=2" for axis in ("dp", "pp", "tp") if f"over={axis}" in self.rows)

    def schedule(self) -> Schedule:
        """Return the schedule of a new model."""
        mesh = f"mesh({self.mesh})\n\n" if self.mesh else ""
        text = f'schedule 1\n\n{mesh}step "all" {self.relax}{{\n{self.rows}\n}}\n'
        return Schedule(self.model(), parse(Source("walk.sched", text)))


def _balanced_model() -> nn.Module:
    return expert_models.balanced_model(layers=2)


SCENARIOS = {
    "router loss, dp": Scenario(_balanced_model, expert_models.batch, DP),
    "router loss, microbatches": Scenario(_balanced_model, expert_models.batch, LAYERS, "S668"),
    "router loss, microbatches, relaxed": Scenario(
        _balanced_model, expert_models.batch, LAYERS, relax=RELAX
    ),
    "no loss, dp": Scenario(Layered, _inputs, DP, "S615"),
    "no loss, pp": Scenario(Layered, _inputs, PP, "S615"),
    "no loss, one rank": Scenario(Layered, _inputs, CHECKPOINT, "S615"),
    "a key for nobody, dp": Scenario(WithLoss, _with_names, DP, "S910"),
    "a key for nobody, pp": Scenario(WithLoss, _with_names, PP, "S910"),
    "a list of samples, dp": Scenario(ListInput, _image_lists, DP, "S605"),
    "a list of samples, microbatches": Scenario(ListInput, _image_lists, MICRO, "S605"),
    "a graph, dp": Scenario(GraphModel, _graph, DP, "S670"),
    "a graph, microbatches": Scenario(GraphModel, _graph, PP, "S670"),
    "a graph, whole": Scenario(GraphModel, _graph, CHECKPOINT),
    "graphs in an object": Scenario(GraphInput, _graph_object, DP, "S605"),
    "objects in a list": Scenario(GraphInput, _graph_list, MICRO, "S605"),
    "graphs in an object, and labels": Scenario(GraphInput, _graph_with_labels, DP, "S670"),
    "objects in a list, and labels": Scenario(GraphInput, _graphs_with_labels, MICRO, "S670"),
    "batch norm, dp": Scenario(BatchNormed, _inputs, DP, "S703", late=True),
    "batch norm, microbatches": Scenario(BatchNormed, _inputs, PP, "S703", late=True),
    "batch norm, microbatches, relaxed": Scenario(BatchNormed, _inputs, PP, relax=RELAX),
    "batch norm, dp, relaxed": Scenario(BatchNormed, _inputs, DP, relax=RELAX),
    "batch norm, whole": Scenario(BatchNormed, _inputs, "head  checkpoint()"),
    "its argument overwritten, recomputed": Scenario(
        Overwriting, _inputs, CHECKPOINT, "S813", late=True
    ),
    "batch norm, recomputed": Scenario(BatchNormed, _inputs, CHECKPOINT, "S813", late=True),
    **{
        f"{kind}, {name}": Scenario(partial(AnyOutput, kind), _with_labels, rows)
        for kind in CLASSES
        for name, rows in (("dp and tp", DP_TP), ("stages", PP))
    },
    "labels for the loss, dp": Scenario(Layered, _with_labels, DP, loss=label_loss),
    "labels for the loss, pp": Scenario(Layered, _with_labels, PP, loss=label_loss),
    "a sum as a loss, dp": Scenario(SumLoss, _inputs, DP, "S703", late=True),
    "a sum as a loss, microbatches": Scenario(SumLoss, _inputs, MICRO, "S703", late=True),
    "the spread as a loss, dp": Scenario(StdLoss, _inputs, DP, "S703", late=True),
    "the spread under a bound, dp": Scenario(HingeLoss, _inputs, DP, "S703", late=True),
    "the spread after vmap, dp": Scenario(VmapLoss, _inputs, DP, "S703", late=True),
    "a running loss, dp": Scenario(
        Layered, _with_labels, DP, "S703", loss=RunningLoss(), late=True
    ),
    "rows made shorter, dp": Scenario(MaxNorm, _inputs, DP, "S708", late=True),
    "calls counted, microbatches": Scenario(CallCounter, _inputs, MICRO, "S708", late=True),
    "calls counted, dp": Scenario(CallCounter, _inputs, DP),
    "calls counted, one microbatch in stages": Scenario(CallCounter, _inputs, ONE_MICRO),
    "calls counted beside dropout, in stages": Scenario(DroppingCounter, _inputs, ONE_MICRO),
    "an echo, one microbatch in stages": Scenario(
        partial(Echo, False), _inputs, ONE_MICRO, "S708", late=True
    ),
    "an echo in an object, in stages": Scenario(
        partial(Echo, True), _inputs, ONE_MICRO, "S708", late=True
    ),
    "draws of an order, dp": Scenario(RandomOrder, _inputs, DP, "S812"),
    "draws of an order, pp": Scenario(RandomOrder, _inputs, PP, "S812"),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_what_one_takes_all_take(name: str, threads: Threads) -> None:
    """`plan`, `verify`, `run` and `build` give the same code."""
    scenario = SCENARIOS[name]
    codes = {
        "plan": _refusal_code(lambda: account(_plan(scenario), scenario.batch(0), scenario.loss)),
        "verify": _refusal_code(lambda: _verify(scenario, threads)),
        "run": _refusal_code(lambda: _run_training(scenario, threads)),
        "build": _refusal_code(
            lambda: threads.run(_build_and_step, _world(scenario), scenario, False)
        ),
        "build at the first step": _refusal_code(
            lambda: threads.run(_build_and_step, _world(scenario), scenario, True)
        ),
    }
    expected = dict.fromkeys(codes, scenario.code) | ({"plan": ""} if scenario.late else {})
    assert codes == expected


def _refusal_code(command: Callable[[], Any]) -> str:
    try:
        command()
    except Refusal as refusal:
        return refusal.diagnostic.code
    return ""


def _plan(scenario: Scenario) -> Plan:
    return scenario.schedule().plan()


def _world(scenario: Scenario) -> int:
    return _plan(scenario).mesh.world


def _verify(scenario: Scenario, threads: Threads) -> None:
    case = Case(
        _plan(scenario), (scenario.batch(0), scenario.batch(1)), scenario.loss, dtype="none"
    )
    assert prove(case, pool=threads).ok


def _run_training(scenario: Scenario, threads: Threads) -> None:
    course = trace_course(TrainingRun(_plan(scenario), scenario.batch, scenario.loss, steps=2))
    assert len(threads.run(train, course.plan.mesh.world, course)[0].steps) == 2


def _build_and_step(scenario: Scenario, later: bool) -> float:
    program = scenario.schedule().build(
        batch=None if later else scenario.batch(0),
        loss=scenario.loss,
        optimizer=lambda parameters: torch.optim.SGD([p for _, p in parameters], lr=0.1),
    )
    return float(program.train_step(scenario.batch(0)))


def test_what_is_asked_leaves_no_trace() -> None:
    """`build` checks a copy of the model: values, buffers, modes and generators stay unchanged."""
    scenario = Scenario(CallCounter, _inputs, DP)
    schedule = scenario.schedule()
    model, plan = schedule.plan().model.model, schedule.plan()
    model.eval()
    old_state = {name: value.clone() for name, value in model.state_dict().items()}
    rng_state = torch.random.get_rng_state()
    prepared = prepare(plan, scenario.batch(0))
    check_if_cheap(plan, scenario.batch(0), prepared)
    assert torch.equal(torch.random.get_rng_state(), rng_state)
    assert not model.training and all(p.grad is None for p in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, old_state[name]), name


def test_what_takes_long_is_left_to_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large models are not run by `build`, but judged by their sums; nor are models that cannot run
    in float64."""
    scenario = SCENARIOS["a sum as a loss, dp"]
    plan, batch = _plan(scenario), scenario.batch(0)
    prepared = prepare(plan, batch)
    with pytest.raises(Refusal, match="S703") as caught:
        check_if_cheap(plan, batch, prepared)
    assert "a sum over rows, not a mean" in str(caught.value)
    with monkeypatch.context() as patch:
        patch.setattr(probe, "CHEAP_WORK", 10)
        with pytest.raises(Refusal, match="S703") as caught:
            check_if_cheap(plan, batch, prepared)
        assert "nothing divides it by their number" in " ".join(str(caught.value).split())

    def dies(self: SumLoss, x: Tensor) -> Any:
        if x.is_meta:
            return {"loss": self.logits(x).square().sum()}
        raise TypeError("no kernel for Double")

    monkeypatch.setattr(SumLoss, "forward", dies)
    check_if_cheap(plan, batch, prepared)


@pytest.mark.parametrize("name", ["batch norm, dp", "batch norm, microbatches"])
def test_a_batch_norm_is_seen_whatever_it_takes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch norm in training is found without a run, also in large models, unless relaxed."""
    monkeypatch.setattr(probe, "CHEAP_WORK", 10)
    scenario = SCENARIOS[name]
    plan, batch = _plan(scenario), scenario.batch(0)
    prepared = prepare(plan, batch)
    with pytest.raises(Refusal, match="`blocks.0.1`, a `BatchNorm1d`, takes statistics"):
        check_if_cheap(plan, batch, prepared)
    allowed = replace(plan, relaxed=(("", ("batch_stats",)),))
    check_if_cheap(allowed, batch, prepared)
    unread = replace(prepared, traced=replace(prepared.traced, call_counts={}))
    check_if_cheap(plan, batch, unread)
    model = plan.model.model
    for block in model.blocks:
        block[1].eval()
    check_if_cheap(plan, batch, prepared)
    model.eval()  # loaded in eval mode: all of it will train
    with pytest.raises(Refusal, match="S703"):
        check_if_cheap(plan, batch, prepared)


def test_a_batch_norm_of_one_row() -> None:
    """Batch norm of parts with one row is refused, with the advice to use larger parts."""
    scenario = Scenario(BatchNormed, _inputs, PP.replace("micro=2", "micro=8"), "S604", relax=RELAX)
    with pytest.raises(Refusal, match="give more rows, or fewer parts"):
        prepare(_plan(scenario), {"x": scenario.batch(0)["x"][:1]})
