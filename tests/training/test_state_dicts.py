"""`program.load_state_dict` takes what `nn.Module.load_state_dict` takes, with the same result."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.layouts import OddModel, assert_equal, assert_refused, points, program_of


class Tied(OddModel):
    """One weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].weight = self.blocks[0].weight


def test_a_tied_weight_with_two_values() -> None:
    """The last name counts, as in torch, which copies one after the other."""
    state = Tied().state_dict() | {
        "blocks.0.weight": torch.zeros(7, 7),
        "blocks.1.weight": torch.ones(7, 7),
    }
    program, model = program_of(Tied()), Tied()
    program.load_state_dict(state)
    model.load_state_dict(state)
    assert_equal(program.state_dict(), dict(model.state_dict()))


class Partly(OddModel):
    """A module whose state dict leaves a parameter out."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        return {name: value for name, value in state.items() if name != "gain"}


def test_a_parameter_that_no_state_dict_has() -> None:
    """It keeps its value."""
    program = program_of(Partly())
    program.train_step(points(0))
    gain = program.module.gain.detach().clone()
    program.load_state_dict(Partly().state_dict())
    assert torch.equal(program.module.gain, gain) and not torch.equal(gain, OddModel().gain)


WRONG: dict[str, tuple[str, Any, str]] = {
    "a buffer that would be broadcast": ("shift", torch.zeros(1), "`shift` is [1], not [7]"),
    "another name of a buffer": ("head.also_shift", torch.zeros(2), "[2], not [7]"),
    "a list": ("row", [[0.0] * 7], "a list, not a tensor"),
    "no values": ("row", torch.zeros(1, 7, device="meta"), "`row` has no values"),
}


@pytest.mark.parametrize("name", WRONG)
def test_values_that_torch_refuses(name: str) -> None:
    """S641 by name, and nothing is changed."""
    key, value, words = WRONG[name]
    program = program_of(OddModel())
    before = program.state_dict()
    changed = OddModel().state_dict() | {"gain": torch.tensor(9.0), key: value}
    assert_refused(lambda: program.load_state_dict(changed), "S641", words)
    assert_equal(program.state_dict(), before)
