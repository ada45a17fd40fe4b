"""What libraries note when a model is made, made up for in a process that only received it.

transformers notes which hidden states and attentions a class can return when the first model of the
class is made; a model that was unpickled in another process would return none, without a word.
"""

from __future__ import annotations

import sys

from torch import nn


def register(model: nn.Module) -> None:
    """Note for the classes of a model what making it would have noted."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    known = getattr(capturing, "_CAN_RECORD_REGISTRY", None)  # private; no other way since 5.0
    if known is None:
        return
    for module in model.modules():
        if hasattr(module, "_can_record_outputs") and str(type(module)) not in known:
            known[module] = module._can_record_outputs
