"""torch.nn.attention: the names of kernels, made fit to be sent to another process."""

from __future__ import annotations

import sys


def let_kernels_travel() -> None:
    """Name `SDPBackend` as its module does, so that pickle finds it; at once where it is loaded.

    torch renames the class but not its qualified name, by which pickle looks. So a module that
    holds a kernel's name cannot be pickled: it is taken for a class made at run time.
    """
    if "torch.nn.attention" in sys.modules:
        from torch.nn.attention import SDPBackend

        SDPBackend.__qualname__ = SDPBackend.__name__
