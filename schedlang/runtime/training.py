"""The training flags of modules: those set by hand outlive an evaluation."""

from __future__ import annotations

from torch import nn


class Training:
    """Switches a module between training and evaluation.

    A submodule that was put in eval while the model trains (a frozen batch norm) stays so in every
    training step, as in a loop by hand.  A model that comes in eval as a whole was loaded so: then
    all of it trains.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._flags = [(one, one.training) for one in module.modules()] if module.training else []

    def on(self) -> None:
        """Train; with the flags that stand now, or stood before the evaluation."""
        if self.module.training:
            return
        if not self._flags:
            self.module.train()
        for module, flag in self._flags:
            module.training = flag

    def off(self) -> None:
        """Evaluate."""
        if self.module.training:
            self._flags = [(one, one.training) for one in self.module.modules()]
        self.module.eval()
