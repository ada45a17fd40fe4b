"""No file but one asks of what type a device is; others ask `schedlang.runtime.device`."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

import pytest

from tests.docs.test_house import FOLDERS, shown, sources
from tests.figures import nodes

TYPES = {"cuda", "nccl", "mps", "xpu", "hip", "npu", "privateuseone"}
ALLOWED = {
    "schedlang/runtime/device.py": "the one file that knows",
    "passes/simulate/machine.py": "models the library of a cluster elsewhere; asks no device",
    "schedlang/kernels/kernel_device.py": "Triton's kernels are compiled for NVIDIA's only",
}


def asked(every: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Where a program's nodes ask of what type a device is: line, and how."""
    for node in every:
        match node:
            case ast.Attribute(attr="is_cuda" | "is_mps" | "is_xpu" as attribute):
                yield node.lineno, f".{attribute}"
            case ast.Attribute(value=ast.Name(id="torch"), attr=attribute) if attribute in TYPES:
                yield node.lineno, f"torch.{attribute}"
            case ast.Attribute(attr="cuda"):
                yield node.lineno, ".cuda"
            case ast.Constant(value=str(value)) if value.partition(":")[0] in TYPES:
                yield node.lineno, repr(value)
            case ast.Compare(left=left, comparators=others):
                for side in (left, *others):
                    if _type_of_device(side):
                        yield node.lineno, f"{ast.unparse(node)}"
            case ast.Import(names=names) if any(n.name.startswith("torch.cuda") for n in names):
                yield node.lineno, "import torch.cuda"
            case ast.ImportFrom(module=str(name)) if name.startswith("torch.cuda"):
                yield node.lineno, f"from {name}"
            case _:
                pass


def _type_of_device(node: ast.expr) -> bool:
    """`device.type`, `x.device.type`, `mesh.device_type`."""
    if not isinstance(node, ast.Attribute):
        return False
    if node.attr == "device_type":
        return True
    named = node.value.attr if isinstance(node.value, ast.Attribute) else ast.unparse(node.value)
    return node.attr == "type" and named.endswith("device")


def test_one_file_names_devices() -> None:
    """Types of devices are named in the device layer, and where a reason is given."""
    found = [
        f"{shown(path)}:{line} {how}"
        for path in sources(*FOLDERS)
        if shown(path) not in ALLOWED
        if not shown(path).startswith("schedlang/testing/")  # it makes a device of its own
        for line, how in asked(nodes(path))
    ]
    assert not found, "\n".join(found)


def test_reasons_are_needed() -> None:
    """No file has a reason for what it does not do."""
    idle = {shown(p) for p in sources(*FOLDERS) if shown(p) in ALLOWED and not any(asked(nodes(p)))}
    assert not idle


@pytest.mark.parametrize(
    "line",
    [
        "x.is_cuda",
        "torch.cuda.synchronize()",
        "torch.device('cuda')",
        "'cuda:1'",
        "model.cuda()",
        "x.device.type == 'cpu'",
        "mesh.device_type != 'cpu'",
        "self.device.type in ('a', 'b')",
        "from torch.cuda import Stream",
        "import torch.cuda.amp",
        "backend == 'nccl'",
    ],
)
def test_what_is_found(line: str) -> None:
    """Each way of asking is found."""
    assert list(asked(ast.walk(ast.parse(line))))


@pytest.mark.parametrize("line", ["x.device == y.device", "torch.autocast(x.device.type)", "'cpu'"])
def test_what_is_not(line: str) -> None:
    """Comparing devices, and handing their type on, asks nothing of it."""
    assert not list(asked(ast.walk(ast.parse(line))))
