"""Only schedlang/runtime/adapters patches other libraries; thread-locals are listed."""

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
from tests.docs.test_page_contents import ROOT
from tests.figures import nodes

LIBRARIES = ("torch", "transformers", "diffusers", "peft", "timm", "torch_geometric", "triton")
ADAPTERS = "schedlang/runtime/adapters/"
# Triton's interpreter is only used by tests; kernels must not import the runtime
EXCEPTIONS = {"schedlang/kernels/interpreter.py"}
FOLDERS = ("schedlang", "passes", "primitives")


Nodes = tuple[ast.AST, ...]


def source_nodes() -> Iterator[tuple[str, Nodes]]:
    """The nodes of the library's files, by their paths."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield str(path.relative_to(ROOT)), nodes(path)


class LibraryNames:
    """The names in a file that are modules, classes or functions of other libraries."""

    def __init__(self, nodes: Nodes) -> None:
        self.names: set[str] = set()
        for node in nodes:
            if isinstance(node, ast.Import):
                imported = [a for a in node.names if a.name.split(".")[0] in LIBRARIES]
                self.names |= {a.asname or a.name.split(".")[0] for a in imported}
            elif isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in LIBRARIES:
                self.names |= {alias.asname or alias.name for alias in node.names}
        known_count = -1
        while known_count != len(self.names):  # names that are given to what other names stand for
            known_count = len(self.names)
            for node in nodes:
                for target, value in _assignments(node):
                    if isinstance(target, ast.Name) and self.is_one(value):
                        self.names.add(target.id)

    def is_one(self, value: ast.expr | None) -> bool:
        """Whether an expression is an object of another library, not one made by it."""
        if isinstance(value, ast.Name):
            return value.id in self.names
        if isinstance(value, ast.Attribute | ast.Subscript):
            return self.is_one(value.value)
        looks_up = isinstance(value, ast.Call) and _is_named(value.func, "vars", "getattr")
        return looks_up and self.is_one(value.args[0])  # type: ignore[union-attr]


def _is_named(function: ast.expr, *names: str) -> bool:
    return isinstance(function, ast.Name) and function.id in names


def _assignments(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """Yield each target of a statement with the value that it gets."""
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


def patched_lines(nodes: Nodes) -> list[int]:
    """The lines that assign to an attribute or item of another library."""
    library_names, lines = LibraryNames(nodes), set()
    for node in nodes:
        for target, _ in _assignments(node):
            is_member = isinstance(target, ast.Attribute | ast.Subscript)
            if is_member and library_names.is_one(target.value):  # type: ignore[union-attr]
                lines.add(node.lineno)  # type: ignore[attr-defined]
        sets_attribute = isinstance(node, ast.Call) and _is_named(node.func, "setattr", "delattr")
        if sets_attribute and library_names.is_one(node.args[0]):  # type: ignore[attr-defined]
            lines.add(node.lineno)  # type: ignore[attr-defined]
    return sorted(lines)


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
    """Each form of patching is found, and ordinary assignments are not."""
    imports = (
        "import torch\nimport torch.distributed as dist\nfrom torch.nn import functional as F\n"
    )
    assert patched_lines(tuple(ast.walk(ast.parse(imports + line)))), line
    allowed = "x = torch.ones(2)\nx.grad = None\nx[0] = 1\nself.add = torch.add\n"
    assert not patched_lines(tuple(ast.walk(ast.parse(imports + allowed))))


def test_only_adapters_patch() -> None:
    """Only adapters patch other libraries or use their private names, and each adapter does."""
    patched = {
        path: lines for path, all_nodes in source_nodes() if (lines := patched_lines(all_nodes))
    }
    assert {path for path in patched if not path.startswith(ADAPTERS)} == EXCEPTIONS, patched
    adapters = {f"{ADAPTERS}{p.name}" for p in Path(ROOT / ADAPTERS).glob("[!_]*.py")}
    assert adapters == set(patched) - EXCEPTIONS


# Thread-local state, and why it cannot be passed as an argument: code of the model or of torch is
# called in between.
THREAD_STATE = {
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
    "runtime/loop_terms.py: _Forwards": "torch numbers nodes by thread, in a loop of the user's",
    "runtime/launch/pool.py: _threads": "of a proof, which starts ranks: never in a step",
    "runtime/adapters/torch_checkpoint.py: _Forward": "forwards of a trial: never in a step",
}


def test_what_threads_hold_is_known() -> None:
    """Every thread-local and context variable of the runtime is listed with its reason."""
    holders = set()
    for path, all_nodes in source_nodes():
        if path.startswith("schedlang/runtime/"):
            name = path.removeprefix("schedlang/")
            for node in all_nodes:
                bases = node.bases if isinstance(node, ast.ClassDef) else ()
                if "threading.local" in map(ast.unparse, bases):
                    holders.add(f"{name}: {node.name}")  # type: ignore[attr-defined]
                for target, value in _assignments(node):
                    constructor = value.func if isinstance(value, ast.Call) else None
                    if constructor is not None and ast.unparse(constructor) in (
                        "ContextVar",
                        "threading.local",
                    ):
                        holders.add(f"{name}: {ast.unparse(target)}")
    assert holders == THREAD_STATE.keys()


# -- the adapters ----------------------------------------------------------------------------------


def test_functions_of_torch_distributed_come_back() -> None:
    """Replaced functions of torch.distributed are restored, after an exception too."""
    original = dist.send
    with pytest.raises(ZeroDivisionError), torch_distributed.replace_functions({"send": len}):
        assert dist.send is len
        raise ZeroDivisionError
    assert dist.send is original
    world = dist.distributed_c10d._world
    before = world.group_count
    torch_distributed.count_groups(3)
    assert world.group_count == before + 3
    world.group_count = before


def test_resizes_of_storages_are_heard() -> None:
    """The listener gets each resized storage and its bytes, only while it listens."""
    storage, resizes = torch.ones(4).untyped_storage(), list[tuple[int, int]]()
    with torch_tensor.listen_to_resizes(lambda one, size: resizes.append((size, one.nbytes()))):
        storage.resize_(0)
        storage.resize_(8)
    storage.resize_(0)
    assert resizes == [(0, 0), (8, 8)]


def test_backward_from_roots_that_fit() -> None:
    """`run_backward` gives torch's gradients; under a function mode it calls torch's own."""
    functions = []

    class Heard(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            functions.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.ones(3, requires_grad=True)
    for mode in (contextlib.nullcontext(), Heard()):
        roots = [torch.autograd.graph.get_gradient_edge(x * 2), (x * 3).sum()]
        grads, x.grad = [torch.arange(3.0), torch.tensor(2.0)], None
        with mode:
            torch_tensor.run_backward(roots, grads)
        assert x.grad is not None and x.grad.tolist() == [6.0, 8.0, 10.0]
    assert torch.autograd.backward in functions


def test_data_of_other_tensors_can_be_put(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tensor.data = x` is handled by the patch where it applies, by torch elsewhere."""
    monkeypatch.setattr(torch.Tensor, "data", torch.Tensor.data, raising=False)
    original = torch._has_compatible_shallow_copy_type
    monkeypatch.setattr(torch, "_has_compatible_shallow_copy_type", original)
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
