"""The two halves of a backward: gradients of the inputs of a stage first, of its weights later."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from schedlang.runtime.storage.offloaded_gradients import run_hooks
from schedlang.runtime.submodules import remove_hooks_after


class SplitBackward:
    """One backward in two halves (Qi et al., Zero Bubble, 2401.10241).

    `roots` are tensors or gradient edges, `grads` their gradients, `leaves` the inputs of the
    stage. `backward_inputs()` computes only the gradients of the inputs, and stores the gradients
    that arrive at each branch: a node on the way to an input, from which a weight is reached too.
    `backward_weights()` continues from the branches to the weights alone. A weight below several
    branches is done in the first half, because a pass from the upper branch would run through the
    lower. Without inputs, the first half does nothing and the second is the full backward. Weights
    for which `waits` returns False are done in the first half too.
    """

    def __init__(
        self,
        roots: Sequence[Any],
        grads: Sequence[Any],
        leaves: Sequence[torch.Tensor],
        waits: Callable[[torch.Tensor], bool] = lambda weight: True,
    ) -> None:
        self.roots, self.grads, self.leaves = list(roots), list(grads), list(leaves)
        self.waits = waits
        self._later: list[tuple[list[Any], list[torch.Tensor], list[torch.Tensor]]] = []

    def backward_inputs(self) -> list[torch.Tensor | None]:
        """Return the gradients of the leaves; None where the roots do not depend on a leaf."""
        if not self.leaves or not self.roots:
            return [None] * len(self.leaves)
        starts = [_node(root) for root in self.roots]
        graph = _Graph(starts, {get_gradient_edge(leaf).node for leaf in self.leaves})
        branches = graph.branches()
        loose = [k for k, start in enumerate(starts) if start not in graph.to_ends]
        branch_weights = [*branches.values(), *(graph.weights([starts[k]]) for k in loose)]
        count = Counter(weight for weights in branch_weights for weight in weights)
        early = [w for w, times in count.items() if times > 1 or not self.waits(_variable(w))]
        early_set = set(early)
        late = [[w for w in weights if w not in early_set] for weights in branch_weights]
        stored: dict[Node, tuple[Any, ...]] = {}
        grad_inputs = [*self.leaves, *(_variable(weight) for weight in early)]
        with remove_hooks_after(_store_gradients(node, stored) for node in branches):
            gradients = torch.autograd.grad(
                self.roots, grad_inputs, self.grads, retain_graph=True, allow_unused=True
            )
        for weight, grad in zip(grad_inputs[len(self.leaves) :], gradients[len(self.leaves) :]):
            _accumulate(weight, grad)
        for node, weights in zip(branches, late):
            arrived = [(k, g) for k, g in enumerate(stored.get(node, ())) if g is not None]
            edges = [GradientEdge(node, k) for k, _ in arrived]
            self._defer(edges, [g for _, g in arrived], weights)
        for k, weights in zip(loose, late[len(branches) :]):
            self._defer([self.roots[k]], [self.grads[k]], weights)
        self.roots, self.grads = [], []
        return list(gradients[: len(self.leaves)])

    def backward_weights(self) -> None:
        """Add the gradients of the weights to their `.grad`, and free the graph."""
        if self.roots:
            torch.autograd.backward(self.roots, self.grads)
        for edges, grads, weights in self._later:
            torch.autograd.backward(edges, grads, inputs=weights)
        self._later, self.roots, self.grads = [], [], []

    def _defer(self, edges: list[Any], grads: list[torch.Tensor], weights: list[Node]) -> None:
        if edges and weights:
            self._later.append((edges, grads, [_variable(w) for w in weights]))


class _Graph:
    """The autograd graph below some nodes; `to_ends` are the nodes from which an end is reached."""

    def __init__(self, starts: Sequence[Node], ends: set[Node]) -> None:
        self.onward: dict[Node, list[Node]] = {}
        predecessors: dict[Node, list[Node]] = {}
        stack = list(starts)
        while stack:
            node = stack.pop()
            if node in self.onward:
                continue
            self.onward[node] = [n for n, _ in node.next_functions if n is not None]
            for successor in self.onward[node]:
                predecessors.setdefault(successor, []).append(node)
            stack.extend(self.onward[node])
        self.to_ends: set[Node] = set()
        stack = [end for end in ends if end in self.onward]
        while stack:
            node = stack.pop()
            if node not in self.to_ends:
                self.to_ends.add(node)
                stack.extend(predecessors.get(node, ()))

    def branches(self) -> dict[Node, list[Node]]:
        """Return the nodes on the way to an end, with the weights below their other inputs."""
        branches = {}
        for node in self.onward:
            if node in self.to_ends:
                weights = self.weights(n for n in self.onward[node] if n not in self.to_ends)
                if weights:
                    branches[node] = weights
        return branches

    def weights(self, nodes: Iterable[Node]) -> list[Node]:
        """Return the leaves below some nodes."""
        visited: dict[Node, None] = {}
        stack = list(nodes)
        while stack:
            node = stack.pop()
            if node not in visited:
                visited[node] = None
                stack.extend(self.onward[node])
        return [node for node in visited if hasattr(node, "variable")]


def _node(root: Any) -> Node:
    node: Node = root.node if isinstance(root, GradientEdge) else get_gradient_edge(root).node
    return node


def _store_gradients(node: Node, stored: dict[Node, tuple[Any, ...]]) -> Any:
    def hook(grads: tuple[Any, ...]) -> None:
        stored[node] = grads

    return node.register_prehook(hook)


def _variable(node: Any) -> torch.Tensor:
    variable: torch.Tensor = node.variable
    return variable


def _accumulate(weight: torch.Tensor, grad: torch.Tensor | None) -> None:
    if grad is not None:
        weight.grad = grad if weight.grad is None else weight.grad + grad
        run_hooks(weight)
