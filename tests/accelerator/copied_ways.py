"""What schedlang keeps elsewhere, in each of the ways that reach another order of its copies.

Each returns how far training on the device is from plain training on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from schedlang.passes.lower.build import build
from schedlang.runtime.offload.offloaded_activations import ActivationStore, offload_all_sizes
from schedlang.runtime.offload.offloaded_activations import offload_activations as offloaded
from schedlang.runtime.pipeline.evicted_activations import offload, reload
from schedlang.runtime.storage import copies, offloaded_gradients
from schedlang.runtime.storage.offloaded_gradients import (
    gradient_of,
    offload_gradients,
    wait_for_offloaded,
)
from tests.accelerator.parked import parked as stage
from tests.accelerator.trained import Block, here
from tests.models import Stack
from tests.proofs import planned

WIDTH = 16


def blocks() -> nn.Module:
    """A few, and the mean square of what they give."""
    return Stack(Block(WIDTH) for _ in range(4)).double()


def rows(seed: int) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed)).double()


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def alone() -> list[Tensor]:
    """The parameters after three steps on the CPU."""
    model = blocks()
    optimizer = momentum(model.parameters())
    for seed in range(3):
        optimizer.zero_grad()
        model(rows(seed)).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def apart(found: list[Tensor], wanted: list[Tensor]) -> float:
    return max(float((a.cpu() - b.cpu()).abs().max()) for a, b in zip(found, wanted, strict=True))


def grads(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def built(text: str, mesh: str = "dp=1", device: torch.device | None = None) -> Any:
    """A program, and the three steps of `alone`; on the device of this rank, or another one."""
    device = device or here()
    model = blocks().to(device)
    with offload_all_sizes():
        plan = planned(model, text, mesh, relax="lossy")
        made = build(plan, {"x": rows(0)}, optimizer=lambda named: momentum([p for _, p in named]))
    for seed in range(3):
        made.train_step({"x": rows(seed).to(device)})
    return made


def trained(made: Any) -> float:
    state = made.state_dict()
    return apart([state[name] for name, _ in blocks().named_parameters()], alone())


def program(text: str, mesh: str = "dp=1", device: torch.device | None = None) -> float:
    """Three steps of a program."""
    return trained(built(text, mesh, device))


def parameters() -> float:
    return program("blocks.*  offload(parameters)")


def slices() -> float:
    """On two ranks, with two microbatches."""
    return program(
        'blocks.*  offload(parameters)\nzero(stage=3, over=dp)\npipeline(order="GPipe", micro=2)',
        "dp=2",
    )


def parameters_on_disk() -> float:
    return program("blocks.*  offload(parameters, to=disk)")


def gradients() -> float:
    return program("blocks.*  offload(gradients)")


def optimizer() -> float:
    return program("blocks.*  offload(optimizer)")


def optimizer_on_disk() -> float:
    return program("blocks.*  offload(optimizer, to=disk)")


def activations() -> float:
    return program("blocks.*  offload(activations)")


def activations_on_disk() -> float:
    return program("blocks.*  offload(activations, to=disk)")


def everything() -> float:
    return program(
        "blocks.*  offload(activations)\nblocks.*  offload(parameters)\noffload(optimizer)"
    )


def saved_behind() -> float:
    """Saved while another step runs, and taken up as it was before that."""
    made, given = built("blocks.*  checkpoint()"), {"x": rows(0).to(here())}
    with TemporaryDirectory() as folder:
        made.save(folder, wait=False)
        made.train_step(given)
        made.saved()
        made.load(folder)
    return trained(made)


def _leaving(more: Callable[[list[Tensor]], list[Tensor | None]]) -> float:
    """Gradients of more microbatches than may be in flight, asked for in some way."""
    model, plain = blocks().to(here()), blocks()
    given = [p for p in model.parameters()]
    offload_gradients(given)
    with mock.patch.object(offloaded_gradients, "_MAX_BYTES", 1024):
        for seed in range(3):
            model(rows(seed).to(here())).backward()
            plain(rows(seed)).backward()
    found = [grad for grad in more(list(given)) if grad is not None]
    return apart(found, grads(plain))


def gradients_asked() -> float:
    return _leaving(lambda given: [gradient_of(p) for p in given])


def gradients_arrived() -> float:
    def arrived(given: list[Tensor]) -> list[Tensor | None]:
        wait_for_offloaded(given)
        return [gradient_of(p) for p in given]

    return _leaving(arrived)


def gradients_of_one_microbatch() -> float:
    """None of them has had to be added."""
    layer, x = nn.Linear(WIDTH, WIDTH).double().to(here()), rows(0).to(here())
    offload_gradients(layer.parameters())
    layer(x).sum().backward()
    found = [gradient_of(p) for p in layer.parameters()]
    wanted = [x.sum(0).expand(WIDTH, WIDTH), torch.full((WIDTH,), float(len(x)))]
    return apart([one for one in found if one is not None], wanted)


def paced() -> float:
    """Activations of which no more than two calls are on their way."""
    model, plain = blocks().to(here()), blocks()
    with offload_all_sizes():
        store = ActivationStore(paced=True)
    for block in model.blocks:
        offloaded(block, store)
    model(rows(0).to(here())).backward()
    plain(rows(0)).backward()
    return apart(grads(model), grads(plain))


def parked() -> float:
    """What a stage has saved, on the host until its backward."""
    model, x = Block(WIDTH).double().to(here()), rows(0).to(here())
    plain = Block(WIDTH).double()
    plain.load_state_dict(model.state_dict())
    plain(rows(0)).square().sum().backward()
    loss, bag, step, op = stage(model, x)
    offload(step, op)
    filled = [torch.randn(64, WIDTH, device=here()) for _ in range(8)]  # takes what is free
    reload(step, op)
    bag.restore()
    loss.backward()
    del filled
    return apart(grads(model), grads(plain))


def there_and_back() -> float:
    """Out, read by the host; in again, used, and let go while it is still used."""
    x = rows(0).to(here())
    host = copies.to_host(x * 2)
    copies.wait_all()
    far = apart([host.clone()], [rows(0) * 2])
    for _ in range(2):  # the second takes the memory of the first
        there = copies.wait_copy(*copies.to_device(host, here()))
        y = there + 1
        del there
    return max(far, apart([y], [rows(0) * 2 + 1]))


def rewritten() -> float:
    """The host writes into memory that was on its way back."""
    host = copies.to_host(rows(0).to(here()))
    there, event = copies.to_device(host, here())
    copies.wait_all()
    host.zero_()
    return apart([copies.wait_copy(there, event)], [rows(0)])


def written() -> float:
    """Memory of the device, read, written from the host, and read again; then let go."""
    x, new = rows(0).to(here()) * 1, rows(1).pin_memory()
    before = x * 1
    copies.copy_into(x, new)
    after = x * 1
    return apart([before, after], [rows(0), rows(1)])


def marked() -> float:
    """The host waits for a mark, and reads."""
    from schedlang.runtime.device import host_wait

    host = copies.to_host(rows(0).to(here()))
    host_wait(copies.record_copies(here()))
    return apart([host.clone()], [rows(0)])


def lent() -> float:
    """The current stream writes from the host into memory of another, which then takes it again."""
    other = torch.Stream(here())
    with other:
        x = torch.zeros(8, WIDTH, dtype=torch.double, device=here())
    torch.accelerator.current_stream().wait_stream(other)
    copies.copy_into(x, rows(1).pin_memory())
    del x
    with other:
        again = torch.ones(8, WIDTH, dtype=torch.double, device=here())
    torch.accelerator.current_stream().wait_stream(other)
    return apart([again], [torch.ones(8, WIDTH)])


def gradients_in_turns() -> float:
    """Gradients of one parameter after the other come back for a step on the device."""
    from schedlang.runtime.offload import offloaded_step as away

    before, away.bucket_indices = (
        away.bucket_indices,
        lambda sizes: [[place] for place in range(len(sizes))],
    )
    try:
        return gradients()
    finally:
        away.bucket_indices = before


DIRECT = (
    *(there_and_back, rewritten, written, lent, marked, parked, gradients_asked, gradients_arrived),
    *(gradients_of_one_microbatch, paced),
)
PROGRAMS = (
    *(parameters, gradients, gradients_in_turns, optimizer, activations),
    *(parameters_on_disk, optimizer_on_disk, activations_on_disk, everything),
)
