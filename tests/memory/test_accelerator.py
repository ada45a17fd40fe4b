"""Tests on a simulated accelerator: what is kept elsewhere, and drawn again, is as on the CPU."""

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
from schedlang.runtime.propagation.trace import LabelRule
from schedlang.runtime.storage import copies
from tests.accelerator.parked import parked

accelerators = pytest.importorskip("schedlang.testing.accelerator")
WIDTH, WORDS = 16, 12


@pytest.fixture
def acc() -> Iterator[Any]:
    """A simulated accelerator; it must have seen no race."""
    if reason := accelerators.unavailable():
        pytest.skip(reason)
    with accelerators.simulated() as one:
        yield one
        one.check()


class Block(nn.Module):
    """Computes something in between, and drops some of it."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))


class Model(nn.Module):
    """A few blocks between an embedding and a head, with a loss of its own."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block(rate) for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def _batch(seed: int, device: Any) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(0, WORDS, (4, 6), generator=generator) for _ in range(2))
    labels[0, 4:] = -100
    return {"ids": ids.to(device), "labels": labels.to(device)}


def _trained(device: Any, rows: Callable[[Any], Any], rate: float = 0.0) -> dict[str, Tensor]:
    """The parameters after three steps of two microbatches."""
    sch = schedlang.create_schedule(Model(rate).to(device))
    rows(sch)
    with offload_all_sizes():
        program = sch.build(
            optimizer=lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9),
            batch=_batch(0, device),
        )
    torch.manual_seed(5)
    for seed in range(3):
        program.train_step(_batch(seed, device))
    return program.state_dict()


def _near(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, value in wanted.items():
        torch.testing.assert_close(found[name].cpu(), value, rtol=1e-4, atol=1e-5, msg=name)


KEPT = {
    "plainly": lambda s: None,
    "parameters": lambda s: s["layers.*"].offload("parameters", to="cpu"),
    "gradients": lambda s: s["layers.*"].offload("gradients", to="cpu"),
    "optimizer": lambda s: s["layers.*"].offload("optimizer", to="cpu"),
    "on disk": lambda s: s["layers.*"].offload("optimizer", to="disk"),
    "activations": lambda s: s["layers.*"].offload("activations", to="cpu"),
}


@pytest.mark.parametrize("kind", KEPT)
def test_kept_elsewhere(acc: Any, kind: str) -> None:
    """What is offloaded is copied without a race, and training is as on the CPU."""
    _near(_trained("sim", KEPT[kind]), _trained("cpu", KEPT[kind]))


def test_one_way_and_back(acc: Any) -> None:
    """A copy to the host and back is there when it is used, however its device is called."""
    x = torch.randn(64, 64, device="sim")
    wanted = x.cpu()
    host = copies.to_host(x)
    del x
    assert host.is_pinned()
    there, event = copies.to_device(host, torch.device("sim"))
    assert torch.equal(copies.wait_copy(there, event).cpu(), wanted)
    copies.wait_all()
    assert torch.equal(host, wanted)


def test_gradients_of_many_microbatches_wait_for_none(acc: Any) -> None:
    """Small gradients lie twice on the host until the end: no microbatch waits for another."""
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
    there = x.to("sim")
    with acc.no_synchronisation():
        for _ in range(4):
            layers(there).sum().backward()
    wait_for_offloaded(layers.parameters())
    (4 * plain(x).sum()).backward()
    for grad, p in zip(map(gradient_of, layers.parameters()), plain.parameters()):
        assert grad is not None and p.grad is not None
        torch.testing.assert_close(grad, p.grad)


def test_written_behind(acc: Any) -> None:
    """What is written from the host into a tensor of the device comes after all that reads it."""
    x, new = torch.randn(32, device="sim"), torch.randn(32).pin_memory()
    twice = x * 2
    before = x.cpu()
    copies.copy_into(x, new)
    assert torch.equal((x + 1).cpu(), new + 1) and torch.equal(twice.cpu(), before * 2)


def test_gradients_wait_for_none(acc: Any) -> None:
    """A second microbatch of gradients that leave has the host wait for nothing."""
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
    found = [gradient_of(p) for p in parameters]
    plain = [nn.Linear(8, 8).to("sim") for _ in range(2)]
    for one, other in zip(plain, layers):
        one.load_state_dict(other.state_dict())
    (2 * plain[1](plain[0](x)).sum()).backward()
    for grad, p in zip(found, (p for one in plain for p in one.parameters())):
        assert grad is not None and grad.device.type == "cpu" and p.grad is not None
        torch.testing.assert_close(grad, p.grad.cpu())


def test_draws_of_the_device(acc: Any) -> None:
    """The generator of the device stands where it stood, for a second run and after a look."""
    device = with_index(torch.device("sim"))
    drawn = RestoredGenerators(default_generators([device]))
    first = torch.rand(8, device=device).cpu()
    with drawn:
        assert torch.equal(torch.rand(8, device=device).cpu(), first)
    following = torch.rand(8, device=device).cpu()
    with drawn:
        torch.rand(8, device=device)
        with generators_restored():
            torch.manual_seed(7)
            torch.rand(8, device=device)
        assert torch.equal(torch.rand(8, device=device).cpu(), following)


def test_numbers_are_read_at_once(acc: Any) -> None:
    """Numbers on the device take one wait, numbers of the host none."""
    there = [torch.tensor(float(k), device="sim") for k in range(4)]
    acc.reset()
    assert plain_numbers([*there, 7.0]) == [0.0, 1.0, 2.0, 3.0, 7.0]
    assert len(acc.synchronisations()) == 1
    with acc.no_synchronisation():
        assert plain_numbers([1, 2.5]) == [1.0, 2.5]


def test_own_device(acc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """LOCAL_RANK chooses a device and makes it current; a choice that was made stays."""
    monkeypatch.setenv("LOCAL_RANK", "3")
    before = torch.accelerator.current_device_index()
    try:
        assert local_device() == torch.device("sim", 3)
        assert torch.accelerator.current_device_index() == 3
        monkeypatch.setenv("LOCAL_RANK", "1")
        assert local_device() == torch.device("sim", 3)
    finally:
        torch.accelerator.set_device_index(before)


def _twice(module: nn.Module, kept: Callable[[nn.Module], Any]) -> tuple[Tensor, Tensor]:
    """The gradients of a module that drops, plainly and with what is run again in between."""
    import copy

    x, found = torch.randn(6, WIDTH, device="sim"), []
    for change in (lambda one: None, kept):
        one = copy.deepcopy(module)
        change(one)
        torch.manual_seed(3)
        leaf = x.clone().requires_grad_()
        one(one(leaf)).square().sum().backward()
        assert leaf.grad is not None
        found.append(leaf.grad.cpu())
    return found[0], found[1]


AGAIN = {
    "checkpoint": lambda one: checkpoint(one),
    "in a budget": lambda one: limit_saved_bytes([one], 0),
}


@pytest.mark.parametrize("kind", AGAIN)
def test_the_same_masks_again(acc: Any, kind: str) -> None:
    """What is run again in backward drops what it dropped before."""
    plain, again = _twice(Block(0.5).to("sim"), AGAIN[kind])
    assert torch.equal(plain, again)


class Own(nn.Module):
    """Draws from a generator of its own, and from the device's."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.rand(x.shape, generator=self.generator).to(x.device)
        return x * mask + torch.rand_like(x)


def test_a_stage_again(acc: Any) -> None:
    """A stage that is run again draws alike, on its device and from generators of its own, and
    leaves both where the first run left them."""
    model, x = Own().to("sim"), torch.ones(4, 4, device="sim")
    kept = RecomputeInputs.capture({}, model, x.device)
    first = model(x).cpu()
    wanted = [one.get_state() for one in (model.generator, torch.sim.default_generators[0])]
    with kept.rng_states:
        assert torch.equal(model(x).cpu(), first)
    after = [one.get_state() for one in (model.generator, torch.sim.default_generators[0])]
    assert all(map(torch.equal, wanted, after))


def test_what_draws_is_seen(acc: Any) -> None:
    """A module that draws on its device is known as one that draws."""
    x = torch.randn(2, WIDTH, device="sim")
    assert draws_random(Block(0.5).to("sim"), ((x,), {})) and not draws_random(
        Block(0.0).to("sim"), ((x,), {})
    )


def test_a_scale_waits_for_nobody(acc: Any) -> None:
    """Gradients are unscaled, and what is found is told on, while the host goes on."""
    layer = nn.Linear(4, 4).to("sim")
    scale = LossScale(8.0, growth=2)
    for value, wanted in ((1.0, False), (float("inf"), True)):
        for p in layer.parameters():
            p.grad = torch.full_like(p, value)
        like = torch.zeros(3, dtype=torch.float64, device="sim")
        with acc.no_synchronisation():
            scale.unscale(dict(layer.named_parameters()))
            told = scale.overflow_flag(like)
        scale.set_overflow(told)
        assert scale.overflow is wanted and scale.update() is not wanted
    scale.unscale(dict(layer.named_parameters()))  # of a world of one, where nobody is told
    assert not scale.update() and scale.overflow


def test_a_norm_of_both_memories(acc: Any) -> None:
    """Gradients of the host are bounded with those of the device: the host waits for one number."""
    given = [torch.randn(3, 4, generator=torch.Generator().manual_seed(k)) for k in range(6)]
    parameters = {str(k): nn.Parameter(torch.zeros(3, 4)) for k in range(6)}
    held = {}
    for k, (name, wanted) in enumerate(zip(parameters, given)):
        parameters[name].grad = wanted.clone()
        held[name] = nn.Parameter(torch.zeros(3, 4, device="sim" if k % 2 else "cpu"))
        held[name].grad = wanted.to(held[name].device)
    norm = nn.utils.clip_grad_norm_(parameters.values(), 0.5)
    acc.reset()
    found = norm_on_one_rank(held, 0.5)
    assert len(acc.synchronisations()) == 1
    torch.testing.assert_close(found.cpu(), norm)
    for name, p in held.items():
        torch.testing.assert_close(p.grad.cpu(), parameters[name].grad)  # type: ignore[union-attr]


def test_labels_are_counted_at_once(acc: Any) -> None:
    """What all parts of a batch weigh takes one wait, however many parts there are."""
    rule = LabelRule("labels", (), -100)
    weigh = LabelWeight(rule)
    parts = [_batch(seed, "sim") for seed in range(5)]
    acc.reset()
    found = plain_numbers([weigh.counted(part) for part in parts])
    assert len(acc.synchronisations()) == 1
    assert found == [22.0] * 5 == [weigh(part) for part in parts]


def _sent(capacity: float | None) -> tuple[list[str], Tensor]:
    """Of two ranks that hold two experts each: waits of a rank's dispatch, and what came home."""
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
    here = accelerators.current()
    here.reset()
    if capacity is not None:
        capacity_mask(experts[:, None], 4, capacity)
    way = take()
    y = way.return_results(way.rows * (1 + way.experts)[:, None])
    waits = [str(one) for one in here.synchronisations()]
    return waits, (y - rows * (1 + experts)[:, None]).abs().max().cpu()


@pytest.mark.parametrize("capacity", [None, 1.0])
def test_a_dispatch_waits_once(acc: Any, capacity: float | None) -> None:
    """Rows on their way to experts make the host wait once, for how many go where."""
    for waits, gap in accelerators.spawn(_sent, capacity, ranks=2):
        assert len(waits) == 1, waits
        assert float(gap) == 0.0


def test_parked_on_the_host(acc: Any) -> None:
    """What a stage has saved goes to the host and back on a stream of its own: the host waits for
    nothing, and the backward for what comes back."""
    model, x = Block(0.0).to("sim"), torch.randn(64, WIDTH, device="sim")
    model(x).square().sum().backward()
    wanted = [p.grad.cpu() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    loss, bag, step, op = parked(model, x)
    assert bag.bytes
    with acc.no_synchronisation():
        offload(step, op)
        assert not bag.bytes
        torch.randn(256, 256, device="sim")  # takes what has become free
        reload(step, op)
        bag.restore()
        loss.backward()
    for p, grad in zip(model.parameters(), wanted, strict=True):
        assert p.grad is not None
        torch.testing.assert_close(p.grad.cpu(), grad)


def test_coded(acc: Any) -> None:
    """Of what is kept in few bits values are looked at in the first call, and never again; it is
    kept as on the CPU."""
    model, x = Block(0.0), torch.randn(64, WIDTH)
    same, tally, theirs = Block(0.0).to("sim"), QuantizationCounts(), QuantizationCounts()
    same.load_state_dict(model.state_dict())
    quantize_saved(model, "block", Quantization(8, 16), theirs)
    quantize_saved(same, "block", Quantization(8, 16), tally)
    for step in range(3):
        there = x.to("sim")
        acc.reset()
        found = _gradients(same, there)
        waits = [one.place for one in acc.synchronisations()]
        # the inputs of the norm and of both layers, and the mean that is too small
        assert tally.tensors == 3 * (step + 1) and len(waits) <= (0 if step else 5), waits
        for mine, wanted in zip(found, _gradients(model, x), strict=True):
            torch.testing.assert_close(mine.cpu(), wanted)
    assert tally == theirs


def _gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(x.clone().requires_grad_()).square().sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


class Cast(nn.Module):
    """Computes in 16 bits by a square weight, whose cast copy autograd saves."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x.bfloat16() @ self.weight.bfloat16()


def test_casts_of_weights_are_known_again(acc: Any) -> None:
    """A cast of a weight is told from an activation of its shape in the first call."""
    model, tally = Cast().to("sim"), QuantizationCounts()
    quantize_saved(model, "it", Quantization(8, 16), tally)
    for step in range(3):
        x = torch.randn(WIDTH, WIDTH, device="sim", requires_grad=True)
        acc.reset()
        model(x)
        waits = [one.place for one in acc.synchronisations()]
        assert tally.tensors == step + 1 and bool(waits) == (step == 0), waits


class Scores(nn.Module):
    """What was masked is given."""

    def forward(self, x: Tensor) -> Tensor:
        return x.log_softmax(-1)


@pytest.mark.parametrize("first", [True, False])
def test_scores_that_are_masked_later(acc: Any, first: bool) -> None:
    """Where the first call had no mask (or had one), later masked scores come back as they were,
    and the gradient is as near as without a mask."""
    module = Scores()
    quantize_saved(module, "it", Quantization(8, 16))
    scores = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    mask = torch.rand(8, 64, generator=torch.Generator().manual_seed(1)) < 0.2
    weigh = torch.randn(8, 64, generator=torch.Generator().manual_seed(2)).masked_fill(mask, 0)
    for masked in (first, True, False):
        x = scores.masked_fill(mask & masked, -torch.inf).to("sim").requires_grad_()
        (module(x).masked_fill(mask.to("sim"), 0.0) * weigh.to("sim")).sum().backward()
        exact = scores.masked_fill(mask & masked, -torch.inf).requires_grad_()
        (exact.log_softmax(-1).masked_fill(mask, 0.0) * weigh).sum().backward()
        assert x.grad is not None and exact.grad is not None
        far = (x.grad.cpu() - exact.grad).norm() / exact.grad.norm()
        assert float(far) < 0.01
