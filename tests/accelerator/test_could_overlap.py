"""What has to be able to run at once in a step: collectives and copies beside computation.

The timeline of a simulated device tells which operations nothing orders (`could_overlap`). That
these tests can fail shows on torch's own DDP and FSDP2, with streams that wait too early.
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
from tests.accelerator.test_features_run import CUT, RING, SUM, single
from tests.accelerator.test_features_run import batch as tokens
from tests.accelerator.trained import Block, batch, here, loss, model
from tests.models import Stack
from tests.proofs import planned

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "it is there")

PRODUCTS = ("aten::addmm", "aten::mm", "aten::bmm", "aten::_scaled_dot_product")
Beside = list[tuple[int, int]]  # of each operation in turn: products of forward, of backward


def back(one: Operation) -> bool:
    return "of backward" in one.place


def beside(*names: str) -> Beside:
    """On a rank: of each operation of these names how many matrix products could run with it."""
    seen = current().operations()
    products = [one for one in seen if one.name.startswith(PRODUCTS)]
    found = []
    for one in seen:
        if one.name in names:
            mine = [p for p in products if could_overlap(one, p)]
            found.append((sum(not back(p) for p in mine), sum(map(back, mine))))
    return found


def watched(step: Callable[[], Any], warm: int = 2) -> None:
    """On a rank: the timeline begins with the step that follows some others."""
    for _ in range(warm):
        step()
    current().reset()
    step()


# -- torch's own -----------------------------------------------------------------------------------


def in_ddp(early: bool) -> Beside:
    """On a rank: the sums of DDP; `early`: its hook waits for each."""
    found = nn.parallel.DistributedDataParallel(model().to(here()), bucket_cap_mb=0.004)

    def hook(state: None, bucket: Any) -> Any:
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        work.wait()
        return work.get_future().then(lambda future: future.value()[0])

    hook.__annotations__.clear()  # torch would compare these strings with types
    if early:
        found.register_comm_hook(None, hook)  # type: ignore[operator]
    rows = batch(dist.get_rank()).to(here())
    watched(lambda: loss(found(rows)).backward())
    return beside("simccl.all_reduce")


def in_fsdp(wrong: str) -> tuple[Beside, Beside]:
    """On a rank: the gathers and the sums of FSDP2, right or with streams that wait too early."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as inner

    found = model().to(here())
    for block in found:
        fully_shard(block)
    fully_shard(found)
    rows = batch(dist.get_rank()).to(here())
    summed: Any = inner.FSDPParamGroup.post_backward

    def waiting(self: Any, *unused: Any) -> None:
        summed(self)
        torch.accelerator.current_stream().wait_stream(self.comm_ctx.reduce_scatter_stream)

    def plain(self: Any, *unused: Any) -> Any:
        return (torch.accelerator.current_stream(),) * 2

    patches = {
        "gathers": mock.patch.object(inner.FSDPCommContext, "get_all_gather_streams", plain),
        "sums": mock.patch.object(inner.FSDPParamGroup, "post_backward", waiting),
    }
    with patches[wrong] if wrong else mock.patch.dict({}):
        watched(lambda: loss(found(rows)).backward())
    gathers = beside("simccl.all_gather_into_tensor")
    return gathers, beside("simccl.reduce_scatter_tensor")


def test_sums_of_ddp() -> None:
    """Those of later blocks, two each, run beside what is left of backward; where a hook waits
    for each, none."""
    for found in spawn(in_ddp, False, timeline=True):
        assert len(found) == 6 and all(b and not f for f, b in found[:4])
    for found in spawn(in_ddp, True, timeline=True):
        assert len(found) == 6 and not any(f or b for f, b in found)


def test_gathers_and_sums_of_fsdp() -> None:
    """Blocks are gathered beside the one before, and summed beside the one after them."""
    for gathers, sums in spawn(in_fsdp, "", timeline=True):
        assert len(gathers) == 6  # each block in forward, and again in backward, the last one first
        assert all(f for f, _ in gathers[1:3]) and all(b for _, b in gathers[4:])
        assert all(b for _, b in sums[:-1])
    for gathers, sums in spawn(in_fsdp, "gathers", timeline=True):
        assert not any(f or b for f, b in gathers) and any(b for _, b in sums)
    for gathers, sums in spawn(in_fsdp, "sums", timeline=True):
        assert not any(b for _, b in sums) and any(f for f, _ in gathers)


# -- slices under a pipeline -----------------------------------------------------------------------

WIDTH, DEPTH, MICRO = 64, 8, 4
HALF = DEPTH // 2


def deep() -> nn.Module:
    """Blocks of which two stages have half each."""
    return Stack(Block(WIDTH) for _ in range(DEPTH))


def rows() -> Tensor:
    return torch.randn(4 * MICRO, WIDTH, generator=torch.Generator().manual_seed(0))


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)


def in_stages(zero: str, order: str = 'order="1F1B"') -> Any:
    """On a rank: gathers and sums of a stage, and its most bytes, in a step of 1F1B."""
    text = f"zero({zero}, over=dp)\npipeline({order}, micro={MICRO})"
    plan = planned(deep(), f"blocks  pipeline_split(over=pp)\n{text}", "dp=2, pp=2")
    program = build(plan, {"x": rows()}, optimizer=sgd)
    given = {"x": rows().to(here())}
    return measured(lambda: program.train_step(given))


def by_hand(zero: int) -> Any:
    """On a rank: the same of `fully_shard` around half of the blocks, in an order written here."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("sim", (2, 2), mesh_dim_names=("dp", "pp"))
    lines = [dist.new_group(ranks) for _ in range(2) for ranks in ([0, 1], [2, 3])]
    up, down = lines[mesh.get_rank() // 2 :: 2]
    stage = mesh["pp"].get_local_rank()
    peer = mesh.get_rank() + (-1 if stage else 1)
    part: Any = nn.Sequential(*deep().blocks[stage * HALF :][:HALF]).to(here())  # type: ignore[index]
    for block in part:
        fully_shard(block, mesh=mesh["dp"], reshard_after_forward=zero == 3)
    fully_shard(part, mesh=mesh["dp"])
    optimizer = sgd(part.named_parameters())
    micro = rows().to(here()).chunk(2)[mesh["dp"].get_local_rank()].chunk(MICRO)

    def received(like: Tensor, group: Any) -> Tensor:
        made = torch.empty_like(like)
        dist.irecv(made, peer, group=group).wait()
        return made

    def forward(k: int) -> tuple[Tensor, Tensor]:
        x = received(micro[k], up).requires_grad_() if stage else micro[k]
        y = part(x)
        if stage:
            return x, y.square().mean() / (2 * MICRO)
        sent.append((dist.isend(y.detach(), peer, group=up), y.detach()))
        return x, y

    def backward(k: int) -> None:
        x, y = kept.pop(k)
        part.set_is_last_backward(k == MICRO - 1)
        part.set_reshard_after_backward(zero == 3 or k == MICRO - 1)
        y.backward(None if stage else received(y, down))
        if stage:
            sent.append((dist.isend(x.grad, peer, group=down), x.grad))

    kept: dict[int, tuple[Tensor, Tensor]] = {}
    sent: list[Any] = []

    def step() -> None:
        optimizer.zero_grad()
        for k in range(MICRO + 1 - stage):
            if k < MICRO:
                kept[k] = forward(k)
            if k >= 1 - stage:
                backward(k - 1 + stage)
        for work, _ in sent:
            work.wait()
        sent.clear()
        optimizer.step()

    return measured(step)


def measured(step: Callable[[], Any]) -> tuple[Beside, Beside, int]:
    """On a rank: gathers and sums of the third step, and the most bytes that were alive in it."""
    for _ in range(2):
        step()
    current().reset()
    torch.sim.reset_peak_memory_stats()  # type: ignore[attr-defined]
    step()
    gathers = beside("simccl.all_gather_into_tensor")
    return gathers, beside("simccl.reduce_scatter_tensor"), current().memory(dist.get_rank())[1]


@pytest.mark.parametrize("zero", [2, 3])
def test_slices_in_stages(zero: int) -> None:
    """Of a stage blocks are gathered and summed beside others, in no more memory than by hand."""
    ours = spawn(in_stages, f"stage={zero}", ranks=4, timeline=True)
    theirs = spawn(by_hand, zero, ranks=4, timeline=True)
    for (gathers, sums, peak), (_, _, most) in zip(ours, theirs):
        assert peak <= 1.01 * most
        # each microbatch again, or all in one step; the first one has nothing before it
        assert len(gathers) == (2 * MICRO * HALF if zero == 3 else HALF)
        # the first block of a pass has nothing before it; backward follows on what forward has left
        idle = [at for at, (f, b) in enumerate(gathers) if not f and not b]
        assert all(at % HALF == 0 for at in idle) and len(idle) <= (MICRO if zero == 3 else 1)
        assert len(sums) == MICRO * HALF and all(b for _, b in sums[:-1]) and sums[-1] == (0, 0)


def test_slices_of_several_stages() -> None:
    """A rank with two stages has the streams of one, and sums of both free what they have read."""
    order = 'order="Interleaved1F1B", chunks=2'
    for zero in (2, 3):
        whole = spawn(in_stages, f"stage={zero}", ranks=4, timeline=True)
        parts = spawn(in_stages, f"stage={zero}", order, ranks=4, timeline=True)
        for (_, _, most), (_, sums, peak) in zip(whole, parts):
            assert peak <= 1.05 * most
            assert len(sums) == MICRO * HALF and sums.count((0, 0)) <= 2  # the last of each stage


# -- every other kind ------------------------------------------------------------------------------

OUT, BACK = "copy to the host", "copy to the device"


def of_program(mesh: str, text: str, names: tuple[str, ...], words: bool) -> list[Beside]:
    """On a rank: what of a step of a program could run beside its products, by name."""
    given = tokens(0) if words else {"x": rows()}
    with offload_all_sizes():
        plan = planned(single() if words else deep(), text, mesh)
        program = build(plan, given, optimizer=sgd)
    given = {name: value.to(here()) for name, value in given.items()}
    watched(lambda: program.train_step(given))
    return [beside(name) for name in names]


def on_ranks(mesh: str, text: str, *names: str, words: bool = False) -> Any:
    return spawn(of_program, mesh, text, names, words, timeline=True)


def alone(found: Beside) -> int:
    """How many of these nothing could run beside."""
    return found.count((0, 0))


def test_sums_of_gradients() -> None:
    """Buckets are summed beside what is left of backward; without the row, none is."""
    text = "zero(stage=0, over=dp, bucket=40KiB)"
    for (sums,) in on_ranks("dp=2", f"{text}\noverlap(gradients)", "simccl.all_reduce"):
        # two buckets of each block, the last two and the sum of losses behind all of backward
        assert len(sums) > 2 * DEPTH and all(b for _, b in sums[: 2 * DEPTH - 2])
    for (sums,) in on_ranks("dp=2", text, "simccl.all_reduce"):
        assert len(sums) > 2 * DEPTH and alone(sums) == len(sums)


def test_gathers_of_parameters() -> None:
    """Without a pipeline: in forward beside the block before, in backward beside the one after."""
    for (gathers,) in on_ranks("dp=2", "zero(stage=3, over=dp)", "simccl.all_gather_into_tensor"):
        assert len(gathers) == 2 * DEPTH and alone(gathers) == 1
        assert all(b for _, b in gathers[DEPTH + 1 :])


@pytest.mark.parametrize("stages", [False, True])
def test_activations_on_the_host(stages: bool) -> None:
    """They leave beside the forward of what comes next, and come beside backward."""
    text = "blocks.*  offload(activations)\n"
    text += f'{CUT}pipeline(order="1F1B", micro={MICRO})' if stages else SUM
    for out, come in on_ranks("pp=2" if stages else "dp=2", text, OUT, BACK):
        assert len(out) >= 5 * DEPTH and alone(out) == 0
        assert len(come) >= 5 * DEPTH and alone(come) == 0


def test_parameters_on_the_host() -> None:
    """They come beside the block before, and their gradients leave beside backward."""
    many = 6 * DEPTH  # parameters
    for out, come in on_ranks("dp=2", f"{SUM}blocks.*  offload(parameters)", OUT, BACK):
        # the first block has nothing before it, the last gradients nothing behind; one is the sum's
        assert all(f or b for f, b in come[6 : 2 * many])
        assert all(b for _, b in out[: many - 6])
    for met in spawn(both_ways, timeline=True):
        assert met  # gradients of a block leave while the parameters of the one before it come


def both_ways() -> int:
    """On a rank: how many copies to the host could run beside copies back in backward."""
    of_program("dp=2", f"{SUM}blocks.*  offload(parameters)", (), False)
    seen = [one for one in current().operations() if back(one)]
    going, coming = ([one for one in seen if one.name == name] for name in (OUT, BACK))
    return sum(could_overlap(one, other) for one in going for other in coming)


def fetched_ahead(state: str) -> list[tuple[bool, bool]]:
    """On a rank: of each parameter whether what its step needs could come while the one before it,
    and the one before that, goes back."""
    with mock.patch.object(away, "bucket_indices", lambda sizes: [[k] for k in range(len(sizes))]):
        of_program("dp=2", f"{SUM}{state}", (), False)
    seen = current().operations()
    going, coming = ([one for one in seen if one.name == name] for name in (BACK, OUT))
    each = len(coming) // len(going)  # of a parameter: its values, and its gradient
    assert len(going) == 6 * DEPTH and len(coming) == each * len(going)
    fetches = [coming[k * each : k * each + each] for k in range(len(going))]
    return [
        tuple(all(could_overlap(f, going[k - by]) for f in fetches[k]) for by in (1, 2))
        for k in range(2, len(going))
    ]


def test_optimizer_state_on_the_host() -> None:
    """While the host computes the step of some parameters, the next come and the last go back."""
    for found in spawn(fetched_ahead, "offload(optimizer)", timeline=True):
        assert all(one == (True, True) for one in found)


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("micro", [1, 2])
def test_slices_on_the_host(zero: int, micro: int) -> None:
    """What is gathered from the host comes beside computation, its gradients leave beside it, and
    no microbatch waits for them."""
    text = f"zero(stage={zero}, over=dp)\nblocks.*  offload(parameters)"
    text += f'\npipeline(order="GPipe", micro={micro})' if micro > 1 else ""
    names = ("simccl.all_gather_into_tensor", "simccl.reduce_scatter_tensor", OUT)
    for gathers, sums, out in on_ranks("dp=2", text, *names):
        assert alone(gathers) <= micro
        assert len(sums) == micro * DEPTH and alone(sums) == 1
        assert len(out) == 6 * len(sums) and alone(out) <= 6


def test_transfers_between_stages() -> None:
    """Values of the next microbatch, and gradients of the last one, travel beside computation."""
    text = f'{CUT}pipeline(order="1F1B", micro={MICRO})'
    names = ("simccl.send", "simccl.recv")
    for rank, (sends, receives) in enumerate(on_ranks("pp=2", text, *names)):
        assert len(sends) == len(receives) == MICRO
        # the last stage has nothing to do before the first values, and nothing after the last
        assert alone(sends) == alone(receives) == rank


@pytest.mark.parametrize("layout", ["ring", "ring, layout=zigzag"])
def test_steps_of_a_ring(layout: str) -> None:
    """The next keys travel beside attention to those that are here; the way home follows it all."""
    text = RING.format(layout, "cp", "cp")
    names = ("simccl.send", "simccl.recv")
    for found in on_ranks("cp=2", text, *names, words=True):
        for moved in found:
            # four blocks: one step of keys forward, one of keys and one of gradients backward
            assert len(moved) == 12 and all(f for f, _ in moved[:4]) and alone(moved[4:]) == 4
