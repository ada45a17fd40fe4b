"""A Python file as it is now: run from its text, not from what was compiled of it before.

Python takes compiled code for current if the file has the same size and second of change: an edit
within a second would be proven as it was before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType


class _FromText(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        """What the text says; nothing is read that was compiled, and nothing left beside it."""
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


def module_of(name: str, path: str | Path) -> tuple[ModuleType, Callable[[], None]]:
    """A module under this name, known to Python, and what runs the file in it.

    Raises OSError where the file cannot be read, and whatever the file raises.
    """
    loader = _FromText(name, str(path))
    spec = spec_from_file_location(name, path, loader=loader)
    assert isinstance(spec, ModuleSpec), path
    module = sys.modules[name] = module_from_spec(spec)
    return module, lambda: loader.exec_module(module)
