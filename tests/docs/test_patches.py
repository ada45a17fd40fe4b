"""Foreign libraries are changed in schedlang/runtime/adapters alone; what threads hold is known."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from schedlang.runtime.adapters import torch_distributed, torch_tensor
from tests.docs.test_docs import ROOT
from tests.figures import nodes

LIBRARIES = ("torch", "transformers", "diffusers", "peft", "timm", "torch_geometric", "triton")
ADAPTERS = "schedlang/runtime/adapters/"
# Triton's interpreter is a tool of tests, below the runtime: kernels import nothing of it
APART = {"schedlang/kernels/interpreter.py"}
FOLDERS = ("schedlang", "passes", "primitives")


Nodes = tuple[ast.AST, ...]


def sources() -> Iterator[tuple[str, Nodes]]:
    """The nodes of the library's files, by their paths."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield str(path.relative_to(ROOT)), nodes(path)


class Foreign:
    """The names of a file that stand for modules, classes and functions of other libraries."""

    def __init__(self, nodes: Nodes) -> None:
        self.names: set[str] = set()
        for node in nodes:
            if isinstance(node, ast.Import):
                found = [a for a in node.names if a.name.split(".")[0] in LIBRARIES]
                self.names |= {a.asname or a.name.split(".")[0] for a in found}
            elif isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in LIBRARIES:
                self.names |= {alias.asname or alias.name for alias in node.names}
        known = -1
        while known != len(self.names):  # names that are given to what other names stand for
            known = len(self.names)
            for node in nodes:
                for target, value in _assigned(node):
                    if isinstance(target, ast.Name) and self.is_one(value):
                        self.names.add(target.id)

    def is_one(self, value: ast.expr | None) -> bool:
        """Is this something of another library, not what it made?"""
        if isinstance(value, ast.Name):
            return value.id in self.names
        if isinstance(value, ast.Attribute | ast.Subscript):
            return self.is_one(value.value)
        looked = isinstance(value, ast.Call) and _is_named(value.func, "vars", "getattr")
        return looked and self.is_one(value.args[0])  # type: ignore[union-attr]


def _is_named(function: ast.expr, *names: str) -> bool:
    return isinstance(function, ast.Name) and function.id in names


def _assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """What a statement gives a value, and the value."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                yield from zip(target.elts, node.value.elts)
            else:
                yield target, node.value
    elif isinstance(node, ast.AnnAssign | ast.AugAssign):
        yield node.target, node.value
    elif isinstance(node, ast.Delete):
        yield from ((target, None) for target in node.targets)


def patches(nodes: Nodes) -> list[int]:
    """The lines that put something else in the place of what another library has."""
    foreign, found = Foreign(nodes), set()
    for node in nodes:
        for target, _ in _assigned(node):
            inside = isinstance(target, ast.Attribute | ast.Subscript)
            if inside and foreign.is_one(target.value):  # type: ignore[union-attr]
                found.add(node.lineno)  # type: ignore[attr-defined]
        sets = isinstance(node, ast.Call) and _is_named(node.func, "setattr", "delattr")
        if sets and foreign.is_one(node.args[0]):  # type: ignore[attr-defined]
            found.add(node.lineno)  # type: ignore[attr-defined]
    return sorted(found)


@pytest.mark.parametrize(
    "line",
    [
        "torch.add = len",
        "torch.nn.Linear.forward = len",
        "del torch.add",
        "F.relu, other = len, len",
        "setattr(dist, name, len)",
        "owner: object = torch.Tensor\nowner.add_ = len",
        "names = vars(dist)\nnames['send'] = len",
        "def f():\n    from transformers import GPT2Model as Net\n    Net.forward = len",
    ],
)
def test_patches_are_seen(line: str) -> None:
    """Each way to change what another library has."""
    imports = (
        "import torch\nimport torch.distributed as dist\nfrom torch.nn import functional as F\n"
    )
    assert patches(tuple(ast.walk(ast.parse(imports + line)))), line
    plain = "x = torch.ones(2)\nx.grad = None\nx[0] = 1\nself.add = torch.add\n"
    assert not patches(tuple(ast.walk(ast.parse(imports + plain))))


def test_only_adapters_patch() -> None:
    """No other file changes a foreign library, and each adapter is one that does, or touches what
    is private there."""
    found = {path: lines for path, every in sources() if (lines := patches(every))}
    assert {path for path in found if not path.startswith(ADAPTERS)} == APART, found
    there = {f"{ADAPTERS}{p.name}" for p in Path(ROOT / ADAPTERS).glob("[!_]*.py")}
    assert there == set(found) - APART


# What a thread holds by itself, and why that cannot be handed on as an argument: between the two
# stands code of the model, or of torch.
HELD = {
    "runtime/scope.py: _Here": "model code between a step and the draws of its modules",
    "runtime/modes.py: _Active": "torch's stack of modes tells nothing inside of what a mode runs",
    "runtime/mixed_precision.py: _Autocasts": "modes on the meta device: never in a step",
    "runtime/rng/native_dropout.py: _Here": "of one NativeDropout: which call of a module draws",
    "runtime/storage/saved_tensors_slot.py: _Policies": "saved-tensor hooks do not know each other",
    "runtime/storage/tiers.py: _CreationTier": "dispatch modes that count, in tests and reports",
    "runtime/activation_memory/quantized.py: _near_ties": "a proof's notes: never in a step",
    "runtime/offload/offloaded_activations.py: _all_sizes": "a proof's builds: never in a step",
    "runtime/comm/world.py: _by_thread": "the thread of a save in the background: never in a step",
    "runtime/launch/rank_job.py: _limit": "a time that a command has: never in a step",
    "runtime/user_loops.py: _Forwards": "torch numbers nodes by thread, in a loop of the user's",
    "runtime/launch/pool.py: _threads": "of a proof, which starts ranks: never in a step",
}


def test_what_threads_hold_is_known() -> None:
    """Every thread-local and context variable of the runtime has its reason, and stands here."""
    found = set()
    for path, every in sources():
        if path.startswith("schedlang/runtime/"):
            short = path.removeprefix("schedlang/")
            for node in every:
                bases = node.bases if isinstance(node, ast.ClassDef) else ()
                if "threading.local" in map(ast.unparse, bases):
                    found.add(f"{short}: {node.name}")  # type: ignore[attr-defined]
                for target, value in _assigned(node):
                    made = value.func if isinstance(value, ast.Call) else None
                    if made is not None and ast.unparse(made) in ("ContextVar", "threading.local"):
                        found.add(f"{short}: {ast.unparse(target)}")
    assert found == HELD.keys()


# -- the adapters ----------------------------------------------------------------------------------


def test_functions_of_torch_distributed_come_back() -> None:
    """They are others inside, and torch's own afterwards, also where something was raised."""
    plain = dist.send
    with pytest.raises(ZeroDivisionError), torch_distributed.replace_functions({"send": len}):
        assert dist.send is len
        raise ZeroDivisionError
    assert dist.send is plain
    world = dist.distributed_c10d._world
    before = world.group_count
    torch_distributed.count_groups(3)
    assert world.group_count == before + 3
    world.group_count = before


def test_resizes_of_storages_are_heard() -> None:
    """After each, with its storage and bytes, as long as somebody listens."""
    storage, heard = torch.ones(4).untyped_storage(), list[tuple[int, int]]()
    with torch_tensor.listen_to_resizes(lambda one, size: heard.append((size, one.nbytes()))):
        storage.resize_(0)
        storage.resize_(8)
    storage.resize_(0)
    assert heard == [(0, 0), (8, 8)]


def test_backward_from_roots_that_fit() -> None:
    """Its gradients are torch's; where a mode listens it is torch's own that runs."""
    heard = []

    class Heard(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            heard.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.ones(3, requires_grad=True)
    for mode in (contextlib.nullcontext(), Heard()):
        roots = [torch.autograd.graph.get_gradient_edge(x * 2), (x * 3).sum()]
        grads, x.grad = [torch.arange(3.0), torch.tensor(2.0)], None
        with mode:
            torch_tensor.run_backward(roots, grads)
        assert x.grad is not None and x.grad.tolist() == [6.0, 8.0, 10.0]
    assert torch.autograd.backward in heard


def test_data_of_other_tensors_can_be_put(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is asked for by another way, and by torch's everywhere else."""
    monkeypatch.setattr(torch.Tensor, "data", torch.Tensor.data, raising=False)
    alike = torch._has_compatible_shallow_copy_type
    monkeypatch.setattr(torch, "_has_compatible_shallow_copy_type", alike)
    put: list[float] = []
    torch_tensor.patch_data_assignment(
        lambda a, b: b.dtype == torch.int8, lambda a, b: put.append(b.item())
    )
    x = torch.zeros(1)
    x.data = torch.ones(1)
    assert x.item() == 1 and not put
    x.data = torch.tensor([5], dtype=torch.int8)
    assert x.item() == 1 and put == [5]
    assert torch._has_compatible_shallow_copy_type(x, torch.ones(1, dtype=torch.int8))
