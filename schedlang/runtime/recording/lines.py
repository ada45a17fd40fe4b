"""Which line of the model is running, told from the stack."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

OURS = Path(__file__).resolve().parents[3]  # what holds schedlang/, passes/ and primitives/
KNOWN = (
    *(str(OURS / part) + os.sep for part in ("schedlang", "passes", "primitives")),
    str(Path(torch.__file__).resolve().parent) + os.sep,
)
RUNS = {("dryrun.py", "call"), ("feeds.py", "feeds")}  # our code that runs a model


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
