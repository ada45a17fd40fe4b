"""The training flags of modules: those set by hand outlive an evaluation."""

from __future__ import annotations

from torch import nn


class Training:
    """Switches a module between training and evaluation.

    A submodule that was put in eval while the model trains (a frozen batch norm) stays so in every
    training step, as in a loop by hand.  A model that comes in eval as a whole was loaded so: then
    all of it trains.  What a class does in a `train` of its own (norms that stay in eval, adapters
    that are merged to evaluate) it does here, too.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        # of torch's own classes none does more in `train` than set flags
        self._switching = [
            one for one in module.modules() if type(one).train is not nn.Module.train
        ]
        for one in self._switching:
            if all(inner.training for inner in one.modules()):  # nobody has called it yet
                one.train()
        self._flags = [(one, one.training) for one in module.modules()] if module.training else []

    def on(self) -> None:
        """Train; with the flags that stand now, or stood before the evaluation."""
        if self.module.training:
            return
        if not self._flags or self._switching:
            self.module.train()
        for module, flag in self._flags:
            module.training = flag

    def off(self) -> None:
        """Evaluate."""
        if self.module.training:
            self._flags = [(one, one.training) for one in self.module.modules()]
        self.module.eval()
