"""Lines of a model's own code, of a running call and of an error."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[3]  # the folder of schedlang/, passes/ and primitives/
LIBRARY_PATHS = (
    *(str(ROOT / part) + os.sep for part in ("schedlang", "passes", "primitives")),
    str(Path(torch.__file__).resolve().parent) + os.sep,
)
# (file, function) that runs a model
MODEL_RUNNERS = {("batch.py", "run_forward"), ("original_forward.py", "record_original")}


def model_line() -> str:
    """Return file and line of the innermost frame outside of torch and schedlang; "" if none.

    The search ends at schedlang's code that runs a model: frames further out are not the model's.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_back is not None:
        code = frame.f_code
        if (Path(code.co_filename).name, code.co_name) in MODEL_RUNNERS:
            return ""
        library = os.path.realpath(code.co_filename).startswith(LIBRARY_PATHS)
        if not library and code.co_filename[:1] != "<":
            return f"{Path(code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def line_of(error: BaseException) -> str:
    """Return file and line of the model's own code that raised an error; "" if there is none."""
    frames = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    model_frames = [f for f in frames if not os.path.realpath(f[0]).startswith(LIBRARY_PATHS)]
    return f"{Path(model_frames[-1][0]).name}:{model_frames[-1][1]}" if model_frames else ""
