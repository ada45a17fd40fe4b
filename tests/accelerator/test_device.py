"""The simulated device: what runs as on the CPU, what is refused, what is reported."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from schedlang.testing.accelerator import current, spawn, unavailable

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())


def on_device(fn: Callable[[], Any]) -> Any:
    """Return what a function gives in a process with devices and no world; reports fail the
    test."""
    return spawn(fn, ranks=1, backend=None)[0]


def check_refused(fn: Callable[[], Any], pattern: str) -> None:
    with pytest.raises((RuntimeError, ValueError, TypeError), match=pattern):
        fn()


class Net(nn.Module):
    """Embedding, attention, a convolution and dropout."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(50, 32), nn.LayerNorm(32)
        self.qkv, self.out, self.head = nn.Linear(32, 96), nn.Linear(32, 32), nn.Linear(32, 50)
        self.conv, self.drop = nn.Conv1d(32, 32, 3, padding=1), drop

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = self.qkv(self.norm(x)).view(*ids.shape, 3, 4, 8).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.out(y.reshape(x.shape))
        x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        return self.head(F.dropout(F.gelu(x), self.drop))


def train_net(device: str) -> list[Tensor]:
    torch.manual_seed(0)
    net = Net().double().to(device)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    ids = torch.randint(0, 50, (2, 16), generator=torch.Generator().manual_seed(1)).to(device)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(net(ids).flatten(0, 1), ids.flatten()).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    return [p.detach().cpu() for p in net.parameters()]


def test_a_network_trains_as_on_the_cpu() -> None:
    """Attention, convolution, foreach AdamW and clipping give what the CPU gives."""
    for actual, expected in zip(on_device(lambda: train_net("sim")), train_net("cpu")):
        assert torch.allclose(actual, expected, atol=1e-9)


def test_devices_do_not_mix() -> None:
    """A tensor of the host or of another device is refused; numbers and indices are allowed."""

    def mix() -> None:
        x, host = torch.ones(3, device="sim"), torch.ones(3)
        check_refused(lambda: x + host, "same device")
        check_refused(lambda: host + x, "same device")
        check_refused(lambda: torch.cat([x, host]), "same device")
        check_refused(lambda: x + torch.ones(3, device="sim:1"), "sim:0 and sim:1")
        check_refused(
            lambda: F.linear(torch.ones(2, 3, device="sim"), torch.ones(3, 3)), "same device"
        )
        check_refused(lambda: x.numpy(), "")
        check_refused(lambda: torch.ones(1, device="sim:9"), "no device sim:9")
        assert (x + torch.tensor(2.0))[torch.tensor([0, 1])].tolist() == [3.0, 3.0]

    on_device(mix)


def test_memory_is_poisoned_and_counted() -> None:
    """Unwritten memory is NaN; live and peak bytes are counted."""

    def count() -> None:
        assert torch.empty(4, device="sim").isnan().all()
        torch.sim.reset_peak_memory_stats()  # type: ignore[attr-defined]
        before, _ = current().memory()
        x = torch.zeros(256, device="sim")
        y = x * 2
        assert current().memory()[0] - before == 2048
        del y
        current_bytes, peak = current().memory()
        assert (current_bytes - before, peak - before) == (1024, 2048)
        assert torch.sim.memory_allocated() == current_bytes  # type: ignore[attr-defined]

    on_device(count)


def test_modules_move_and_keep_their_parameters() -> None:
    """`.to` keeps Parameters and ties, storages are saved and resized, meta becomes real."""

    def move() -> None:
        net = nn.Linear(3, 3)
        weight = net.weight
        net.to("sim")
        assert net.weight is weight and weight.device.type == "sim"
        net(torch.ones(2, 3, device="sim")).sum().backward()
        assert weight.grad is not None and weight.grad.device.type == "sim"
        net.to("cpu")
        assert weight.grad.device.type == "cpu"
        with torch.device("meta"):
            on_meta = nn.Linear(3, 3)
        assert on_meta.to_empty(device="sim").weight.isnan().all()
        x = torch.arange(6.0, device="sim")
        file = io.BytesIO()
        torch.save(x, file)
        file.seek(0)
        assert torch.load(file).device.type == "sim"
        storage = x.untyped_storage()
        storage.resize_(0)
        storage.resize_(24)
        assert copy.deepcopy(x.fill_(2.0)).sum().item() == 12.0

    on_device(move)


def test_random_numbers_are_the_devices_own() -> None:
    """Seeds repeat them, states of 16 bytes are restored, the host's generator is unchanged."""

    def draw() -> None:
        torch.manual_seed(3)
        host = torch.get_rng_state()
        first = torch.randn(4, device="sim").cpu()
        F.dropout(torch.ones(8, device="sim"), 0.5)
        assert torch.equal(host, torch.get_rng_state())
        torch.manual_seed(3)
        assert torch.equal(first, torch.randn(4, device="sim").cpu())
        state = torch.sim.get_rng_state()  # type: ignore[attr-defined]
        assert state.numel() == 16
        once = F.dropout(torch.ones(100, device="sim"), 0.5).cpu()
        torch.sim.set_rng_state(state)  # type: ignore[attr-defined]
        assert torch.equal(once, F.dropout(torch.ones(100, device="sim"), 0.5).cpu())
        check_refused(lambda: torch.rand(3, device="sim", generator=torch.Generator()), "generator")

    on_device(draw)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_draws_the_same_masks(reentrant: bool) -> None:
    """torch.utils.checkpoint keeps the state of the device's generator."""

    def gradients() -> list[Tensor]:
        from torch.utils.checkpoint import checkpoint

        grads = []
        for recompute in (False, True):
            torch.manual_seed(5)
            net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)).to("sim")
            x = torch.ones(4, 8, device="sim", requires_grad=True)
            torch.manual_seed(6)
            y = checkpoint(net, x, use_reentrant=reentrant) if recompute else net(x)
            y.square().sum().backward()
            grads.append(net[0].weight.grad.cpu())
        return grads

    once, twice = on_device(gradients)
    assert torch.equal(once, twice)


def test_autocast_casts_as_for_cuda() -> None:
    """Products in bfloat16, norms and losses in float32."""

    def cast() -> None:
        net, x = nn.Linear(4, 4).to("sim"), torch.randn(2, 4, device="sim")
        with torch.autocast("sim", dtype=torch.bfloat16):
            y = net(x)
            assert y.dtype == torch.bfloat16
            assert F.layer_norm(y, (4,)).dtype == F.mse_loss(y, y).dtype == torch.float32
        y.sum().backward()
        assert torch.amp.GradScaler("sim").is_enabled()

    on_device(cast)


def reports(fn: Callable[[], Any], *, ranks: int = 1) -> list[str]:
    """Return the kinds of all reports of a function."""

    def told() -> list[str]:
        fn()
        current().settle()
        kinds = [f"{r.kind}: {r.first.op} {r.second.op}" for r in current().reports()]
        current().reset()
        return kinds

    return on_device(told)  # type: ignore[no-any-return]


def side_stream() -> Any:
    return torch.sim.Stream()  # type: ignore[attr-defined]


def current_stream() -> Any:
    return torch.accelerator.current_stream()


def test_a_use_on_another_stream_waits() -> None:
    """A read, a write after a read, and a write after a write race if they are not ordered."""

    def read(wait: bool) -> None:
        stream, x = side_stream(), torch.ones(4, device="sim")
        stream.wait_stream(current_stream())
        with stream:
            y = x * 2
        if wait:
            current_stream().wait_event(stream.record_event())
        y + 1

    def write() -> None:
        stream, x = side_stream(), torch.ones(4, device="sim")
        stream.wait_stream(current_stream())
        with stream:
            y = x * 2
        x.zero_()
        current_stream().wait_stream(stream)
        del y

    assert reports(lambda: read(True)) == []
    assert reports(lambda: read(False)) == ["race: aten::mul aten::add"]
    assert reports(write) == ["race: aten::mul aten::zero_"]


@pytest.mark.parametrize(("columns", "races"), [(4, 0), (3, 1)])
def test_parts_that_do_not_meet_do_not_race(columns: int, races: int) -> None:
    """Columns of a matrix interleave in memory; only bytes used by both are reported."""

    def parts() -> None:
        stream, x = side_stream(), torch.ones(8, 8, device="sim")
        stream.wait_stream(current_stream())
        with stream:
            x[:, :4].add_(1)
        x[:, columns:].add_(1)
        current_stream().wait_stream(stream)

    assert len(reports(parts)) == races


@pytest.mark.parametrize("recorded", [True, False])
def test_freed_memory_is_not_taken_too_early(recorded: bool) -> None:
    """Without record_stream, or an order, memory may be reused while another stream reads it."""

    def free() -> None:
        stream, x = side_stream(), torch.ones(4, device="sim")
        stream.wait_stream(current_stream())
        with stream:
            y = x * 2
        if recorded:
            x.record_stream(stream)
        del x
        torch.ones(4, device="sim")
        current_stream().wait_stream(stream)
        del y

    assert reports(free) == ([] if recorded else ["reuse: aten::mul aten::fill_"])


def test_copies_through_pinned_memory_end_late() -> None:
    """If the host uses it before it waits, that is NaN and reported; so is a change too early."""

    def out(early: Callable[[torch.Tensor], object]) -> None:
        host = torch.empty(4, pin_memory=True)
        host.copy_(torch.ones(4, device="sim"), non_blocking=True)
        early(host)
        torch.accelerator.synchronize()
        assert host.eq(1).all()

    def back(early: bool) -> None:
        host = torch.ones(4).pin_memory()
        host.to("sim", non_blocking=True)
        if not early:
            torch.accelerator.synchronize()
        host.zero_()

    uses = [
        lambda x: x.isnan().all(),
        lambda x: x[1:2].item(),
        lambda x: x.view(2, 2).add_(1),
        lambda x: torch.stack([x, x]),
        lambda x: x.clone(),
    ]
    for use in uses:
        kinds = reports(partial(out, use))
        assert kinds and all(kind.startswith("early use: copy to the host") for kind in kinds)
    harmless_uses = [
        lambda x: (x.shape, x.view(2, 2)[1], x.detach().numpy()),
        torch.empty_like,
        lambda x: torch.ones_like(x),
        lambda x: x.to("sim", non_blocking=True) + 1,
        lambda x: torch.empty(4, pin_memory=True).zero_(),
    ]
    for harmless in harmless_uses:
        assert reports(partial(out, harmless)) == []
    assert reports(lambda: back(False)) == []
    assert reports(lambda: back(True)) == ["changed source: copy to the device the program"]


WAITING = (
    lambda x: x.sum().item(),
    lambda x: x.tolist(),
    lambda x: x.cpu(),
    lambda x: x.nonzero(),
    lambda x: bool(x[0] > 0),
    lambda x: x[x > 0],
    lambda x: torch.equal(x, x),
    lambda x: x.unique(),
    lambda x: torch.tensor([1.0], device="sim"),
    lambda x: torch.accelerator.synchronize(),
    lambda x: current_stream().synchronize(),
    lambda x: x.repeat_interleave(torch.ones(4, device="sim", dtype=torch.long)),
)
FREE = (
    lambda x: x + 1,
    lambda x: x.sum(),
    lambda x: x[1:3] * 2.0,
    lambda x: torch.zeros(3, device="sim"),
    lambda x: x.to("cpu", non_blocking=True),
    lambda x: x.masked_fill(x > 0, 1.0),
    lambda x: F.dropout(x, 0.5),
    lambda x: torch._foreach_norm([x, x]),
)


def test_synchronisations_are_counted_with_their_line_or_forbidden() -> None:
    """Each operation that needs a value on the host counts as one, others as none."""

    def count() -> None:
        x = torch.ones(4, device="sim")
        for number, fn in enumerate(WAITING):
            current().reset()
            fn(x)
            waits = current().synchronisations()
            assert len(waits) == 1, (number, waits)
            assert "test_device.py:" in waits[0].place
            with current().no_synchronisation(), pytest.raises(RuntimeError, match="forbidden"):
                fn(x)
        current().reset()
        with current().strict():
            for fn in FREE:
                fn(x)
        assert current().synchronisations() == []

    on_device(count)


def test_what_could_run_at_once() -> None:
    """Two streams overlap until one waits for the other, and never with their common start."""

    def work() -> None:
        stream, x = side_stream(), torch.ones(4, device="sim")
        stream.wait_stream(current_stream())
        with stream, current().label("beside"):
            y = x * 2
        x + 1
        current_stream().wait_stream(stream)
        x - y

    def told() -> list[int]:
        work()
        simulation = current()
        return [
            len(simulation.could_overlap("beside", f"aten::{op}")) for op in ("fill_", "add", "sub")
        ]

    assert spawn(told, ranks=1, backend=None, timeline=True) == [[0, 1, 0]]
