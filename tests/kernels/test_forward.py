"""Layers around a module's forward: their order, and what of the module stays unchanged."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn

from schedlang.runtime.forward import layers_of, plain_forward, wrap


class RecordCall:
    """Appends its name to a list and multiplies the result of the inner forward."""

    def __init__(self, name, notes, factor=2.0):
        self.name, self.notes, self.factor = name, notes, factor

    def __call__(self, inner, x):
        self.notes.append(self.name)
        return self.factor * inner(x)


def test_order_is_fixed():
    """In whatever order they are added: kernel inside fuse inside checkpoint inside offload."""
    module, notes = nn.Linear(2, 2), []
    for kind in ("fuse", "offload", "kernel", "checkpoint"):
        wrap(module, kind, RecordCall(kind, notes))
    x = torch.ones(1, 2)
    assert torch.equal(module(x), 16 * plain_forward(module)(x))
    assert notes == ["offload", "checkpoint", "fuse", "kernel"]


def test_signature_names_and_hooks_stay():
    """Under a layer, signature, class, state and hooks stay the module's own."""
    module, hook_calls = nn.Linear(2, 2), []
    module.register_forward_hook(lambda *_: hook_calls.append(1))
    before = inspect.signature(module.forward), list(module.state_dict()), type(module)
    wrap(module, "fuse", RecordCall("fuse", []))
    assert (inspect.signature(module.forward), list(module.state_dict()), type(module)) == before
    module(torch.ones(2))
    assert hook_calls == [1]


def test_a_forward_of_the_instance_is_the_innermost():
    """A forward that was set on the instance stays below the layers."""
    module = nn.Linear(2, 2)
    module.forward = lambda x: x + 1
    wrap(module, "offload", RecordCall("offload", []))
    assert module(torch.ones(1)).item() == 4.0
    assert plain_forward(module)(torch.ones(1)).item() == 2.0


def test_copies_use_their_own_parameters():
    """A deep copy computes with its own weights and layers; pickling is refused."""
    module = nn.Linear(2, 2)
    wrap(module, "offload", RecordCall("offload", []))
    copied = copy.deepcopy(module)
    assert layers_of(copied) is not layers_of(module)
    with torch.no_grad():
        copied.weight.zero_(), copied.bias.fill_(3.0)
    assert torch.equal(copied(torch.ones(1, 2)), torch.full((1, 2), 6.0))
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(module)
    assert not torch.equal(module(torch.ones(1, 2)), torch.full((1, 2), 6.0))
