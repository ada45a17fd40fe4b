"""Nested containers of any class: flattened, rebuilt, stacked, copied."""

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
from tests.proofs import assert_proven, make_plan


@dataclass(frozen=True)
class FrozenData:
    a: Tensor
    note: str = "x"
    more: Any = None
    computed: int = field(default=3, init=False)


@dataclass
class OutputDict(OrderedDict):  # type: ignore[type-arg]
    """A dict that is a dataclass, as diffusers' outputs are, registered without key paths."""

    sample: Any = None
    other: Any = None

    def __post_init__(self) -> None:
        for name in ("sample", "other"):
            if getattr(self, name) is not None:
                self[name] = getattr(self, name)


_pytree.register_pytree_node(
    OutputDict, _pytree._dict_flatten, lambda v, c: OutputDict(**_pytree._dict_unflatten(v, c))
)


class OrderedSubclass(OrderedDict):  # type: ignore[type-arg]
    pass


class UserDictSubclass(UserDict):  # type: ignore[type-arg]
    pass


class NamedPair(NamedTuple):
    a: Any
    b: Any


class AttrsLike:
    """A class as attrs makes it, as far as can be seen from outside."""

    __attrs_attrs__ = (SimpleNamespace(name="a"), SimpleNamespace(name="b"))

    def __init__(self, a: Any, b: Any) -> None:
        self.a, self.b = a, b


TENSOR = torch.arange(4.0)
CONTAINERS = {
    "dataclass": (FrozenData(TENSOR, more=[TENSOR]), ["a", "more.0"]),
    "registered without names": (OutputDict(sample=TENSOR), ["sample"]),
    "ordered": (OrderedSubclass(a=TENSOR, b={"c": TENSOR}), ["a", "b.c"]),
    "user dict": (UserDictSubclass(a=TENSOR), ["a"]),
    "named tuple": (NamedPair(TENSOR, (1, TENSOR)), ["a", "b.1"]),
    "attrs": (AttrsLike(TENSOR, "s"), ["a"]),
    "namespace": (SimpleNamespace(a=TENSOR, b=FrozenData(TENSOR)), ["a", "b.a"]),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_nest_of_any_class(kind: str) -> None:
    """Its tensors have names; a rebuilt container has its class and the same contents."""
    nest, names = CONTAINERS[kind]
    assert list(named_tensors({"x": nest})) == [f"x.{name}" for name in names]
    doubled = pytree.tree_map_only(Tensor, lambda t: t * 2, nest)
    assert type(doubled) is type(nest)
    assert all(torch.equal(t, TENSOR * 2) for t in named_tensors({"x": doubled}).values())
    leaves, spec = pytree.tree_flatten(nest)
    leaves_again, other_spec = pytree.tree_flatten(pytree.tree_unflatten(leaves, spec))
    assert spec == other_spec and [id(x) for x in leaves] == [id(x) for x in leaves_again]
    stacked = stack_outputs([nest, doubled], [4, 4], [1, 1])
    assert all(t.shape == (8,) for t in named_tensors({"x": stacked}).values())
    in_float64 = named_tensors(
        {"x": to_float64(nest)}
    )  # a float64 proof converts all tensors inside
    assert [t.dtype for t in in_float64.values()] == [torch.float64] * len(names)


def test_what_a_class_does_not_pass_on_stays() -> None:
    """A frozen dataclass keeps fields outside of init; a dict with attributes keeps both."""
    doubled = pytree.tree_map_only(Tensor, lambda t: t * 2, FrozenData(TENSOR, "note"))
    assert (doubled.note, doubled.computed) == ("note", 3)
    output = pytree.tree_map_only(Tensor, lambda t: t * 2, OutputDict(sample=TENSOR))
    assert torch.equal(output.sample, TENSOR * 2) and output.sample is output["sample"]


def test_a_class_without_tensors_is_left_alone() -> None:
    """A configuration stays the same object."""

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

    def forward(self, state: FrozenData) -> FrozenData:
        return FrozenData(state.a + self.lin(state.a).tanh(), more={"depth": state.a.mean(-1)})


class Net(nn.Module):
    """Blocks that pass on dataclasses; its output contains one, in a mapping of its own class."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        state = FrozenData(x)
        for block in self.blocks:
            state = block(state)
        return OutputDict(sample=state.a, other=SimpleNamespace(last=state))


def square(output: Any, batch: Any) -> Tensor:
    """Return a loss that reads attributes of the output."""
    loss: Tensor = output.sample.square().mean() + output.other.last.more["depth"].square().mean()
    return loss


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
    """Dataclasses cross stages and gathered modules, and the output is complete and compared."""
    report = assert_proven(pool, make_plan(Net(), rows, mesh), [_batch(1), _batch(2)], loss=square)
    names = {row.name for row in report.rows if row.kind == "outputs"}
    assert {"sample", "other.last.a", "other.last.more.depth"} <= names, names


class Layer(nn.Module):
    """Attention to keys that it, or an earlier layer, wrote into a shared dict."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(4, 4), nn.Linear(4, 4)
        self.key = nn.Linear(4, 4) if own else None

    def forward(self, x: Tensor, shared: dict[str, Any], queries: list[Tensor]) -> Tensor:
        if self.key is not None:
            shared["key"] = self.key(x)
        queries.append(self.query(x))
        weights = (sum(queries) @ shared["key"].transpose(1, 2)).softmax(-1)
        return x + self.out(weights @ shared["key"])


class SharedKeys(nn.Module):
    """Layers that share keys in a dict, as those of Gemma 3n, and queries in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(k < 2) for k in range(4))

    def forward(self, x: Tensor) -> Tensor:
        shared: dict[str, Any] = {}
        queries: list[Tensor] = []
        for layer in self.layers:
            x = layer(x, shared, queries)
        return x.square().mean()


@pytest.mark.parametrize(
    "rows", ["zero(stage=3, over=dp)", "layers.* checkpoint()\nzero(stage=1, over=dp)"]
)
def test_what_layers_write_for_each_other_arrives(rows: str, threads: Threads) -> None:
    """Layers receive the containers that the model passes, whatever runs them."""
    points = [{"x": torch.randn(4, 3 + k, 4, dtype=torch.float64)} for k in range(2)]
    assert_proven(threads, make_plan(SharedKeys().double(), rows, "dp=2"), points)


def test_leaves_are_written_into_what_is_there() -> None:
    """Mappings, lists and dataclasses stay the same objects; immutable ones are new."""
    inner: Any = OrderedDict(a=1)
    items: Any = [1, (2, inner)]
    nest: Any = {"items": items, "frozen": FrozenData(torch.zeros(1)), "named": NamedPair(inner, 3)}
    changed = {
        "items": [5, (6, OrderedDict(a=7))],
        "frozen": FrozenData(torch.ones(1)),
        "named": NamedPair(OrderedDict(a=7), 8),
    }
    assert pytree.write_back(nest, changed) is nest
    assert nest["items"] is items and items[1][1] is inner and inner == {"a": 7}
    assert items[0] == 5 and items[1][0] == 6 and nest["frozen"] is changed["frozen"]
    assert nest["named"].a is inner and nest["named"].b == 8


@pytest.mark.parametrize("kind", CONTAINERS)
def test_leaves_are_those_of_torch(kind: str) -> None:
    """The leaves equal those of torch's own walk, in the same order."""
    nested = {
        "a": [TENSOR, (1, None, {"b": slice(2), "c": torch.float64})],
        "d": (),
        "e": TENSOR.shape,
    }
    for nest in (
        nested,
        [nested, CONTAINERS[kind][0]],
        CONTAINERS[kind][0],
        None,
        3,
        nn.Parameter(TENSOR),
    ):
        leaves, expected = pytree.tree_leaves(nest), _pytree.tree_leaves(nest)
        assert [id(leaf) for leaf in leaves] == [id(leaf) for leaf in expected]
    assert pytree.tree_leaves([(1, 2)], lambda leaf: isinstance(leaf, tuple)) == [(1, 2)]


class SelfCopying(nn.Module):
    """A module that copies itself, and records it."""

    def __deepcopy__(self, memo: Any) -> Any:
        copied = SelfCopying()
        copied.note = "mine"
        return copied


class PartialState(nn.Module):
    """A module that leaves something out of its state."""

    def __getstate__(self) -> Any:
        return {k: v for k, v in super().__getstate__().items() if k != "secret"}


def varied_module() -> nn.Module:
    """Return modules with ties, custom copies, shared tables, cycles, and references in hooks."""
    inner = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), SelfCopying(), PartialState())
    modules = nn.ModuleList(
        [inner, inner[0], nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))]
    )
    inner[3].secret, inner[3].shown = [1], 2
    modules.table = modules.other = {"a": inner[0].weight, "module": inner[1]}
    modules.around, modules.empty = [inner], []
    inner.empty = modules.empty
    inner.holder = (modules,)
    inner[0].register_forward_hook(inner[1].forward)
    return modules


def structure_of(value: Any, visited: dict[int, int]) -> Any:
    """Return a structure that is equal for equal values, including which of them are the same
    object."""
    if id(value) in visited:
        return "again", visited[id(value)]
    kind = type(value).__name__
    if isinstance(value, (dict, list, tuple, nn.Module, Tensor)):
        visited[id(value)] = len(visited)
    if isinstance(value, Tensor):
        return kind, value.tolist(), value.requires_grad
    if isinstance(value, nn.Module):
        return kind, [(name, structure_of(item, visited)) for name, item in vars(value).items()]
    if isinstance(value, dict):
        return kind, [(name, structure_of(item, visited)) for name, item in value.items()]
    if isinstance(value, (list, tuple)):
        return kind, [structure_of(item, visited) for item in value]
    if hasattr(value, "__self__"):
        return kind, structure_of(value.__self__, visited)
    return value if isinstance(value, (int, float, str, set)) else kind


def test_a_copy_is_that_of_the_library() -> None:
    """Every attribute, tie and shared table is copied as `copy.deepcopy` does."""
    module = varied_module()
    copied = deepcopy_module(module, {})
    expected = copy.deepcopy(module)
    assert (
        structure_of(copied, {}) == structure_of(expected, {}) != structure_of(varied_module(), {})
    )
    assert not hasattr(copied[0][3], "secret") and copied[0][2].note == "mine"
    assert copied[0].holder[0] is copied and copied[0].empty is copied.empty is not module.empty
    stood = nn.Linear(3, 3)
    assert deepcopy_module(module, {id(module[1]): stood})[0][0] is stood
