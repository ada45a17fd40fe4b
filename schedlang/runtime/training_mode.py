"""Switch a module between training and evaluation, and keep flags that were set by hand."""

from __future__ import annotations

from torch import nn


class TrainingMode:
    """Switches a module between training and evaluation.

    A submodule that is in eval while the model trains (a frozen batch norm) stays so in every
    training step, as in a loop by hand. A model that is in eval as a whole was loaded so: then all
    of it trains. Classes with a `train` method of their own (norms that stay in eval, adapters that
    are merged for evaluation) have it called.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        # torch's own classes only set flags in `train`
        self._switching = [m for m in module.modules() if type(m).train is not nn.Module.train]
        for m in self._switching:
            if all(inner.training for inner in m.modules()):  # `train` has not been called yet
                m.train()
        self._flags = [(m, m.training) for m in module.modules()] if module.training else []

    def train(self) -> None:
        """Switch to training, with the flags that are set now, or were set before the
        evaluation."""
        if self.module.training:
            return
        if not self._flags or self._switching:
            self.module.train()
        for module, flag in self._flags:
            module.training = flag

    def evaluate(self) -> None:
        """Switch to evaluation."""
        if self.module.training:
            self._flags = [(m, m.training) for m in self.module.modules()]
        self.module.eval()
