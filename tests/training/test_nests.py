"""Nests of any class: flattened, put together again, stacked as outputs of whole batches."""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree

from schedlang.ir import pytree
from schedlang.ir.module_copies import deepcopy_module
from schedlang.runtime.batch import named_tensors, stack_outputs
from schedlang.runtime.float64 import to_float64
from schedlang.runtime.launch.pool import Pool
from tests.engine import Threads
from tests.proofs import planned, proven


@dataclass(frozen=True)
class Frozen:
    a: Tensor
    note: str = "x"
    more: Any = None
    computed: int = field(default=3, init=False)


@dataclass
class Kept(OrderedDict):  # type: ignore[type-arg]
    """As diffusers' outputs are: a dict that is a dataclass, registered without names of places."""

    sample: Any = None
    other: Any = None

    def __post_init__(self) -> None:
        for name in ("sample", "other"):
            if getattr(self, name) is not None:
                self[name] = getattr(self, name)


_pytree.register_pytree_node(
    Kept, _pytree._dict_flatten, lambda v, c: Kept(**_pytree._dict_unflatten(v, c))
)


class Ordered(OrderedDict):  # type: ignore[type-arg]
    pass


class User(UserDict):  # type: ignore[type-arg]
    pass


class Named(NamedTuple):
    a: Any
    b: Any


class Attrs:
    """What attrs makes of a class, as far as anybody can tell from outside."""

    __attrs_attrs__ = (SimpleNamespace(name="a"), SimpleNamespace(name="b"))

    def __init__(self, a: Any, b: Any) -> None:
        self.a, self.b = a, b


ONE = torch.arange(4.0)
NESTS = {
    "dataclass": (Frozen(ONE, more=[ONE]), ["a", "more.0"]),
    "registered without names": (Kept(sample=ONE), ["sample"]),
    "ordered": (Ordered(a=ONE, b={"c": ONE}), ["a", "b.c"]),
    "user dict": (User(a=ONE), ["a"]),
    "named tuple": (Named(ONE, (1, ONE)), ["a", "b.1"]),
    "attrs": (Attrs(ONE, "s"), ["a"]),
    "namespace": (SimpleNamespace(a=ONE, b=Frozen(ONE)), ["a", "b.a"]),
}


@pytest.mark.parametrize("kind", NESTS)
def test_a_nest_of_any_class(kind: str) -> None:
    """Its tensors have names, and what is put together is of its class and holds the same."""
    nest, names = NESTS[kind]
    assert list(named_tensors({"x": nest})) == [f"x.{name}" for name in names]
    twice = pytree.tree_map_only(Tensor, lambda t: t * 2, nest)
    assert type(twice) is type(nest)
    assert all(torch.equal(t, ONE * 2) for t in named_tensors({"x": twice}).values())
    leaves, spec = pytree.tree_flatten(nest)
    again, other = pytree.tree_flatten(pytree.tree_unflatten(leaves, spec))
    assert spec == other and [id(x) for x in leaves] == [id(x) for x in again]
    whole = stack_outputs([nest, twice], [4, 4], [1, 1])
    assert all(t.shape == (8,) for t in named_tensors({"x": whole}).values())
    wide = named_tensors({"x": to_float64(nest)})  # a proof in float64 is one of all that is inside
    assert [t.dtype for t in wide.values()] == [torch.float64] * len(names)


def test_what_a_class_does_not_pass_on_stays() -> None:
    """A frozen dataclass keeps what init does not take, a dict with attributes keeps both."""
    twice = pytree.tree_map_only(Tensor, lambda t: t * 2, Frozen(ONE, "note"))
    assert (twice.note, twice.computed) == ("note", 3)
    kept = pytree.tree_map_only(Tensor, lambda t: t * 2, Kept(sample=ONE))
    assert torch.equal(kept.sample, ONE * 2) and kept.sample is kept["sample"]


def test_a_class_without_tensors_is_left_alone() -> None:
    """A configuration that is passed along stays the object that it is."""

    @dataclass
    class Config:
        width: int = 3

    config = Config()
    (leaf,) = pytree.tree_leaves(config)
    assert leaf is config


class Block(nn.Module):
    """Takes and returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, state: Frozen) -> Frozen:
        return Frozen(state.a + self.lin(state.a).tanh(), more={"depth": state.a.mean(-1)})


class Net(nn.Module):
    """Blocks that hand on dataclasses; its output holds one, in a mapping of its own class."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        state = Frozen(x)
        for block in self.blocks:
            state = block(state)
        return Kept(sample=state.a, other=SimpleNamespace(last=state))


def square(output: Any, batch: Any) -> Tensor:
    """A loss by attributes of the output."""
    found: Tensor = output.sample.square().mean() + output.other.last.more["depth"].square().mean()
    return found


def _batch(seed: int) -> dict[str, Tensor]:
    return {"x": torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))}


@pytest.mark.parametrize(
    ("rows", "mesh"),
    [
        ("zero(stage=3, over=dp)", "dp=2"),
        ('blocks  pipeline_split(over=pp)\npipeline(order="1F1B", micro=4)', "pp=2"),
    ],
)
def test_such_a_model_is_proven(pool: Pool, rows: str, mesh: str) -> None:
    """Dataclasses cross stages and gathered modules, and the output is whole and compared."""
    report = proven(pool, planned(Net(), rows, mesh), [_batch(1), _batch(2)], loss=square)
    names = {row.name for row in report.rows if row.kind == "outputs"}
    assert {"sample", "other.last.a", "other.last.more.depth"} <= names, names


class Layer(nn.Module):
    """Attention of the keys that it, or a layer before it, wrote into a dict of the model's."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(4, 4), nn.Linear(4, 4)
        self.key = nn.Linear(4, 4) if own else None

    def forward(self, x: Tensor, kept: dict[str, Any], seen: list[Tensor]) -> Tensor:
        if self.key is not None:
            kept["key"] = self.key(x)
        seen.append(self.query(x))
        weights = (sum(seen) @ kept["key"].transpose(1, 2)).softmax(-1)
        return x + self.out(weights @ kept["key"])


class Sharing(nn.Module):
    """Layers that share keys in a dict, as those of Gemma 3n do, and queries in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(k < 2) for k in range(4))

    def forward(self, x: Tensor) -> Tensor:
        kept: dict[str, Any] = {}
        seen: list[Tensor] = []
        for layer in self.layers:
            x = layer(x, kept, seen)
        return x.square().mean()


@pytest.mark.parametrize(
    "rows", ["zero(stage=3, over=dp)", "layers.* checkpoint()\nzero(stage=1, over=dp)"]
)
def test_what_layers_write_for_each_other_arrives(rows: str, threads: Threads) -> None:
    """Arguments are the containers that the model passes on, whatever runs its layers."""
    points = [{"x": torch.randn(4, 3 + k, 4, dtype=torch.float64)} for k in range(2)]
    proven(threads, planned(Sharing().double(), rows, "dp=2"), points)


def test_leaves_are_written_into_what_is_there() -> None:
    """Mappings, lists and dataclasses stay the same objects; what cannot be written into is new."""
    inner: Any = OrderedDict(a=1)
    items: Any = [1, (2, inner)]
    nest: Any = {"items": items, "frozen": Frozen(torch.zeros(1)), "named": Named(inner, 3)}
    changed = {
        "items": [5, (6, OrderedDict(a=7))],
        "frozen": Frozen(torch.ones(1)),
        "named": Named(OrderedDict(a=7), 8),
    }
    assert pytree.write_back(nest, changed) is nest
    assert nest["items"] is items and items[1][1] is inner and inner == {"a": 7}
    assert items[0] == 5 and items[1][0] == 6 and nest["frozen"] is changed["frozen"]
    assert nest["named"].a is inner and nest["named"].b == 8


@pytest.mark.parametrize("kind", NESTS)
def test_leaves_are_those_of_torch(kind: str) -> None:
    """However they are found: those of plain nests without torch's own walk."""
    plain = {"a": [ONE, (1, None, {"b": slice(2), "c": torch.float64})], "d": (), "e": ONE.shape}
    for nest in (plain, [plain, NESTS[kind][0]], NESTS[kind][0], None, 3, nn.Parameter(ONE)):
        leaves, wanted = pytree.tree_leaves(nest), _pytree.tree_leaves(nest)
        assert [id(one) for one in leaves] == [id(one) for one in wanted]
    assert pytree.tree_leaves([(1, 2)], lambda one: isinstance(one, tuple)) == [(1, 2)]


class Own(nn.Module):
    """A module that copies itself, and notes it."""

    def __deepcopy__(self, memo: Any) -> Any:
        made = Own()
        made.note = "mine"
        return made


class Stateful(nn.Module):
    """A module that leaves something out of its state."""

    def __getstate__(self) -> Any:
        return {k: v for k, v in super().__getstate__().items() if k != "secret"}


def drawn_module() -> nn.Module:
    """Modules with ties, modules of their own ways, shared tables, cycles, and what hooks hold."""
    inner = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), Own(), Stateful())
    made = nn.ModuleList([inner, inner[0], nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))])
    inner[3].secret, inner[3].shown = [1], 2
    made.table = made.other = {"a": inner[0].weight, "module": inner[1]}
    made.around, made.empty = [inner], []
    inner.empty = made.empty
    inner.holder = (made,)
    inner[0].register_forward_hook(inner[1].forward)
    return made


def form(value: Any, seen: dict[int, int]) -> Any:
    """Equal for values that are alike, down to which of them are one."""
    if id(value) in seen:
        return "again", seen[id(value)]
    kind = type(value).__name__
    if isinstance(value, (dict, list, tuple, nn.Module, Tensor)):
        seen[id(value)] = len(seen)
    if isinstance(value, Tensor):
        return kind, value.tolist(), value.requires_grad
    if isinstance(value, nn.Module):
        return kind, [(name, form(one, seen)) for name, one in vars(value).items()]
    if isinstance(value, dict):
        return kind, [(name, form(one, seen)) for name, one in value.items()]
    if isinstance(value, (list, tuple)):
        return kind, [form(one, seen) for one in value]
    if hasattr(value, "__self__"):
        return kind, form(value.__self__, seen)
    return value if isinstance(value, (int, float, str, set)) else kind


def test_a_copy_is_that_of_the_library() -> None:
    """Every attribute, tie and shared table, whichever way a module has itself copied."""
    module = drawn_module()
    made = deepcopy_module(module, {})
    wanted = copy.deepcopy(module)
    assert form(made, {}) == form(wanted, {}) != form(drawn_module(), {})
    assert not hasattr(made[0][3], "secret") and made[0][2].note == "mine"
    assert made[0].holder[0] is made and made[0].empty is made.empty is not module.empty
    stood = nn.Linear(3, 3)
    assert deepcopy_module(module, {id(module[1]): stood})[0][0] is stood
