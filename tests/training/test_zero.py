"""ZeRO stages (`zero`): the bytes that they send, and between which ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.plan import Plan
from schedlang.passes.analyze.prepare import prepare
from schedlang.passes.lower.build import build
from schedlang.passes.simulate.traffic import list_collectives
from schedlang.runtime.grad_reduction.zero import pack_flags, unpack_counts
from schedlang.runtime.launch.pool import Pool
from tests.engine import Threads
from tests.proofs import assert_proven, make_plan, sgd

WIDTH, BLOCKS = 8, 3
PARAMETER_BYTES = BLOCKS * WIDTH * WIDTH * 8  # bytes of the parameters, float64


class Blocks(nn.Module):
    """A chain of blocks that divide evenly; `skip` leaves one out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS))
        self.skip = -1

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = x if index == self.skip else torch.tanh(block(x))
        return (x**2).mean()


def _batch(rows: int = 16) -> dict[str, Tensor]:
    return {"x": torch.arange(rows * WIDTH, dtype=torch.float64).view(rows, WIDTH).sin()}


class SentCollective(NamedTuple):
    """One collective: its kind, its ranks, and the bytes that a ring moves."""

    kind: str
    ranks: tuple[int, ...]
    moved: float


CALLS = {  # torch 2.13 has new names for two of them
    "all_gather_into_tensor": "gather",
    "all_gather_single": "gather",
    "reduce_scatter_tensor": "scatter",
    "reduce_scatter_single": "scatter",
    "all_reduce": "sum",
}


@contextmanager
def count_collectives(found: list[SentCollective]) -> Iterator[None]:
    """Record every collective on tensors in this process."""
    rounds = {name: 1 + (name == "all_reduce") for name in CALLS if hasattr(dist, name)}
    originals = {name: getattr(dist, name) for name in rounds}

    def noting(name: str) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group") or dist.group.WORLD
            tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
            ranks = tuple(dist.get_process_group_ranks(group))
            size = max(t.numel() * t.element_size() for t in tensors)
            share = (len(ranks) - 1) / len(ranks)
            found.append(SentCollective(CALLS[name], ranks, rounds[name] * size * share))
            return originals[name](*args, **kwargs)

        return run

    for name in rounds:
        setattr(dist, name, noting(name))
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)


def sent_in_step(plan: Plan) -> list[SentCollective]:
    """Return what a rank sends in its second step, except loss and norm."""
    program = build(plan, _batch(), optimizer=sgd)
    program.train_step(_batch())
    collectives: list[SentCollective] = []
    with count_collectives(collectives):
        program.train_step(_batch())
    return [collective for collective in collectives if collective.moved > 64]


def plan_blocks(rows: str, mesh: str) -> Plan:
    return make_plan(Blocks().double(), rows, mesh)


@pytest.mark.parametrize("stage, times", [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_bytes_of_the_stages(pool: Pool, stage: int, times: int) -> None:
    """Stages 0 to 3 move 2P, 2P, 2P and 3P elements, times (N-1)/N, as in the paper; the plan says
    so before anything runs."""
    plan = plan_blocks(f"zero(stage={stage}, over=dp)", "dp=4")
    expected = times * PARAMETER_BYTES * 3 / 4
    for sent in pool.run(sent_in_step, 4, plan):
        moved = sum(collective.moved for collective in sent)
        assert expected <= moved <= expected * 1.02  # plus a flag for each parameter
    prepared = prepare(plan, _batch(4))
    planned_list = list_collectives(plan, prepared, _batch(4))
    rounds = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1}
    sent = (
        collective for collective in planned_list if collective.what != "loss and gradient norm"
    )
    bytes_ = sum(
        collective.bytes * collective.count * rounds[collective.kind] for collective in sent
    )
    assert times * PARAMETER_BYTES <= bytes_ <= times * PARAMETER_BYTES * 1.02


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_hybrid_sums_over_copies_once_a_step(pool: Pool, stage: int) -> None:
    """Parameters are gathered within `a` only, and over `b` there is one sum of P/a per step, with
    any number of microbatches."""
    rows = f"zero(stage={stage}, over=a)\nzero(stage=0, over=b)\n"
    plan = plan_blocks(rows + 'pipeline(order="GPipe", micro=3)', "b=2, a=2")
    for rank, sent in enumerate(pool.run(sent_in_step, 4, plan)):
        inner = tuple(r for r in range(4) if r // 2 == rank // 2)
        outer = tuple(r for r in range(4) if r % 2 == rank % 2)
        assert {collective.ranks for collective in sent if collective.kind != "sum"} == {inner}
        copies = [collective for collective in sent if collective.kind == "sum"]
        assert {collective.ranks for collective in copies} == {outer} and len(copies) == 1
        assert PARAMETER_BYTES / 2 <= copies[0].moved <= 1.05 * PARAMETER_BYTES / 2


@pytest.mark.parametrize("more, gathers", [("", 2), (", prefetch=1", 2), (", reshard=false", 1)])
def test_gathers_of_a_unit(pool: Pool, more: str, gathers: int) -> None:
    """A unit is gathered twice per step, prefetched or not; once if it stays gathered."""
    plan = plan_blocks(f"zero(stage=3, over=dp{more})", "dp=2")
    for sent in pool.run(sent_in_step, 2, plan):
        count = sum(collective.kind == "gather" for collective in sent)
        assert count == gathers * BLOCKS


def loss_after_skip(plan: Plan) -> Tensor:
    """Return the loss of a step after one in which the second block was prefetched, but skipped."""
    program = build(plan, _batch(), optimizer=sgd)
    program.train_step(_batch())
    program.assembly.module.skip = 1  # type: ignore[assignment]
    program.train_step(_batch())
    program.assembly.module.skip = -1  # type: ignore[assignment]
    return program.train_step(_batch())


def test_what_was_gathered_ahead_in_vain_is_forgotten(pool: Pool) -> None:
    """A unit that a step skips is gathered again in the next one."""
    losses = [
        pool.run(loss_after_skip, 2, plan_blocks(f"zero(stage={stage}, over=dp{option})", "dp=2"))[
            0
        ]
        for stage, option in ((0, ""), (3, ", prefetch=2"))
    ]
    assert torch.allclose(losses[0], losses[1], rtol=1e-12, atol=0.0)


@pytest.mark.parametrize(
    "rows, mesh",
    [
        (
            "zero(stage=3, over=a, prefetch=1)\nzero(stage=0, over=b)\n"
            'pipeline(order="GPipe", micro=2)',
            "b=2, a=2",
        ),
        ("zero(stage=3, over=dp, prefetch=2, reshard=false)", "dp=2"),
        (
            "blocks pipeline_split(over=pp)\nzero(stage=2, over=a)\nzero(stage=0, over=b)\n"
            'pipeline(order="1F1B", micro=2)',
            "pp=2, a=2, b=2",
        ),
        (
            "blocks pipeline_split(over=pp)\nzero(stage=3, over=dp, prefetch=2)\n"
            'pipeline(order="1F1B", micro=3)',
            "pp=2, dp=2",
        ),
        ("zero(stage=1, over=dp, rows=[5, 2])", "dp=2"),
        (
            "zero(stage=3, over=a, rows=[1, 3])\nzero(stage=0, over=b, rows=[2, 1])\n"
            'pipeline(order="1F1B", micro=1)',
            "b=2, a=2",
        ),
    ],
)
def test_all_of_it_is_equal(threads: Threads, rows: str, mesh: str) -> None:
    """Hybrids, prefetching, kept parameters, uneven shares of rows: equal to the original."""
    assert_proven(threads, plan_blocks(rows, mesh), [_batch(17), _batch()])


class InPlaceBlocks(Blocks):
    """Writes in place into a block's input, its result, and its own output."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x.clone())
            h.relu_()
            x += h
            x *= 2
            return self.down(h)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(BLOCKS))
        self.enter = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x[:, None])  # with three dims the output of a linear layer is a view
        h *= 2
        for block in self.blocks:
            y = block(h)
            y += h.tanh()
            h = y
        return (h**2).mean()


@pytest.mark.parametrize("stage", [1, 3])
def test_what_is_written_in_place_is_written(stage: int, threads: Threads) -> None:
    """A unit's backward gathers although its output was overwritten, and its caller sees what it
    writes into arguments; torch's fully_shard alone fails at both."""
    plan = make_plan(InPlaceBlocks().double(), f"zero(stage={stage}, over=dp)", "dp=2")
    assert_proven(threads, plan, [_batch(17), _batch()])


class TiedBlocks(Blocks):
    """The first block's weight is also the last's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[-1].weight = self.blocks[0].weight


def test_a_weight_of_several_units_stays_whole(threads: Threads) -> None:
    """One unit would free what another still uses: a shared weight is not sliced, the others
    are."""
    plan = make_plan(TiedBlocks().double(), "zero(stage=3, over=dp)", "dp=2")
    holdings = prepare(plan, _batch(8)).holdings
    assert [bool(holding.sliced) for holding in holdings.values()] == [False, True]
    assert_proven(threads, plan, [_batch(17), _batch()])


@pytest.mark.parametrize(
    "row, code",
    [
        ("zero(stage=2, over=dp, prefetch=1)", "S306"),
        ("zero(stage=1, over=dp, reshard=false)", "S306"),
        ("zero(stage=3, over=dp, prefetch=-1)", "S304"),
        ("zero(stage=1, over=dp, rows=[3])", "S304"),
        ("zero(stage=1, over=dp, rows=[3, 0])", "S304"),
    ],
)
def test_refusals(row: str, code: str) -> None:
    """Options that a stage does not have."""
    with pytest.raises(Refusal, match=code):
        plan_blocks(row, "dp=2")


class Mixing(nn.Module):
    """A filter with complex parameters and real ones of two dtypes, beside the input."""

    def __init__(self) -> None:
        super().__init__()
        self.wave = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex128))
        self.gate = nn.Parameter(torch.rand(WIDTH, dtype=torch.float32))
        self.lin = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        """Return the filtered input."""
        mixed = torch.fft.ifft(torch.fft.fft(x) * self.wave.exp()).real
        return x + torch.tanh(self.lin(mixed)) * self.gate


class MixedBlocks(Blocks):
    """Blocks with parameters of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mixing() for _ in range(BLOCKS))


@pytest.mark.parametrize("rows", ["zero(stage=1, over=dp)", "zero(stage=3, over=dp)"])
def test_units_of_several_dtypes(rows: str, threads: Threads) -> None:
    """Gradients are a plain loop's; parameters of the rarer dtypes stay replicated."""

    def body() -> Any:
        program = build(make_plan(MixedBlocks(), rows, "dp=2"), _batch(), optimizer=sgd)
        program.train_step(_batch())
        cut = {name for name, held in program.assembly.holdings.items() if held.sliced}
        return program.gradients(), cut

    model = MixedBlocks()
    model(**_batch()).backward()
    for gradients, cut in threads.run(body, 2):
        for name, parameter in model.named_parameters():
            rtol = 1e-5 if parameter.dtype == torch.float32 else 1e-9
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=rtol, atol=1e-12)
        assert cut == {f"blocks.{k}.lin.{n}" for k in range(BLOCKS) for n in ("weight", "bias")}


class OuterCalls(nn.Module):
    """Calls a submodule of a block outside of the block too, as diffusers' DiT does."""

    class Block(nn.Module):
        """Shifted by its own embedding of the time."""

        def __init__(self) -> None:
            super().__init__()
            self.time = nn.Sequential(nn.Linear(1, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, shift: Tensor, time: Tensor) -> Tensor:
            return torch.tanh(self.inner(x) + self.time(time)) + shift

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(self.Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        time = x[:, :1]
        shift = self.blocks[0].time(time)  # type: ignore[operator, union-attr]
        for block in self.blocks:
            x = block(x, shift, time)
        return (x**2).mean()


@pytest.mark.parametrize(
    "row, mesh",
    [
        ("zero(stage=3, over=dp)", "dp=2"),
        ("zero(stage=2, over=dp)", "dp=2"),
        ("zero(stage=3, over=dp, prefetch=1)", "dp=2"),
        (
            "blocks  pipeline_split(over=pp)\nzero(stage=3, over=dp)\n"
            'pipeline(order="1F1B", micro=2)',
            "dp=2, pp=2",
        ),
    ],
)
def test_a_part_that_is_called_beside_its_block(row: str, mesh: str, threads: Threads) -> None:
    """A submodule that is called outside of its block is gathered for that call."""
    assert_proven(
        threads, make_plan(OuterCalls().double(), row, mesh), [_batch(), _batch(8), _batch(16)]
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("world", [1, 2, 3, 8, 1000, 1024])
def test_which_parameters_ranks_used_is_counted_exactly(world: int, dtype: torch.dtype) -> None:
    """The sum of packed flags, in the dtype that is sent, counts the ranks that used each
    parameter, also in a large world."""
    flags = torch.rand(world, 69, generator=torch.Generator().manual_seed(world)).round().int()
    flags[:, 0], flags[:, 1] = 0, 1
    total = sum(
        torch.tensor(pack_flags(rank_flags.tolist(), world, dtype), dtype=dtype)
        for rank_flags in flags
    )
    assert isinstance(total, torch.Tensor) and len(total) <= -(-69 // (24 // world.bit_length()))
    assert unpack_counts(total.tolist(), 69, world, dtype) == flags.sum(0).tolist()


def test_a_profiler_sees_the_marks_of_fully_shard() -> None:
    """They exist only while a profiler runs, and cost nothing otherwise."""
    marks: Any = _fsdp_param_group
    mark = marks.record_function
    with torch.profiler.profile() as profile, mark("FSDP::pre_forward"):
        torch.ones(1).sin()
    assert "FSDP::pre_forward" in {event.name for event in profile.events() or ()}
    assert mark("FSDP::after") is mark("FSDP::again")
