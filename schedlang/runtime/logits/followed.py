"""What torch.compile does not ask a stand-in by itself: a loss that is made as a module.

Its rule for `nn.CrossEntropyLoss()` writes the call into the graph as one of tensors, and fails on
anything else; the function asks its arguments, as it does outside of a graph.
"""

from __future__ import annotations

from typing import Any

from torch.nn import functional as F

_done: list[bool] = []


def follow_losses() -> bool:
    """Let it call the function where the logits are no tensor; done while it traces, once.

    Whether it could be done: a torch that makes such losses in another way is left alone.
    """
    if not _done:
        _done.append(_patched())
    return _done[0]


def _patched() -> bool:
    from torch._dynamo.utils import has_torch_function
    from torch._dynamo.variables import LambdaVariable, UserDefinedClassVariable
    from torch._dynamo.variables.base import VariableTracker

    owner: Any = UserDefinedClassVariable
    original = getattr(owner, "_call_cross_entropy_loss", None)
    if original is None:
        return False

    def called(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        usual = original(self, tx, args, kwargs)

        def loss(input: Any, target: Any) -> Any:
            if not has_torch_function(input):
                return usual.call_function(tx, [input, target], {})
            function = VariableTracker.build(tx, F.cross_entropy)
            return function.call_function(tx, [input, target, *args], kwargs)

        return LambdaVariable(loss)

    owner._call_cross_entropy_loss = called
    return True


# torch.compiler.assume_constant_result, which would import all of the compiler
follow_losses._dynamo_marked_constant = True  # type: ignore[attr-defined]
