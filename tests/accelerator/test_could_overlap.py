"""Overlap on simulated devices: which collectives and copies can run beside computation.

The timeline of a simulated device tells which operations are not ordered (`could_overlap`). torch's
own DDP and FSDP2, with streams that wait too early, show that these tests can fail.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedlang.passes.lower.build import build
from schedlang.runtime.offload import offloaded_step as away
from schedlang.runtime.offload.offloaded_activations import offload_all_sizes
from schedlang.testing.accelerator import Operation, could_overlap, current, spawn, unavailable
from tests.accelerator.test_features_run import RING, STAGE_SPLIT, ZERO_0, float32_model
from tests.accelerator.test_features_run import batch as tokens
from tests.accelerator.torch_training import Block, batch, local_device, loss, model
from tests.models import Stack
from tests.proofs import make_plan

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "it is there")

PRODUCTS = ("aten::addmm", "aten::mm", "aten::bmm", "aten::_scaled_dot_product")
Overlaps = list[tuple[int, int]]  # for each operation: matrix products of forward, of backward


def in_backward(operation: Operation) -> bool:
    return "of backward" in operation.place


def product_overlaps(*names: str) -> Overlaps:
    """Return on a rank, for each operation of these names, how many matrix products could overlap
    it."""
    operations = current().operations()
    products = [operation for operation in operations if operation.name.startswith(PRODUCTS)]
    counts = []
    for operation in operations:
        if operation.name in names:
            overlapping = [p for p in products if could_overlap(operation, p)]
            counts.append(
                (sum(not in_backward(p) for p in overlapping), sum(map(in_backward, overlapping)))
            )
    return counts


def record_step(step: Callable[[], Any], warm: int = 2) -> None:
    """Run some steps on a rank; the timeline has only the one after them."""
    for _ in range(warm):
        step()
    current().reset()
    step()


# -- torch's own -----------------------------------------------------------------------------------


def ddp_overlaps(early: bool) -> Overlaps:
    """Return the overlaps of DDP's sums on a rank; `early`: its hook waits for each."""
    wrapped = nn.parallel.DistributedDataParallel(model().to(local_device()), bucket_cap_mb=0.004)

    def hook(state: None, bucket: Any) -> Any:
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        work.wait()
        return work.get_future().then(lambda future: future.value()[0])

    hook.__annotations__.clear()  # torch would compare these annotations with types
    if early:
        wrapped.register_comm_hook(None, hook)  # type: ignore[operator]
    rows = batch(dist.get_rank()).to(local_device())
    record_step(lambda: loss(wrapped(rows)).backward())
    return product_overlaps("simccl.all_reduce")


def fsdp_overlaps(early: str) -> tuple[Overlaps, Overlaps]:
    """Return the overlaps of FSDP2's gathers and sums on a rank; `early` names what waits too
    early."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as inner

    root = model().to(local_device())
    for block in root:
        fully_shard(block)
    fully_shard(root)
    rows = batch(dist.get_rank()).to(local_device())
    post_backward: Any = inner.FSDPParamGroup.post_backward

    def waiting(self: Any, *unused: Any) -> None:
        post_backward(self)
        torch.accelerator.current_stream().wait_stream(self.comm_ctx.reduce_scatter_stream)

    def plain(self: Any, *unused: Any) -> Any:
        return (torch.accelerator.current_stream(),) * 2

    patches = {
        "gathers": mock.patch.object(inner.FSDPCommContext, "get_all_gather_streams", plain),
        "sums": mock.patch.object(inner.FSDPParamGroup, "post_backward", waiting),
    }
    with patches[early] if early else mock.patch.dict({}):
        record_step(lambda: loss(root(rows)).backward())
    gathers = product_overlaps("simccl.all_gather_into_tensor")
    return gathers, product_overlaps("simccl.reduce_scatter_tensor")


def test_sums_of_ddp() -> None:
    """Sums of later blocks, two each, overlap backward; where a hook waits for each, none does."""
    for overlaps in spawn(ddp_overlaps, False, timeline=True):
        assert len(overlaps) == 6 and all(b and not f for f, b in overlaps[:4])
    for overlaps in spawn(ddp_overlaps, True, timeline=True):
        assert len(overlaps) == 6 and not any(f or b for f, b in overlaps)


def test_gathers_and_sums_of_fsdp() -> None:
    """Gathers overlap the block before, sums the block after them."""
    for gathers, sums in spawn(fsdp_overlaps, "", timeline=True):
        assert len(gathers) == 6  # each block in forward, and again in backward, the last one first
        assert all(f for f, _ in gathers[1:3]) and all(b for _, b in gathers[4:])
        assert all(b for _, b in sums[:-1])
    for gathers, sums in spawn(fsdp_overlaps, "gathers", timeline=True):
        assert not any(f or b for f, b in gathers) and any(b for _, b in sums)
    for gathers, sums in spawn(fsdp_overlaps, "sums", timeline=True):
        assert not any(b for _, b in sums) and any(f for f, _ in gathers)


# -- slices under a pipeline -----------------------------------------------------------------------

WIDTH, DEPTH, MICRO = 64, 8, 4
HALF = DEPTH // 2


def deep_model() -> nn.Module:
    """Return blocks of which two stages have half each."""
    return Stack(Block(WIDTH) for _ in range(DEPTH))


def rows() -> Tensor:
    return torch.randn(4 * MICRO, WIDTH, generator=torch.Generator().manual_seed(0))


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)


def stage_overlaps(zero: str, order: str = 'order="1F1B"') -> Any:
    """Return on a rank the overlaps of a stage's gathers and sums, and its peak bytes."""
    text = f"zero({zero}, over=dp)\npipeline({order}, micro={MICRO})"
    plan = make_plan(deep_model(), f"blocks  pipeline_split(over=pp)\n{text}", "dp=2, pp=2")
    program = build(plan, {"x": rows()}, optimizer=sgd)
    inputs = {"x": rows().to(local_device())}
    return measure(lambda: program.train_step(inputs))


def torch_overlaps(zero: int) -> Any:
    """Return the same for `fully_shard` around half of the blocks, with a 1F1B written here."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("sim", (2, 2), mesh_dim_names=("dp", "pp"))
    groups = [dist.new_group(ranks) for _ in range(2) for ranks in ([0, 1], [2, 3])]
    up, down = groups[mesh.get_rank() // 2 :: 2]
    stage = mesh["pp"].get_local_rank()
    peer = mesh.get_rank() + (-1 if stage else 1)
    part: Any = nn.Sequential(*deep_model().blocks[stage * HALF :][:HALF]).to(local_device())  # type: ignore[index]
    for block in part:
        fully_shard(block, mesh=mesh["dp"], reshard_after_forward=zero == 3)
    fully_shard(part, mesh=mesh["dp"])
    optimizer = sgd(part.named_parameters())
    micro = rows().to(local_device()).chunk(2)[mesh["dp"].get_local_rank()].chunk(MICRO)

    def received(template: Tensor, group: Any) -> Tensor:
        buffer = torch.empty_like(template)
        dist.irecv(buffer, peer, group=group).wait()
        return buffer

    def forward(k: int) -> tuple[Tensor, Tensor]:
        x = received(micro[k], up).requires_grad_() if stage else micro[k]
        y = part(x)
        if stage:
            return x, y.square().mean() / (2 * MICRO)
        sent.append((dist.isend(y.detach(), peer, group=up), y.detach()))
        return x, y

    def backward(k: int) -> None:
        x, y = saved.pop(k)
        part.set_is_last_backward(k == MICRO - 1)
        part.set_reshard_after_backward(zero == 3 or k == MICRO - 1)
        y.backward(None if stage else received(y, down))
        if stage:
            sent.append((dist.isend(x.grad, peer, group=down), x.grad))

    saved: dict[int, tuple[Tensor, Tensor]] = {}
    sent: list[Any] = []

    def step() -> None:
        optimizer.zero_grad()
        for k in range(MICRO + 1 - stage):
            if k < MICRO:
                saved[k] = forward(k)
            if k >= 1 - stage:
                backward(k - 1 + stage)
        for work, _ in sent:
            work.wait()
        sent.clear()
        optimizer.step()

    return measure(step)


def measure(step: Callable[[], Any]) -> tuple[Overlaps, Overlaps, int]:
    """Return on a rank the overlaps of gathers and sums in the third step, and its peak bytes."""
    for _ in range(2):
        step()
    current().reset()
    torch.sim.reset_peak_memory_stats()  # type: ignore[attr-defined]
    step()
    gathers = product_overlaps("simccl.all_gather_into_tensor")
    return (
        gathers,
        product_overlaps("simccl.reduce_scatter_tensor"),
        current().memory(dist.get_rank())[1],
    )


@pytest.mark.parametrize("zero", [2, 3])
def test_slices_in_stages(zero: int) -> None:
    """Gathers and sums of a stage overlap, in no more memory than torch needs."""
    schedlang_runs = spawn(stage_overlaps, f"stage={zero}", ranks=4, timeline=True)
    torch_runs = spawn(torch_overlaps, zero, ranks=4, timeline=True)
    for (gathers, sums, peak), (_, _, torch_peak) in zip(schedlang_runs, torch_runs):
        assert peak <= 1.01 * torch_peak
        # each microbatch again, or all in one step; the first one has nothing before it
        assert len(gathers) == (2 * MICRO * HALF if zero == 3 else HALF)
        # the first block of a pass has nothing before it; backward follows on what forward has left
        idle = [index for index, (f, b) in enumerate(gathers) if not f and not b]
        assert all(index % HALF == 0 for index in idle) and len(idle) <= (MICRO if zero == 3 else 1)
        assert len(sums) == MICRO * HALF and all(b for _, b in sums[:-1]) and sums[-1] == (0, 0)


def test_slices_of_several_stages() -> None:
    """A rank with two stages uses the streams of one; sums of both free their inputs."""
    order = 'order="Interleaved1F1B", chunks=2'
    for zero in (2, 3):
        single_stage = spawn(stage_overlaps, f"stage={zero}", ranks=4, timeline=True)
        two_stages = spawn(stage_overlaps, f"stage={zero}", order, ranks=4, timeline=True)
        for (_, _, single_peak), (_, sums, peak) in zip(single_stage, two_stages):
            assert peak <= 1.05 * single_peak
            assert len(sums) == MICRO * HALF and sums.count((0, 0)) <= 2  # the last of each stage


def chained(zero: str) -> tuple[int, bool]:
    """Return on a rank how many gathers are ordered after its first receive, and whether its last
    send is ordered after its last sum: for these another stage would wait."""
    text = f'zero({zero}, over=dp)\npipeline(order="1F1B", micro={MICRO})'
    plan = make_plan(deep_model(), f"blocks  pipeline_split(over=pp)\n{text}", "dp=2, pp=2")
    program = build(plan, {"x": rows()}, optimizer=sgd)
    inputs = {"x": rows().to(local_device())}
    record_step(lambda: program.train_step(inputs))
    receives, sends, gathers, sums = (
        [item for item in current().operations() if item.name == f"simccl.{name}"]
        for name in ("recv", "send", "all_gather_into_tensor", "reduce_scatter_tensor")
    )
    late = sum(item.after(receives[0]) for item in gathers)
    return late, sends[-1].after(sums[-1])


@pytest.mark.parametrize("zero", [1, 2])
def test_stages_wait_for_no_gather_and_no_sum(zero: int) -> None:
    """Gathers begin before the first values arrive; gradients leave while the last are summed."""
    for rank, orders in enumerate(spawn(chained, f"stage={zero}", ranks=4, timeline=True)):
        if rank % 2:  # of the last stage
            assert orders == (0, False)


# -- every other kind ------------------------------------------------------------------------------

TO_HOST, TO_DEVICE = "copy to the host", "copy to the device"


def program_overlaps(
    mesh: str, text: str, names: tuple[str, ...], use_tokens: bool
) -> list[Overlaps]:
    """Return on a rank what could overlap matrix products in a step of a program, by name."""
    inputs = tokens(0) if use_tokens else {"x": rows()}
    with offload_all_sizes():
        plan = make_plan(float32_model() if use_tokens else deep_model(), text, mesh)
        program = build(plan, inputs, optimizer=sgd)
    inputs = {name: value.to(local_device()) for name, value in inputs.items()}
    record_step(lambda: program.train_step(inputs))
    return [product_overlaps(name) for name in names]


def overlaps_on_ranks(mesh: str, text: str, *names: str, words: bool = False) -> Any:
    return spawn(program_overlaps, mesh, text, names, words, timeline=True)


def count_exposed(overlaps: Overlaps) -> int:
    """Return how many of these nothing could overlap."""
    return overlaps.count((0, 0))


def test_sums_of_gradients() -> None:
    """Bucket sums overlap backward with `overlap(gradients)`, and without it none does."""
    text = "zero(stage=0, over=dp, bucket=40KiB)"
    for (sums,) in overlaps_on_ranks("dp=2", f"{text}\noverlap(gradients)", "simccl.all_reduce"):
        # two buckets of each block, the last two and the sum of losses behind all of backward
        assert len(sums) > 2 * DEPTH and all(b for _, b in sums[: 2 * DEPTH - 2])
    for (sums,) in overlaps_on_ranks("dp=2", text, "simccl.all_reduce"):
        assert len(sums) > 2 * DEPTH and count_exposed(sums) == len(sums)


def test_gathers_of_parameters() -> None:
    """Without a pipeline: gathers overlap the block before, in backward the block after."""
    for (gathers,) in overlaps_on_ranks(
        "dp=2", "zero(stage=3, over=dp)", "simccl.all_gather_into_tensor"
    ):
        assert len(gathers) == 2 * DEPTH and count_exposed(gathers) == 1
        assert all(b for _, b in gathers[DEPTH + 1 :])


@pytest.mark.parametrize("stages", [False, True])
def test_activations_on_the_host(stages: bool) -> None:
    """Copies out overlap the next forward, copies back overlap backward."""
    text = "blocks.*  offload(activations)\n"
    text += f'{STAGE_SPLIT}pipeline(order="1F1B", micro={MICRO})' if stages else ZERO_0
    for to_host, to_device in overlaps_on_ranks(
        "pp=2" if stages else "dp=2", text, TO_HOST, TO_DEVICE
    ):
        assert len(to_host) >= 5 * DEPTH and count_exposed(to_host) == 0
        assert len(to_device) >= 5 * DEPTH and count_exposed(to_device) == 0


def test_parameters_on_the_host() -> None:
    """Copies in overlap the block before, and gradients leave during backward."""
    count = 6 * DEPTH  # parameters
    for to_host, to_device in overlaps_on_ranks(
        "dp=2", f"{ZERO_0}blocks.*  offload(parameters)", TO_HOST, TO_DEVICE
    ):
        # the first block has nothing before it, the last gradients nothing behind; one is the sum's
        assert all(f or b for f, b in to_device[6 : 2 * count])
        assert all(b for _, b in to_host[: count - 6])
    for overlapping in spawn(copies_both_ways, timeline=True):
        assert (
            overlapping
        )  # gradients of a block leave while the parameters of the one before it come


def copies_both_ways() -> int:
    """Return on a rank how many copies to the host could overlap copies back in backward."""
    program_overlaps("dp=2", f"{ZERO_0}blocks.*  offload(parameters)", (), False)
    operations = [operation for operation in current().operations() if in_backward(operation)]
    to_host, to_device = (
        [operation for operation in operations if operation.name == name]
        for name in (TO_HOST, TO_DEVICE)
    )
    return sum(could_overlap(operation, other) for operation in to_host for other in to_device)


def prefetched(state: str) -> list[tuple[bool, bool]]:
    """Return for each parameter whether its copies for the step could come while those of the one
    before it, and of the one before that, go back."""
    with mock.patch.object(away, "bucket_indices", lambda sizes: [[k] for k in range(len(sizes))]):
        program_overlaps("dp=2", f"{ZERO_0}{state}", (), False)
    operations = current().operations()
    stores, fetches_flat = (
        [operation for operation in operations if operation.name == name]
        for name in (TO_DEVICE, TO_HOST)
    )
    per_parameter = len(fetches_flat) // len(stores)  # of a parameter: its values, and its gradient
    assert len(stores) == 6 * DEPTH and len(fetches_flat) == per_parameter * len(stores)
    fetches = [
        fetches_flat[k * per_parameter : k * per_parameter + per_parameter]
        for k in range(len(stores))
    ]
    return [
        tuple(
            all(could_overlap(f, stores[k - distance]) for f in fetches[k]) for distance in (1, 2)
        )
        for k in range(2, len(stores))
    ]


def test_optimizer_state_on_the_host() -> None:
    """While the host steps on some parameters, the next come and the last go back."""
    for overlaps in spawn(prefetched, "offload(optimizer)", timeline=True):
        assert all(pair == (True, True) for pair in overlaps)


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("micro", [1, 2])
def test_slices_on_the_host(zero: int, micro: int) -> None:
    """Gathers from the host and gradients that leave overlap computation, and no microbatch waits
    for them."""
    text = f"zero(stage={zero}, over=dp)\nblocks.*  offload(parameters)"
    text += f'\npipeline(order="GPipe", micro={micro})' if micro > 1 else ""
    names = ("simccl.all_gather_into_tensor", "simccl.reduce_scatter_tensor", TO_HOST)
    for gathers, sums, to_host in overlaps_on_ranks("dp=2", text, *names):
        assert count_exposed(gathers) <= micro
        assert len(sums) == micro * DEPTH and count_exposed(sums) == 1
        assert len(to_host) == 6 * len(sums) and count_exposed(to_host) <= 6


def test_transfers_between_stages() -> None:
    """Activations of the next microbatch and gradients of the last travel during computation."""
    text = f'{STAGE_SPLIT}pipeline(order="1F1B", micro={MICRO})'
    names = ("simccl.send", "simccl.recv")
    for rank, (sends, receives) in enumerate(overlaps_on_ranks("pp=2", text, *names)):
        assert len(sends) == len(receives) == MICRO
        # the last stage has nothing to do before the first values, and nothing after the last
        assert count_exposed(sends) == count_exposed(receives) == rank


@pytest.mark.parametrize("layout", ["ring", "ring, layout=zigzag"])
def test_steps_of_a_ring(layout: str) -> None:
    """The next keys travel during attention to the present ones; the last step home is exposed."""
    text = RING.format(layout, "cp", "cp")
    names = ("simccl.send", "simccl.recv")
    for by_name in overlaps_on_ranks("cp=2", text, *names, words=True):
        for overlaps in by_name:
            # four blocks: one step of keys forward, one of keys and one of gradients backward
            assert (
                len(overlaps) == 12
                and all(f for f, _ in overlaps[:4])
                and count_exposed(overlaps[4:]) == 4
            )
