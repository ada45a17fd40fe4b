"""A patch of torch.nn.attention that makes names of kernels picklable."""

from __future__ import annotations

import sys


def make_kernel_names_picklable() -> None:
    """Fix the qualified name of `SDPBackend`, so that pickle finds it; only if it is imported.

    torch renames the class but not its qualified name, by which pickle looks it up. Without this, a
    module that holds a kernel's name cannot be pickled by name: it is taken for a class made at run
    time.
    """
    if "torch.nn.attention" in sys.modules:
        from torch.nn.attention import SDPBackend

        SDPBackend.__qualname__ = SDPBackend.__name__
