"""Offloading, recomputation and compression on a simulated device: as on the CPU, without races."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedlang
from schedlang.passes.propagate.original_forward import LabelWeight
from schedlang.runtime.activation_memory.dynamic import limit_saved_bytes
from schedlang.runtime.activation_memory.quantized import (
    Quantization,
    QuantizationCounts,
    quantize_saved,
)
from schedlang.runtime.activation_memory.recompute import checkpoint
from schedlang.runtime.comm.collectives import Group
from schedlang.runtime.device import (
    RestoredGenerators,
    default_generators,
    generators_restored,
    local_device,
    plain_numbers,
    with_index,
)
from schedlang.runtime.fusion.check_fused import draws_random
from schedlang.runtime.grad_reduction.gradient import norm_on_one_rank
from schedlang.runtime.moe.dispatch import ChunkCounts, DispatchStep, RoutedRows, count_sent_rows
from schedlang.runtime.moe.experts import capacity_mask
from schedlang.runtime.offload.offloaded_activations import offload_all_sizes
from schedlang.runtime.optim.loss_scale import LossScale
from schedlang.runtime.pipeline.evicted_activations import offload, reload
from schedlang.runtime.pipeline.recomputed_forward import RecomputeInputs
from schedlang.runtime.propagation.label_flow import LabelRule
from schedlang.runtime.storage import copies
from tests.accelerator.evicted_stage import run_forward

accelerators = pytest.importorskip("schedlang.testing.accelerator")
WIDTH, VOCAB_SIZE = 16, 12


@pytest.fixture
def acc() -> Iterator[Any]:
    """Provide a simulated accelerator; assert afterwards that it saw no race."""
    if reason := accelerators.unavailable():
        pytest.skip(reason)
    with accelerators.simulated() as device:
        yield device
        device.check()


class Block(nn.Module):
    """A residual MLP with dropout."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))


class Model(nn.Module):
    """A few blocks between an embedding and a head, which returns its loss."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB_SIZE, WIDTH)
        self.layers = nn.ModuleList(Block(rate) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB_SIZE)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def _batch(seed: int, device: Any) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(0, VOCAB_SIZE, (4, 6), generator=generator) for _ in range(2))
    labels[0, 4:] = -100
    return {"ids": ids.to(device), "labels": labels.to(device)}


def _train(device: Any, add_rows: Callable[[Any], Any], rate: float = 0.0) -> dict[str, Tensor]:
    """Return the parameters after three steps."""
    sch = schedlang.create_schedule(Model(rate).to(device))
    add_rows(sch)
    with offload_all_sizes():
        program = sch.build(
            optimizer=lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9),
            batch=_batch(0, device),
        )
    torch.manual_seed(5)
    for seed in range(3):
        program.train_step(_batch(seed, device))
    return program.state_dict()


def _assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(actual[name].cpu(), value, rtol=1e-4, atol=1e-5, msg=name)


OFFLOADED = {
    "plainly": lambda s: None,
    "parameters": lambda s: s["layers.*"].offload("parameters", to="cpu"),
    "gradients": lambda s: s["layers.*"].offload("gradients", to="cpu"),
    "optimizer": lambda s: s["layers.*"].offload("optimizer", to="cpu"),
    "on disk": lambda s: s["layers.*"].offload("optimizer", to="disk"),
    "activations": lambda s: s["layers.*"].offload("activations", to="cpu"),
}


@pytest.mark.parametrize("kind", OFFLOADED)
def test_kept_elsewhere(acc: Any, kind: str) -> None:
    """Offloading has no race, and trains as on the CPU."""
    _assert_close(_train("sim", OFFLOADED[kind]), _train("cpu", OFFLOADED[kind]))


def test_one_way_and_back(acc: Any) -> None:
    """A copy to the host and back has arrived when it is used, with or without a device index."""
    x = torch.randn(64, 64, device="sim")
    expected = x.cpu()
    host = copies.to_host(x)
    del x
    assert host.is_pinned()
    on_device, event = copies.to_device(host, torch.device("sim"))
    assert torch.equal(copies.wait_copy(on_device, event).cpu(), expected)
    copies.wait_all()
    assert torch.equal(host, expected)


def test_gradients_of_many_microbatches_wait_for_none(acc: Any) -> None:
    """Small gradients have two buffers on the host: no microbatch waits for another."""
    from schedlang.runtime.storage.offloaded_gradients import (
        gradient_of,
        offload_gradients,
        wait_for_offloaded,
    )

    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))).to("sim")
    plain = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    plain.load_state_dict(layers.state_dict())
    offload_gradients(layers.parameters())
    x = torch.randn(4, 8)
    on_device = x.to("sim")
    with acc.no_synchronisation():
        for _ in range(4):
            layers(on_device).sum().backward()
    wait_for_offloaded(layers.parameters())
    (4 * plain(x).sum()).backward()
    for grad, p in zip(map(gradient_of, layers.parameters()), plain.parameters()):
        assert grad is not None and p.grad is not None
        torch.testing.assert_close(grad, p.grad)


def test_written_behind(acc: Any) -> None:
    """A write from the host into a device tensor comes after all earlier reads."""
    x, new = torch.randn(32, device="sim"), torch.randn(32).pin_memory()
    twice = x * 2
    before = x.cpu()
    copies.copy_into(x, new)
    assert torch.equal((x + 1).cpu(), new + 1) and torch.equal(twice.cpu(), before * 2)


def test_gradients_wait_for_none(acc: Any) -> None:
    """With offloaded gradients the host does not wait in a second microbatch."""
    from schedlang.runtime.storage.offloaded_gradients import (
        gradient_of,
        offload_gradients,
        wait_for_offloaded,
    )

    layers = [nn.Linear(8, 8).to("sim") for _ in range(2)]
    parameters = [p for layer in layers for p in layer.parameters()]
    offload_gradients(parameters)
    x = torch.randn(4, 8, device="sim")
    with acc.no_synchronisation():
        for _ in range(2):
            layers[1](layers[0](x)).sum().backward()
    wait_for_offloaded(parameters)
    grads = [gradient_of(p) for p in parameters]
    plain = [nn.Linear(8, 8).to("sim") for _ in range(2)]
    for copied, original in zip(plain, layers):
        copied.load_state_dict(original.state_dict())
    (2 * plain[1](plain[0](x)).sum()).backward()
    for grad, p in zip(grads, (p for copied in plain for p in copied.parameters())):
        assert grad is not None and grad.device.type == "cpu" and p.grad is not None
        torch.testing.assert_close(grad, p.grad.cpu())


def test_draws_of_the_device(acc: Any) -> None:
    """The device's generator is restored for a second run, and after another use."""
    device = with_index(torch.device("sim"))
    generators = RestoredGenerators(default_generators([device]))
    first = torch.rand(8, device=device).cpu()
    with generators:
        assert torch.equal(torch.rand(8, device=device).cpu(), first)
    following = torch.rand(8, device=device).cpu()
    with generators:
        torch.rand(8, device=device)
        with generators_restored():
            torch.manual_seed(7)
            torch.rand(8, device=device)
        assert torch.equal(torch.rand(8, device=device).cpu(), following)


def test_numbers_are_read_at_once(acc: Any) -> None:
    """Numbers on the device take one wait, numbers on the host none."""
    scalars = [torch.tensor(float(k), device="sim") for k in range(4)]
    acc.reset()
    assert plain_numbers([*scalars, 7.0]) == [0.0, 1.0, 2.0, 3.0, 7.0]
    assert len(acc.synchronisations()) == 1
    with acc.no_synchronisation():
        assert plain_numbers([1, 2.5]) == [1.0, 2.5]


def test_own_device(acc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """LOCAL_RANK chooses a device and makes it current; an earlier choice stays."""
    monkeypatch.setenv("LOCAL_RANK", "3")
    before = torch.accelerator.current_device_index()
    try:
        assert local_device() == torch.device("sim", 3)
        assert torch.accelerator.current_device_index() == 3
        monkeypatch.setenv("LOCAL_RANK", "1")
        assert local_device() == torch.device("sim", 3)
    finally:
        torch.accelerator.set_device_index(before)


def _grads_twice(module: nn.Module, recompute: Callable[[nn.Module], Any]) -> tuple[Tensor, Tensor]:
    """Return the gradients of a module with dropout, plain and with recomputation."""
    import copy

    x, grads = torch.randn(6, WIDTH, device="sim"), []
    for wrap in (lambda copied: None, recompute):
        copied = copy.deepcopy(module)
        wrap(copied)
        torch.manual_seed(3)
        leaf = x.clone().requires_grad_()
        copied(copied(leaf)).square().sum().backward()
        assert leaf.grad is not None
        grads.append(leaf.grad.cpu())
    return grads[0], grads[1]


RECOMPUTED = {
    "checkpoint": lambda one: checkpoint(one),
    "in a budget": lambda one: limit_saved_bytes([one], 0),
}


@pytest.mark.parametrize("kind", RECOMPUTED)
def test_the_same_masks_again(acc: Any, kind: str) -> None:
    """Recomputation has the same dropout masks."""
    expected, actual = _grads_twice(Block(0.5).to("sim"), RECOMPUTED[kind])
    assert torch.equal(expected, actual)


class DrawsNoise(nn.Module):
    """Draws from its own generator and from the device's."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.rand(x.shape, generator=self.generator).to(x.device)
        return x * mask + torch.rand_like(x)


def test_a_stage_again(acc: Any) -> None:
    """A recomputed stage draws the same, from the device's generator and its own, and leaves both
    as the first run did."""
    model, x = DrawsNoise().to("sim"), torch.ones(4, 4, device="sim")
    saved = RecomputeInputs.capture({}, model, x.device)
    first = model(x).cpu()
    states = [
        generator.get_state() for generator in (model.generator, torch.sim.default_generators[0])
    ]
    with saved.rng_states:
        assert torch.equal(model(x).cpu(), first)
    states_after = [
        generator.get_state() for generator in (model.generator, torch.sim.default_generators[0])
    ]
    assert all(map(torch.equal, states, states_after))


def test_what_draws_is_seen(acc: Any) -> None:
    """A module that draws on its device is recognized."""
    x = torch.randn(2, WIDTH, device="sim")
    assert draws_random(Block(0.5).to("sim"), ((x,), {})) and not draws_random(
        Block(0.0).to("sim"), ((x,), {})
    )


def test_a_scale_waits_for_nobody(acc: Any) -> None:
    """Gradients are unscaled, and overflow is shared, without a wait of the host."""
    layer = nn.Linear(4, 4).to("sim")
    scale = LossScale(8.0, growth=2)
    for value, overflow in ((1.0, False), (float("inf"), True)):
        for p in layer.parameters():
            p.grad = torch.full_like(p, value)
        template = torch.zeros(3, dtype=torch.float64, device="sim")
        with acc.no_synchronisation():
            scale.unscale(dict(layer.named_parameters()))
            flag = scale.overflow_flag(template)
        scale.set_overflow(flag)
        assert scale.overflow is overflow and scale.update() is not overflow
    scale.unscale(dict(layer.named_parameters()))  # in a world of one rank nothing is shared
    assert not scale.update() and scale.overflow


def test_a_norm_of_both_memories(acc: Any) -> None:
    """Gradients on host and device are clipped together: the host waits once."""
    grads = [torch.randn(3, 4, generator=torch.Generator().manual_seed(k)) for k in range(6)]
    parameters = {str(k): nn.Parameter(torch.zeros(3, 4)) for k in range(6)}
    mixed = {}
    for k, (name, grad) in enumerate(zip(parameters, grads)):
        parameters[name].grad = grad.clone()
        mixed[name] = nn.Parameter(torch.zeros(3, 4, device="sim" if k % 2 else "cpu"))
        mixed[name].grad = grad.to(mixed[name].device)
    norm = nn.utils.clip_grad_norm_(parameters.values(), 0.5)
    acc.reset()
    actual = norm_on_one_rank(mixed, 0.5)
    assert len(acc.synchronisations()) == 1
    torch.testing.assert_close(actual.cpu(), norm)
    for name, p in mixed.items():
        torch.testing.assert_close(p.grad.cpu(), parameters[name].grad)  # type: ignore[union-attr]


def test_labels_are_counted_at_once(acc: Any) -> None:
    """Weights of all microbatches take one wait."""
    rule = LabelRule("labels", (), -100)
    label_weight = LabelWeight(rule)
    parts = [_batch(seed, "sim") for seed in range(5)]
    acc.reset()
    weights = plain_numbers([label_weight.counted(part) for part in parts])
    assert len(acc.synchronisations()) == 1
    assert weights == [22.0] * 5 == [label_weight(part) for part in parts]


def _dispatch_waits(capacity: float | None) -> tuple[list[str], Tensor]:
    """Return a rank's waits in the dispatch, and its error; two ranks have two experts each."""
    import torch.distributed as dist

    rank = dist.get_rank()
    group = Group(("dp",), (0, 1), rank, dist.group.WORLD)
    step = DispatchStep(group, ((0, 1), (2, 3)))
    generator = torch.Generator().manual_seed(rank)
    experts = torch.randint(0, 4, (10,), generator=generator).to("sim")
    rows = torch.randn(10, 4, generator=generator).to("sim")

    def take() -> RoutedRows:
        counts = ChunkCounts.of(count_sent_rows(experts, None, 1, 4, [step]).tolist(), 1, 4, [step])
        assert counts is not None
        return step.dispatch(RoutedRows(rows, experts, counts.chunks[0]))

    take()
    simulation = accelerators.current()
    simulation.reset()
    if capacity is not None:
        capacity_mask(experts[:, None], 4, capacity)
    routed = take()
    y = routed.return_results(routed.rows * (1 + routed.experts)[:, None])
    waits = [str(wait) for wait in simulation.synchronisations()]
    return waits, (y - rows * (1 + experts)[:, None]).abs().max().cpu()


@pytest.mark.parametrize("capacity", [None, 1.0])
def test_a_dispatch_waits_once(acc: Any, capacity: float | None) -> None:
    """Sending tokens to experts makes the host wait once, for their counts."""
    for waits, gap in accelerators.spawn(_dispatch_waits, capacity, ranks=2):
        assert len(waits) == 1, waits
        assert float(gap) == 0.0


def test_parked_on_the_host(acc: Any) -> None:
    """What a stage saved goes to the host and back on its own stream: the host does not wait,
    backward does."""
    model, x = Block(0.0).to("sim"), torch.randn(64, WIDTH, device="sim")
    model(x).square().sum().backward()
    expected = [p.grad.cpu() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    loss, bag, step, op = run_forward(model, x)
    assert bag.bytes
    with acc.no_synchronisation():
        offload(step, op)
        assert not bag.bytes
        torch.randn(256, 256, device="sim")  # takes the freed memory
        reload(step, op)
        bag.restore()
        loss.backward()
    for p, grad in zip(model.parameters(), expected, strict=True):
        assert p.grad is not None
        torch.testing.assert_close(p.grad.cpu(), grad)


def test_coded(acc: Any) -> None:
    """Compressed tensors are checked on the host in the first call only; values are as on the
    CPU."""
    model, x = Block(0.0), torch.randn(64, WIDTH)
    on_device, counts, cpu_counts = Block(0.0).to("sim"), QuantizationCounts(), QuantizationCounts()
    on_device.load_state_dict(model.state_dict())
    quantize_saved(model, "block", Quantization(8, 16), cpu_counts)
    quantize_saved(on_device, "block", Quantization(8, 16), counts)
    for step in range(3):
        inputs = x.to("sim")
        acc.reset()
        actual = _gradients(on_device, inputs)
        waits = [wait.place for wait in acc.synchronisations()]
        # the inputs of the norm and of both layers, and the mean that is too small
        assert counts.tensors == 3 * (step + 1) and len(waits) <= (0 if step else 5), waits
        for grad, expected in zip(actual, _gradients(model, x), strict=True):
            torch.testing.assert_close(grad.cpu(), expected)
    assert counts == cpu_counts


def _gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(x.clone().requires_grad_()).square().sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


class CastProduct(nn.Module):
    """Computes in bfloat16 with a square weight, whose cast copy autograd saves."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x.bfloat16() @ self.weight.bfloat16()


def test_casts_of_weights_are_known_again(acc: Any) -> None:
    """A cast of a weight is distinguished from an activation of its shape in the first call."""
    model, counts = CastProduct().to("sim"), QuantizationCounts()
    quantize_saved(model, "it", Quantization(8, 16), counts)
    for step in range(3):
        x = torch.randn(WIDTH, WIDTH, device="sim", requires_grad=True)
        acc.reset()
        model(x)
        waits = [wait.place for wait in acc.synchronisations()]
        assert counts.tensors == step + 1 and bool(waits) == (step == 0), waits


class LogSoftmax(nn.Module):
    """Returns log-softmax of scores, some of them masked."""

    def forward(self, x: Tensor) -> Tensor:
        return x.log_softmax(-1)


@pytest.mark.parametrize("first", [True, False])
def test_scores_that_are_masked_later(acc: Any, first: bool) -> None:
    """If the first call had no mask (or had one), later masked scores are restored, and the
    gradient is as accurate as without a mask."""
    module = LogSoftmax()
    quantize_saved(module, "it", Quantization(8, 16))
    scores = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    mask = torch.rand(8, 64, generator=torch.Generator().manual_seed(1)) < 0.2
    weights = torch.randn(8, 64, generator=torch.Generator().manual_seed(2)).masked_fill(mask, 0)
    for masked in (first, True, False):
        x = scores.masked_fill(mask & masked, -torch.inf).to("sim").requires_grad_()
        (module(x).masked_fill(mask.to("sim"), 0.0) * weights.to("sim")).sum().backward()
        exact = scores.masked_fill(mask & masked, -torch.inf).requires_grad_()
        (exact.log_softmax(-1).masked_fill(mask, 0.0) * weights).sum().backward()
        assert x.grad is not None and exact.grad is not None
        error = (x.grad.cpu() - exact.grad).norm() / exact.grad.norm()
        assert float(error) < 0.01
