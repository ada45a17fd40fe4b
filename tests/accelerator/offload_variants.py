"""Programs that offload something, one for each order of schedlang's copies.

Each returns the largest difference between training on the device and on the CPU.
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
from tests.accelerator.evicted_stage import run_forward as stage
from tests.accelerator.torch_training import Block, local_device
from tests.models import Stack
from tests.proofs import make_plan

WIDTH = 16


def block_stack() -> nn.Module:
    """Return a few blocks whose loss is the mean square of their output."""
    return Stack(Block(WIDTH) for _ in range(4)).double()


def rows(seed: int) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed)).double()


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def single_process() -> list[Tensor]:
    """Return the parameters after three steps on the CPU."""
    model = block_stack()
    optimizer = momentum(model.parameters())
    for seed in range(3):
        optimizer.zero_grad()
        model(rows(seed)).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def max_error(actual: list[Tensor], expected: list[Tensor]) -> float:
    return max(
        float((a.cpu() - b.cpu()).abs().max()) for a, b in zip(actual, expected, strict=True)
    )


def grads(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def train_program(text: str, mesh: str = "dp=1", device: torch.device | None = None) -> Any:
    """Train a program for the three steps of `single_process`, on this rank's device or another."""
    device = device or local_device()
    model = block_stack().to(device)
    with offload_all_sizes():
        plan = make_plan(model, text, mesh, relax="lossy")
        program = build(
            plan, {"x": rows(0)}, optimizer=lambda named: momentum([p for _, p in named])
        )
    for seed in range(3):
        program.train_step({"x": rows(seed).to(device)})
    return program


def training_error(program: Any) -> float:
    state = program.state_dict()
    return max_error(
        [state[name] for name, _ in block_stack().named_parameters()], single_process()
    )


def program_error(text: str, mesh: str = "dp=1", device: torch.device | None = None) -> float:
    """Return the largest error of a program after three steps."""
    return training_error(train_program(text, mesh, device))


def parameters() -> float:
    return program_error("blocks.*  offload(parameters)")


def sharded_parameters() -> float:
    """On two ranks, with two microbatches."""
    return program_error(
        'blocks.*  offload(parameters)\nzero(stage=3, over=dp)\npipeline(order="GPipe", micro=2)',
        "dp=2",
    )


def parameters_on_disk() -> float:
    return program_error("blocks.*  offload(parameters, to=disk)")


def gradients() -> float:
    return program_error("blocks.*  offload(gradients)")


def optimizer() -> float:
    return program_error("blocks.*  offload(optimizer)")


def optimizer_on_disk() -> float:
    return program_error("blocks.*  offload(optimizer, to=disk)")


def activations() -> float:
    return program_error("blocks.*  offload(activations)")


def activations_on_disk() -> float:
    return program_error("blocks.*  offload(activations, to=disk)")


def all_offloaded() -> float:
    return program_error(
        "blocks.*  offload(activations)\nblocks.*  offload(parameters)\noffload(optimizer)"
    )


def background_save() -> float:
    """Save while another step runs, then load: the state is that before the step."""
    program, inputs = train_program("blocks.*  checkpoint()"), {"x": rows(0).to(local_device())}
    with TemporaryDirectory() as folder:
        program.save(folder, wait=False)
        program.train_step(inputs)
        program.saved()
        program.load(folder)
    return training_error(program)


def _gradients_error(read_gradients: Callable[[list[Tensor]], list[Tensor | None]]) -> float:
    """Offload gradients of more microbatches than may be in flight, and read them in some way."""
    model, plain = block_stack().to(local_device()), block_stack()
    params = [p for p in model.parameters()]
    offload_gradients(params)
    with mock.patch.object(offloaded_gradients, "_MAX_BYTES", 1024):
        for seed in range(3):
            model(rows(seed).to(local_device())).backward()
            plain(rows(seed)).backward()
    actual = [grad for grad in read_gradients(list(params)) if grad is not None]
    return max_error(actual, grads(plain))


def gradients_on_request() -> float:
    return _gradients_error(lambda params: [gradient_of(p) for p in params])


def gradients_awaited() -> float:
    def arrived(params: list[Tensor]) -> list[Tensor | None]:
        wait_for_offloaded(params)
        return [gradient_of(p) for p in params]

    return _gradients_error(arrived)


def single_microbatch() -> float:
    """Gradients to which none has been added."""
    layer, x = nn.Linear(WIDTH, WIDTH).double().to(local_device()), rows(0).to(local_device())
    offload_gradients(layer.parameters())
    layer(x).sum().backward()
    actual = [gradient_of(p) for p in layer.parameters()]
    expected = [x.sum(0).expand(WIDTH, WIDTH), torch.full((WIDTH,), float(len(x)))]
    return max_error([grad for grad in actual if grad is not None], expected)


def limited_copies() -> float:
    """Offload activations with at most two calls in flight."""
    model, plain = block_stack().to(local_device()), block_stack()
    with offload_all_sizes():
        store = ActivationStore(paced=True)
    for block in model.blocks:
        offloaded(block, store)
    model(rows(0).to(local_device())).backward()
    plain(rows(0)).backward()
    return max_error(grads(model), grads(plain))


def evicted_stage() -> float:
    """Evict what a stage saved to the host until its backward."""
    model, x = Block(WIDTH).double().to(local_device()), rows(0).to(local_device())
    plain = Block(WIDTH).double()
    plain.load_state_dict(model.state_dict())
    plain(rows(0)).square().sum().backward()
    loss, bag, step, op = stage(model, x)
    offload(step, op)
    filled = [torch.randn(64, WIDTH, device=local_device()) for _ in range(8)]  # takes free memory
    reload(step, op)
    bag.restore()
    loss.backward()
    del filled
    return max_error(grads(model), grads(plain))


def round_trip() -> float:
    """Copy to the host and read it; copy back, use it, and free it while it is in use."""
    x = rows(0).to(local_device())
    host = copies.to_host(x * 2)
    copies.wait_all()
    error = max_error([host.clone()], [rows(0) * 2])
    for _ in range(2):  # the second takes the memory of the first
        on_device = copies.wait_copy(*copies.to_device(host, local_device()))
        y = on_device + 1
        del on_device
    return max(error, max_error([y], [rows(0) * 2 + 1]))


def host_rewritten() -> float:
    """The host writes into memory that is being copied to the device."""
    host = copies.to_host(rows(0).to(local_device()))
    on_device, event = copies.to_device(host, local_device())
    copies.wait_all()
    host.zero_()
    return max_error([copies.wait_copy(on_device, event)], [rows(0)])


def device_written() -> float:
    """Read device memory, write to it from the host, read it again, then free it."""
    x, new = rows(0).to(local_device()) * 1, rows(1).pin_memory()
    before = x * 1
    copies.copy_into(x, new)
    after = x * 1
    return max_error([before, after], [rows(0), rows(1)])


def recorded_copies() -> float:
    """The host waits for a recorded event, and reads."""
    from schedlang.runtime.device import host_wait

    host = copies.to_host(rows(0).to(local_device()))
    host_wait(copies.record_copies(local_device()))
    return max_error([host.clone()], [rows(0)])


def borrowed_memory() -> float:
    """The current stream writes from the host into memory of another stream, which reuses it
    then."""
    side = torch.Stream(local_device())
    with side:
        x = torch.zeros(8, WIDTH, dtype=torch.double, device=local_device())
    torch.accelerator.current_stream().wait_stream(side)
    copies.copy_into(x, rows(1).pin_memory())
    del x
    with side:
        ones = torch.ones(8, WIDTH, dtype=torch.double, device=local_device())
    torch.accelerator.current_stream().wait_stream(side)
    return max_error([ones], [torch.ones(8, WIDTH)])


def single_buckets() -> float:
    """Gradients come back to the device for a step one parameter after the other."""
    from schedlang.runtime.offload import offloaded_step as away

    before, away.bucket_indices = (
        away.bucket_indices,
        lambda sizes: [[index] for index in range(len(sizes))],
    )
    try:
        return gradients()
    finally:
        away.bucket_indices = before


DIRECT = (
    *(
        round_trip,
        host_rewritten,
        device_written,
        borrowed_memory,
        recorded_copies,
        evicted_stage,
        gradients_on_request,
        gradients_awaited,
    ),
    *(single_microbatch, limited_copies),
)
PROGRAMS = (
    *(parameters, gradients, single_buckets, optimizer, activations),
    *(parameters_on_disk, optimizer_on_disk, activations_on_disk, all_offloaded),
)
