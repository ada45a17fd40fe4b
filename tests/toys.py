"""A small tree of modules without torch, and toy primitives for tests of the language."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Kind:
    """A parameter's element type."""

    dtype: str


@dataclass
class Node:
    """One module: its classes, attributes, children and number of own parameters."""

    classes: tuple[str, ...]
    children: Mapping[str, "Node"] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    own: int = 0


class Forest:
    """A selector's Tree made of Nodes."""

    def __init__(self, root: Node) -> None:
        self.root = root

    def at(self, fqn: str) -> Node:
        node = self.root
        for name in fqn.split(".") if fqn else ():
            node = node.children[name]
        return node

    def children(self, fqn: str) -> Sequence[str]:
        return list(self.at(fqn).children)

    def class_names(self, fqn: str) -> tuple[str, ...]:
        return self.at(fqn).classes

    def attribute(self, fqn: str, name: str) -> object:
        try:
            return self.at(fqn).data[name]
        except KeyError:
            raise AttributeError(name) from None

    def attributes(self, fqn: str) -> list[str]:
        return list(self.at(fqn).data)

    def numel(self, fqn: str) -> int:
        node = self.at(fqn)
        children_sizes = (self.numel(f"{fqn}.{c}" if fqn else c) for c in node.children)
        return node.own + sum(children_sizes)

    def parameters_below(self, fqn: str) -> Sequence[Kind]:
        return [Kind("float32")]


class Config:
    """A model's configuration: data, a property and a method."""

    def __init__(self) -> None:
        self.n_layer, self.n_head, self.sizes, self.nested = 4, 12, [1, 2], self
        self._secret = 1

    @property
    def computed(self) -> int:
        raise AssertionError("a schedule ran code")

    def method(self) -> int:
        raise AssertionError("a schedule ran code")


def linear_node(inputs: int, outputs: int, name: str = "Conv1D") -> Node:
    data = {"nx": inputs, "nf": outputs}
    return Node((name, "Projection"), {}, data, inputs * outputs)


def block_node(index: int) -> Node:
    attn = Node(("Attention",), {"c_attn": linear_node(8, 24), "c_proj": linear_node(8, 8)})
    mlp = {"c_fc": linear_node(8, 32), "c_proj": linear_node(32, 8)}
    extra = {"gate": Node(("Gate",))} if index == 3 else {}
    children = {"ln_1": Node(("LayerNorm",)), "attn": attn, "mlp": Node(("MLP",), {**mlp, **extra})}
    return Node(("Block",), children, {"place": index})


def gpt_tree(layers: int = 4) -> Forest:
    """A tree with GPT-2's names."""
    h = Node(("ModuleList",), {str(i): block_node(i) for i in range(layers)})
    transformer = Node(("GPT2Model",), {"wte": Node(("Embedding",), own=80), "h": h})
    head = linear_node(8, 10, "Linear")
    data = {"config": Config()}
    return Forest(Node(("GPT2LMHeadModel",), {"transformer": transformer, "lm_head": head}, data))
