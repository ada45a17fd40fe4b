"""The model as a tree: what is folded, what is not, and what is said of parameters."""

from __future__ import annotations

from torch import nn

from schedlang.ir.model import ModelFacts
from schedlang.viz.tree import Node, format_tree, tree
from tests.models import gpt2


def nodes(node: Node) -> list[Node]:
    return [node, *(found for child in node.children for found in nodes(child))]


def test_repeated_blocks_are_one() -> None:
    """Equal blocks are one node, with the path of the first and the number of them."""
    root = tree(ModelFacts(gpt2()))
    block = next(node for node in nodes(root) if node.class_name == "GPT2Block")
    assert (block.name, block.path, block.count) == ("h.0..3", "transformer.h.0", 4)
    each = nodes(tree(ModelFacts(gpt2()), each=True))
    assert sum(node.class_name == "GPT2Block" for node in each) == 4


def test_blocks_that_differ_stay_apart() -> None:
    """A block of another size, and one with another note, are nodes of their own."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    model[2] = nn.Linear(4, 4, bias=False)
    names = [child.name for child in tree(ModelFacts(model)).children]
    assert names == ["0..1", "2", "3..4"]
    noted = tree(ModelFacts(model), note=lambda fqn: fqn == "4")
    assert [child.name for child in noted.children] == ["0..1", "2", "3", "4"]


def test_text_names_dims_and_ties() -> None:
    """Dims are named by class, a tied weight names the one it is, frozen ones say so."""
    model = gpt2()
    model.transformer.wpe.weight.requires_grad_(False)
    said = format_tree(tree(ModelFacts(model)))
    assert "weight f64[vocab 61, hidden 16]" in said
    assert "weight f64[out 61, in 16] = transformer.wte.weight" in said
    assert "weight f64[vocab 16, hidden 16] frozen" in said
    assert "GPT2Block x4" in said


def test_json_is_the_tree() -> None:
    """The JSON value has every node, and every parameter's shape."""
    root = tree(ModelFacts(gpt2()))
    value = root.to_json()
    assert value["class"] == "GPT2LMHeadModel"
    head = value["children"][1]["tensors"][0]
    assert (head["shape"], head["dims"], head["tied"]) == (
        [61, 16],
        ["out", "in"],
        "transformer.wte.weight",
    )
