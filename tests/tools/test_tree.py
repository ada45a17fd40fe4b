"""The tree of a model's modules: folded blocks, dims, ties, JSON."""

from __future__ import annotations

from torch import nn

from schedlang.ir.model import ModelFacts
from schedlang.viz.tree import Node, format_tree, tree
from tests.models import gpt2


def all_nodes(node: Node) -> list[Node]:
    """A node and all nodes below it."""
    return [node, *(descendant for child in node.children for descendant in all_nodes(child))]


def test_repeated_blocks_are_one() -> None:
    """Equal blocks are one node, with the path of the first and their number."""
    root = tree(ModelFacts(gpt2()))
    block = next(node for node in all_nodes(root) if node.class_name == "GPT2Block")
    assert (block.name, block.path, block.count) == ("h.0..3", "transformer.h.0", 4)
    unfolded = all_nodes(tree(ModelFacts(gpt2()), each=True))
    assert sum(node.class_name == "GPT2Block" for node in unfolded) == 4


def test_blocks_that_differ_stay_apart() -> None:
    """A block of another size, or with another note, has its own node."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    model[2] = nn.Linear(4, 4, bias=False)
    names = [child.name for child in tree(ModelFacts(model)).children]
    assert names == ["0..1", "2", "3..4"]
    noted = tree(ModelFacts(model), note=lambda fqn: fqn == "4")
    assert [child.name for child in noted.children] == ["0..1", "2", "3", "4"]


def test_text_names_dims_and_ties() -> None:
    """Dims are named by class; a tied weight names the other; frozen ones are marked."""
    model = gpt2()
    model.transformer.wpe.weight.requires_grad_(False)
    text = format_tree(tree(ModelFacts(model)))
    assert "weight f64[vocab 61, hidden 16]" in text
    assert "weight f64[out 61, in 16] = transformer.wte.weight" in text
    assert "weight f64[vocab 16, hidden 16] frozen" in text
    assert "GPT2Block x4" in text


def test_json_is_the_tree() -> None:
    """The JSON has every node, and every parameter's shape."""
    root = tree(ModelFacts(gpt2()))
    value = root.to_json()
    assert value["class"] == "GPT2LMHeadModel"
    head = value["children"][1]["tensors"][0]
    assert (head["shape"], head["dims"], head["tied"]) == (
        [61, 16],
        ["out", "in"],
        "transformer.wte.weight",
    )
