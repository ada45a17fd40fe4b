"""Localisation of a bug: the wrong module is named, not those that receive wrong values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schedlang.passes.localize.module_search import Location, find_module
from schedlang.passes.verify.proof_case import prepare_case, randomised_float64
from schedlang.runtime.isolated_modules import CallRecorder, relative_error, tensors_of
from schedlang.runtime.launch.pool import Pool
from schedlang.runtime.lazy_logits.vocab_parallel import ShardedLogits
from schedlang.runtime.propagation.trace import Tag
from schedlang.runtime.sharding import edges
from tests.zoo.pool import Mutated
from tests.zoo.scenes import scene_case

Patch = pytest.MonkeyPatch


def _find_location(
    scene: str, pool: Pool, bug: str | Callable[[Patch], None] | None = None
) -> Location:
    prepared = prepare_case(randomised_float64(scene_case(scene)))
    ranks: Any = pool if bug is None else Mutated(pool, bug)
    return find_module(prepared, prepared.batches[0], ranks)


@pytest.mark.parametrize(
    "scene", ["tp", "sp", "sp, biases", "pp, dp", "chunks", "skipping", "sliced", "attending"]
)
def test_a_right_program_has_no_guilty_module(scene: str, pool: Pool) -> None:
    """In a correct program all modules are right in every layout, and all can be tested."""
    location = _find_location(scene, pool)
    assert location.guilty == () and location.first == "" and location.unknown == ()
    sites = scene_case(scene).plan.model.sites
    assert location.modules_tried > len(sites) / 2, (location.modules_tried, len(sites))


@pytest.mark.parametrize(
    "bug, scene, module",
    [
        ("T02@transformer.h.1.attn.c_attn", "tp", "transformer.h.1.attn.c_attn"),
        ("T02@transformer.h.0.mlp.c_fc", "tp", "transformer.h.0.mlp.c_fc"),
        ("T03@transformer.h.0.attn.c_proj", "tp", "transformer.h.0.attn.c_proj"),
        ("T05@model.norm", "sp", "model.norm"),
        ("T04@model.layers.0.mlp", "sp", "model.layers.0.mlp"),
    ],
)
def test_a_bug_in_backward_of_one_module_is_named(
    bug: str, scene: str, module: str, pool: Pool
) -> None:
    """A bug injected into one of many equal modules is found there only."""
    location = _find_location(scene, pool, bug)
    assert [name for name, _ in location.guilty] == [module]
    assert location.first == "", "forward is right"
    assert "gradient" in location.guilty[0][1] and location.values is not None


def _bias_twice(patch: Patch) -> None:
    """Inject a bug: one kind of layer adds its bias on every rank."""

    def compute(module: Any, x: Tensor, with_bias: bool) -> Tensor:
        is_attention = module.weight.shape[0] == 8  # attention's, the other is larger
        return edges._conv1d(module, x, with_bias or is_attention)

    patch.setitem(edges.PRODUCTS_BY_KIND, "Conv1D", compute)


def test_who_receives_something_wrong_is_not_blamed(pool: Pool) -> None:
    """After a wrong forward all later values differ: only modules that are wrong by themselves are
    named, with the first different and the last equal activation."""
    location = _find_location("tp", pool, _bias_twice)
    projections = [f"transformer.h.{k}.attn.c_proj" for k in (0, 1)]
    assert [name for name, _ in location.guilty] == projections
    assert location.first == projections[0] and location.before == "transformer.h.0.attn.c_attn"
    actual, expected = location.values or (torch.zeros(0), torch.zeros(0))
    model = prepare_case(randomised_float64(scene_case("tp"))).plan.model.model
    bias = model.get_parameter(f"{projections[0]}.bias")
    assert torch.allclose(actual - expected, 2 * bias.expand_as(actual))


def test_what_lies_between_modules_is_named(pool: Pool) -> None:
    """A mask drawn wrongly by a module itself, not by its children: that module is named."""
    location = _find_location("tp", pool, "T32b")
    assert {name for name, _ in location.guilty} == {f"transformer.h.{k}.attn" for k in (0, 1)}
    assert "what it hands to" in location.guilty[0][1]


@pytest.mark.parametrize("bug, scene", [("P03", "pp"), ("D01", "dp"), ("T18b", "sp")])
def test_what_no_module_does_is_no_modules_fault(bug: str, scene: str, pool: Pool) -> None:
    """If only a reduction after backward is wrong, no module is named."""
    location = _find_location(scene, pool, bug)
    assert location.guilty == () and location.first == "" and location.modules_tried > 10


# -- components --------------------------------------------------------------------------------


class Two(nn.Module):
    """Code around two modules, with an in-place operation on an output."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        doubled = self.one(x).mul_(2)
        result: Tensor = self.two(torch.tanh(doubled)) * 3
        return result


def test_the_calls_of_the_original_are_recorded() -> None:
    """Recorded values equal a plain forward; gradients of a call cover only its own code."""
    torch.manual_seed(0)
    model, x = Two(), torch.randn(4, 3, dtype=torch.float64)
    expected = model(x)
    recorder = CallRecorder(model)
    assert torch.equal(model(x), expected)
    assert list(recorder.calls) == [("one", 0), ("two", 0), ("", 0)]
    inner_call, root_call = recorder.calls["one", 0], recorder.calls["", 0]
    assert torch.equal(inner_call.inputs[0], x) and torch.equal(root_call.outputs[0], expected)
    assert set(inner_call.parameters) == {"weight", "bias"} and root_call.parameters == {}
    # the model's own code: tanh(2 u) and 3 v
    places = {kind for kind, _, _ in root_call.gradients}
    assert places == {"output"} and len(root_call.gradients) == 2
    recorder.remove()
    assert not model.one._forward_hooks and torch.equal(model(x), expected)


@pytest.mark.parametrize(
    "got, want, equal",
    [
        ([1.0, 2.0], [1.0, 2.0], True),
        ([1.0, 2.0 + 1e-6], [1.0, 2.0], False),
        ([float("nan"), 2.0], [1.0, 2.0], False),
        ([-float("inf"), 2.0], [-float("inf"), 2.0], True),
        ([0.0], [0.0, 0.0], False),
        ([1e-20, 0.0], [0.0, 0.0], True),
        ([1e-3, 0.0], [0.0, 0.0], False),
    ],
)
def test_a_difference_is_never_lost(got: list[float], want: list[float], equal: bool) -> None:
    """Different shapes and NaN are differences; -inf masks and rounding are not."""
    numbers = [torch.tensor(v, dtype=torch.float64) for v in (got, want)]
    assert (relative_error(*numbers, 1.0) <= 1e-9) == equal


def test_split_logits_lose_their_padding() -> None:
    """Padding rows of sharded logits are removed."""
    from schedlang.runtime.comm.collectives import Group

    local = torch.arange(12.0).reshape(3, 4)
    logits = ShardedLogits(local, Group(("tp",), (0, 1), 1), 6)
    tensors, starts, _ = tensors_of({"logits": logits, "n": 3})
    assert starts == [4] and torch.equal(tensors[0], local[:, :2])


def test_the_positions_of_a_part() -> None:
    """Each block of a split dim is cut separately, for any size of the dim."""
    tag = Tag(1, (4, 2))
    assert tag.positions(6, 2, 0) == [0, 1, 4] and tag.positions(6, 2, 1) == [2, 3, 5]
    assert tag.positions(12, 2, 1) == [4, 5, 6, 7, 10, 11]
