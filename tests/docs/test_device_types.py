"""Only `schedlang.runtime.device` tests the type of a device; other files ask it."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

import pytest

from tests.docs.test_house import FOLDERS, python_files, relative_path
from tests.figures import nodes

TYPES = {"cuda", "nccl", "mps", "xpu", "hip", "npu", "privateuseone"}
ALLOWED = {
    "schedlang/runtime/device.py": "the one file that knows",
    "passes/simulate/machine.py": "models the library of a cluster elsewhere; asks no device",
    "schedlang/kernels/kernel_device.py": "Triton's kernels are compiled for NVIDIA's only",
}


def device_checks(all_nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield the line and the form of each test of a device's type among these nodes."""
    for node in all_nodes:
        match node:
            case ast.Attribute(attr="is_cuda" | "is_mps" | "is_xpu" as attribute):
                yield node.lineno, f".{attribute}"
            case ast.Attribute(value=ast.Name(id="torch"), attr=attribute) if attribute in TYPES:
                yield node.lineno, f"torch.{attribute}"
            case ast.Attribute(attr="cuda"):
                yield node.lineno, ".cuda"
            case ast.Constant(value=str(value)) if value.partition(":")[0] in TYPES:
                yield node.lineno, repr(value)
            case ast.Compare(left=left, comparators=operands):
                for side in (left, *operands):
                    if _type_of_device(side):
                        yield node.lineno, f"{ast.unparse(node)}"
            case ast.Import(names=names) if any(n.name.startswith("torch.cuda") for n in names):
                yield node.lineno, "import torch.cuda"
            case ast.ImportFrom(module=str(name)) if name.startswith("torch.cuda"):
                yield node.lineno, f"from {name}"
            case _:
                pass


def _type_of_device(node: ast.expr) -> bool:
    """Whether an expression is `device.type`, `x.device.type` or `mesh.device_type`."""
    if not isinstance(node, ast.Attribute):
        return False
    if node.attr == "device_type":
        return True
    owner = node.value.attr if isinstance(node.value, ast.Attribute) else ast.unparse(node.value)
    return node.attr == "type" and owner.endswith("device")


def test_one_file_names_devices() -> None:
    """Device types are named only in the device layer, and in files with a given reason."""
    problems = [
        f"{relative_path(path)}:{line} {code}"
        for path in python_files(*FOLDERS)
        if relative_path(path) not in ALLOWED
        if not relative_path(path).startswith("schedlang/testing/")  # it defines its own device
        for line, code in device_checks(nodes(path))
    ]
    assert not problems, "\n".join(problems)


def test_reasons_are_needed() -> None:
    """Every allowed file does name a device type."""
    unused = {
        relative_path(p)
        for p in python_files(*FOLDERS)
        if relative_path(p) in ALLOWED and not any(device_checks(nodes(p)))
    }
    assert not unused


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
    """Each form of testing a device's type is found."""
    assert list(device_checks(ast.walk(ast.parse(line))))


@pytest.mark.parametrize("line", ["x.device == y.device", "torch.autocast(x.device.type)", "'cpu'"])
def test_what_is_not(line: str) -> None:
    """Comparing devices, and passing their type on, is allowed."""
    assert not list(device_checks(ast.walk(ast.parse(line))))
