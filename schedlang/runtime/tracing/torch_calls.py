"""Calls of torch's functions as a mode sees them: names, tensors, and the line of the model."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from schedlang.ir import pytree

# ---- Calls of torch's functions as a mode sees them: their names, and the tensors among
# arguments.


def name_of(func: Any) -> str:
    """A readable name of a torch function or tensor method."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__") and hasattr(func, "__self__"):
        return getattr(func.__self__, "__name__", name)
    return name


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors of a nest of lists, tuples and dicts, in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


# ---- Which line of the model is running, told from the stack.


OURS = Path(__file__).resolve().parents[3]  # what holds schedlang/, passes/ and primitives/
KNOWN = (
    *(str(OURS / part) + os.sep for part in ("schedlang", "passes", "primitives")),
    str(Path(torch.__file__).resolve().parent) + os.sep,
)
RUNS = {("loss.py", "forward"), ("original.py", "derive")}  # our code that runs a model


def model_line() -> str:
    """File and line of the innermost code that is neither torch's nor ours; "" outside a model.

    A model is run by our code, so what lies further out than that is no model.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_back is not None:
        code = frame.f_code
        if (Path(code.co_filename).name, code.co_name) in RUNS:
            return ""
        if not os.path.realpath(code.co_filename).startswith(KNOWN) and code.co_filename[:1] != "<":
            return f"{Path(code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
