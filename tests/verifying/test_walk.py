"""One walk through verbs: what `verify` takes, `run` and `build` take; what it refuses, they do."""

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
    """Blocks and a head; what it is given besides is for those that come from it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)
        self.double()

    def logits(self, x: Tensor) -> Tensor:
        """Through all of it."""
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        found: Tensor = self.head(x)
        return found

    def forward(self, x: Tensor) -> Any:
        return self.logits(x)


class Told(Layered):
    """Gives its loss."""

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return {"loss": F.cross_entropy(self.logits(x), labels)}


@dataclass
class Answer:
    """An output that no library has registered."""

    loss: Tensor
    logits: Tensor


class Pair(NamedTuple):
    """A named tuple, of which the loss is the first."""

    loss: Tensor
    logits: Tensor


class Named(dict[str, Tensor]):
    """A mapping of its own class, with attributes, as transformers' and diffusers' outputs are."""

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


CLASSES: dict[str, Callable[..., Any]] = {
    "a dataclass": Answer,
    "a named tuple": Pair,
    "a mapping": dict,
    "a mapping of its own class": Named,
}


class Dressing(Layered):
    """Its output is of any class, with its loss and its logits."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.logits(x)
        return CLASSES[self.kind](loss=F.cross_entropy(logits, labels), logits=logits)


class Summed(Layered):
    """Its loss is a sum over the rows, as if it were a mean."""

    def forward(self, x: Tensor) -> Any:
        return {"loss": self.logits(x).square().sum()}


class Spread(Layered):
    """Its loss is the spread of all rows, which no parts have."""

    def forward(self, x: Tensor) -> Any:
        return {"loss": self.logits(x).std()}


class Hinged(Layered):
    """Its loss pushes the spread of all rows above a bound, where a proof's parameters have it."""

    def forward(self, x: Tensor) -> Any:
        made = self.logits(x)
        return {"loss": made.square().mean() + torch.relu(0.55 - made.std())}


class Mapped(Layered):
    """Its loss is the spread of what `vmap` gives: tensors inside of it are none of the batch."""

    def forward(self, x: Tensor) -> Any:
        return {"loss": torch.vmap(torch.tanh)(self.logits(x)).std()}


class Shortened(Layered):
    """Looks rows up in a table, which are made shorter where they lie."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, WIDTH, max_norm=0.5)

    def forward(self, x: Tensor) -> Any:
        rows = self.table(x.detach().abs().argmax(-1) % 4)
        return {"loss": self.logits(x + rows).square().mean()}


class Counting(Layered):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        if self.training:
            self.calls += 1
        return {"loss": self.logits(x).square().mean()}


class Dropping(Counting):
    """Counts its calls, and drops what comes out of its blocks."""

    def logits(self, x: Tensor) -> Tensor:
        """Through all of it, and through dropouts of its own."""
        for block in self.blocks:
            x = x + F.dropout(torch.tanh(block(x)), 0.5, self.training)
        found: Tensor = self.head(x)
        return found


class Normed(Layered):
    """Normalises by the rows of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(2)
        )
        self.double()

    def forward(self, x: Tensor) -> Any:
        return {"loss": self.logits(x).square().mean()}


class Adding(nn.Linear):
    """Writes its result into what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        x += super().forward(x.clone())
        return x


class Overwriting(Layered):
    """Has blocks that write into their argument."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Adding(WIDTH, WIDTH) for _ in range(2))
        self.double()

    def forward(self, x: Tensor) -> Any:
        x = x.clone()
        return {"loss": self.head(self.blocks[1](self.blocks[0](x))).square().mean()}


class Echoing(Layered):
    """Adds what the last blocks gave in the forward before: a buffer, or in an object of its
    own."""

    last: Tensor

    def __init__(self, hidden: bool) -> None:
        super().__init__()
        self.kept = Kept()
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


class Kept:
    """What a model keeps in an object."""

    def __init__(self) -> None:
        self.last = torch.zeros(WIDTH, dtype=torch.float64)


class Shuffled(Layered):
    """Draws an order, which has no form that other ranks could draw alike."""

    def forward(self, x: Tensor) -> Any:
        order = torch.randperm(WIDTH, device=x.device)
        return {"loss": self.logits(x[:, order]).square().mean()}


class Listed(Layered):
    """Is given a list of samples, each of a length of its own."""

    def forward(self, images: list[Tensor]) -> Any:
        found = [self.logits(one).square().mean() for one in images]
        return {"loss": torch.stack(found).mean()}


class Linked(Layered):
    """Rows look up each other by edges."""

    def forward(self, x: Tensor, edges: Tensor) -> Any:
        h = self.logits(x)
        return {
            "loss": (h + torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])).square().mean()
        }


class Graphs:
    """Several graphs as one object, as libraries of graphs have it."""

    def __init__(self, x: Tensor, edges: Tensor) -> None:
        self.stored = {"x": x, "edges": edges}
        self.num_graphs = 2


class Holding(Layered):
    """Is given an object, or a list of them, and what is right."""

    def forward(self, data: Any, labels: Tensor | None = None) -> Any:
        given = data if isinstance(data, list) else [data]
        logits = torch.cat([self.logits(one.stored["x"]) for one in given]).mean(0)
        return {"loss": logits.square().mean() if labels is None else (logits - labels).std()}


def _points(seed: int) -> dict[str, Any]:
    return {"x": torch.randn(8, WIDTH, dtype=torch.float64, generator=_from(seed))}


def _labelled(seed: int) -> dict[str, Any]:
    return _points(seed) | {"labels": torch.randint(3, (8,), generator=_from(seed))}


def _more(seed: int) -> dict[str, Any]:
    return _labelled(seed) | {"names": torch.arange(8)}


def _list(seed: int) -> dict[str, Any]:
    g = _from(seed)
    return {"images": [torch.randn(n, WIDTH, dtype=torch.float64, generator=g) for n in (2, 3)]}


def _graph(seed: int) -> dict[str, Any]:
    edges = torch.stack([torch.arange(8), torch.arange(8).roll(1)])
    return _points(seed) | {"edges": edges}


def _object(seed: int) -> dict[str, Any]:
    return {"data": Graphs(**_graph(seed))}


def _objects(seed: int) -> dict[str, Any]:
    return {"data": [Graphs(**_graph(seed)), Graphs(**_graph(seed + 1))]}


def _beside(seed: int) -> dict[str, Any]:
    return _object(seed) | {"labels": torch.ones(2, 3, dtype=torch.float64)}


def _lists_beside(seed: int) -> dict[str, Any]:
    return _objects(seed) | {"labels": torch.ones(2, 3, dtype=torch.float64)}


def _from(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def judged(output: Tensor, batch: Batch) -> Tensor:
    """Reads labels that the forward does not take."""
    return F.cross_entropy(output, batch["labels"])


class Running:
    """Divides by a running mean of what it has given."""

    def __init__(self) -> None:
        self.mean = torch.zeros(())

    def __call__(self, output: Tensor, batch: Batch) -> Tensor:
        loss = judged(output, batch)
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        return loss / (1 + self.mean)


DP = "zero(stage=1, over=dp)"
DP_TP = f"blocks.*  shard(col, output=R, over=tp)\n{DP}"
PP = 'blocks  pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)'
ONE = PP.replace("micro=2", "micro=1")
LAYERS = PP.replace("blocks", "layers")
MICRO = 'pipeline(order="GPipe", micro=2)'
WHOLE = "blocks.*  checkpoint()"
FREE = "relax(batch_stats) "


@dataclass(frozen=True)
class Walk:
    """A model under rows, and the code by which all refuse it ("": all take it).

    `late`: only a run on values shows it, so `plan` takes it.
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
        """The axes that the rows name."""
        return ", ".join(f"{axis}=2" for axis in ("dp", "pp", "tp") if f"over={axis}" in self.rows)

    def schedule(self) -> Schedule:
        """The rows over a model made anew."""
        mesh = f"mesh({self.mesh})\n\n" if self.mesh else ""
        text = f'schedule 1\n\n{mesh}step "all" {self.relax}{{\n{self.rows}\n}}\n'
        return Schedule(self.model(), parse(Source("walk.sched", text)))


def _balanced() -> nn.Module:
    return expert_models.balanced(layers=2)


WALKS = {
    "router loss, dp": Walk(_balanced, expert_models.batch, DP),
    "router loss, microbatches": Walk(_balanced, expert_models.batch, LAYERS, "S668"),
    "router loss, microbatches, relaxed": Walk(_balanced, expert_models.batch, LAYERS, relax=FREE),
    "no loss, dp": Walk(Layered, _points, DP, "S615"),
    "no loss, pp": Walk(Layered, _points, PP, "S615"),
    "no loss, one rank": Walk(Layered, _points, WHOLE, "S615"),
    "a key for nobody, dp": Walk(Told, _more, DP, "S910"),
    "a key for nobody, pp": Walk(Told, _more, PP, "S910"),
    "a list of samples, dp": Walk(Listed, _list, DP, "S605"),
    "a list of samples, microbatches": Walk(Listed, _list, MICRO, "S605"),
    "a graph, dp": Walk(Linked, _graph, DP, "S670"),
    "a graph, microbatches": Walk(Linked, _graph, PP, "S670"),
    "a graph, whole": Walk(Linked, _graph, WHOLE),
    "graphs in an object": Walk(Holding, _object, DP, "S605"),
    "objects in a list": Walk(Holding, _objects, MICRO, "S605"),
    "graphs in an object, and labels": Walk(Holding, _beside, DP, "S670"),
    "objects in a list, and labels": Walk(Holding, _lists_beside, MICRO, "S670"),
    "batch norm, dp": Walk(Normed, _points, DP, "S703", late=True),
    "batch norm, microbatches": Walk(Normed, _points, PP, "S703", late=True),
    "batch norm, microbatches, relaxed": Walk(Normed, _points, PP, relax=FREE),
    "batch norm, dp, relaxed": Walk(Normed, _points, DP, relax=FREE),
    "batch norm, whole": Walk(Normed, _points, "head  checkpoint()"),
    "its argument overwritten, recomputed": Walk(Overwriting, _points, WHOLE, "S813", late=True),
    "batch norm, recomputed": Walk(Normed, _points, WHOLE, "S813", late=True),
    **{
        f"{kind}, {name}": Walk(partial(Dressing, kind), _labelled, rows)
        for kind in CLASSES
        for name, rows in (("dp and tp", DP_TP), ("stages", PP))
    },
    "labels for the loss, dp": Walk(Layered, _labelled, DP, loss=judged),
    "labels for the loss, pp": Walk(Layered, _labelled, PP, loss=judged),
    "a sum as a loss, dp": Walk(Summed, _points, DP, "S703", late=True),
    "a sum as a loss, microbatches": Walk(Summed, _points, MICRO, "S703", late=True),
    "the spread as a loss, dp": Walk(Spread, _points, DP, "S703", late=True),
    "the spread under a bound, dp": Walk(Hinged, _points, DP, "S703", late=True),
    "the spread after vmap, dp": Walk(Mapped, _points, DP, "S703", late=True),
    "a running loss, dp": Walk(Layered, _labelled, DP, "S703", loss=Running(), late=True),
    "rows made shorter, dp": Walk(Shortened, _points, DP, "S708", late=True),
    "calls counted, microbatches": Walk(Counting, _points, MICRO, "S708", late=True),
    "calls counted, dp": Walk(Counting, _points, DP),
    "calls counted, one microbatch in stages": Walk(Counting, _points, ONE),
    "calls counted beside dropout, in stages": Walk(Dropping, _points, ONE),
    "an echo, one microbatch in stages": Walk(
        partial(Echoing, False), _points, ONE, "S708", late=True
    ),
    "an echo in an object, in stages": Walk(
        partial(Echoing, True), _points, ONE, "S708", late=True
    ),
    "draws of an order, dp": Walk(Shuffled, _points, DP, "S812"),
    "draws of an order, pp": Walk(Shuffled, _points, PP, "S812"),
}


@pytest.mark.parametrize("name", WALKS)
def test_what_one_takes_all_take(name: str, threads: Threads) -> None:
    """`verify`, `run`, and a program built in Python and stepped, say the same; so does `plan`."""
    walk = WALKS[name]
    said = {
        "plan": _code(lambda: account(_plan(walk), walk.batch(0), walk.loss)),
        "verify": _code(lambda: _verified(walk, threads)),
        "run": _code(lambda: _trained(walk, threads)),
        "build": _code(lambda: threads.run(_stepped, _world(walk), walk, False)),
        "build at the first step": _code(lambda: threads.run(_stepped, _world(walk), walk, True)),
    }
    wanted = dict.fromkeys(said, walk.code) | ({"plan": ""} if walk.late else {})
    assert said == wanted


def _code(way: Callable[[], Any]) -> str:
    try:
        way()
    except Refusal as refusal:
        return refusal.diagnostic.code
    return ""


def _plan(walk: Walk) -> Plan:
    return walk.schedule().plan()


def _world(walk: Walk) -> int:
    return _plan(walk).mesh.world


def _verified(walk: Walk, threads: Threads) -> None:
    case = Case(_plan(walk), (walk.batch(0), walk.batch(1)), walk.loss, dtype="none")
    assert prove(case, pool=threads).ok


def _trained(walk: Walk, threads: Threads) -> None:
    course = trace_course(TrainingRun(_plan(walk), walk.batch, walk.loss, steps=2))
    assert len(threads.run(train, course.plan.mesh.world, course)[0].steps) == 2


def _stepped(walk: Walk, later: bool) -> float:
    program = walk.schedule().build(
        batch=None if later else walk.batch(0),
        loss=walk.loss,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
    )
    return float(program.train_step(walk.batch(0)))


def test_what_is_asked_leaves_no_trace() -> None:
    """`build` asks a copy of the model: values, buffers, modes and random numbers stay."""
    walk = Walk(Counting, _points, DP)
    schedule = walk.schedule()
    model, plan = schedule.plan().model.model, schedule.plan()
    model.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = torch.random.get_rng_state()
    found = prepare(plan, walk.batch(0))
    check_if_cheap(plan, walk.batch(0), found)
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert not model.training and all(p.grad is None for p in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_what_takes_long_is_left_to_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a large model is asked, nor one that cannot be run here in float64."""
    walk = WALKS["a sum as a loss, dp"]
    plan, batch = _plan(walk), walk.batch(0)
    found = prepare(plan, batch)
    with pytest.raises(Refusal, match="S703") as caught:
        check_if_cheap(plan, batch, found)
    assert "a sum over rows, not a mean" in str(caught.value)
    with monkeypatch.context() as patch:
        patch.setattr(probe, "CHEAP_WORK", 10)
        check_if_cheap(plan, batch, found)

    def dies(self: Summed, x: Tensor) -> Any:
        if x.is_meta:
            return {"loss": self.logits(x).square().sum()}
        raise TypeError("no kernel for Double")

    monkeypatch.setattr(Summed, "forward", dies)
    check_if_cheap(plan, batch, found)


@pytest.mark.parametrize("name", ["batch norm, dp", "batch norm, microbatches"])
def test_a_batch_norm_is_seen_whatever_it_takes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large model too: one that trains by the rows of a part, unless that is allowed."""
    monkeypatch.setattr(probe, "CHEAP_WORK", 10)
    walk = WALKS[name]
    plan, batch = _plan(walk), walk.batch(0)
    found = prepare(plan, batch)
    with pytest.raises(Refusal, match="`blocks.0.1`, a `BatchNorm1d`, takes statistics"):
        check_if_cheap(plan, batch, found)
    allowed = replace(plan, relaxed=(("", ("batch_stats",)),))
    check_if_cheap(allowed, batch, found)
    unread = replace(found, traced=replace(found.traced, call_counts={}))
    check_if_cheap(plan, batch, unread)
    model = plan.model.model
    for block in model.blocks:
        block[1].eval()
    check_if_cheap(plan, batch, found)
    model.eval()  # loaded so: all of it trains
    with pytest.raises(Refusal, match="S703"):
        check_if_cheap(plan, batch, found)


def test_a_batch_norm_of_one_row() -> None:
    """What torch raises of parts of one row is no mistake of the batch: larger parts are named."""
    walk = Walk(Normed, _points, PP.replace("micro=2", "micro=8"), "S604", relax=FREE)
    with pytest.raises(Refusal, match="give more rows, or fewer parts"):
        prepare(_plan(walk), {"x": walk.batch(0)["x"][:1]})
