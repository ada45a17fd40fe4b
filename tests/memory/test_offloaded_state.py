"""Parameters, gradients and optimizer state off the device: equal training, bytes, files."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.analyze.residence import streamed_units, tiers_of
from schedlang.passes.lower.build import build
from schedlang.passes.simulate.account import account
from schedlang.runtime.grad_reduction.gradient import local_gradient
from schedlang.runtime.offload.offloaded_step import ParameterTiers
from schedlang.runtime.program import Program
from schedlang.runtime.storage.offloaded_gradients import local_tensor
from schedlang.runtime.storage.tiers import ScratchFiles, TierCounter, tier_of
from schedlang.viz.show import format_view, make_view
from tests.engine import Threads
from tests.proofs import (
    adamw,
    assert_proven,
    assert_same,
    make_plan,
    refusal_text,
    sgd,
    train_on_ranks,
)

WIDTH, VOCAB_SIZE = 24, 11
OFFLOAD_ALL = "offload(parameters, to={0})\noffload(optimizer, to={0})\noffload(gradients, to={0})"
LEAST_MEMORY = (
    "layers.* checkpoint()\nlayers.* offload(activations, to=disk)\n" + OFFLOAD_ALL.format("cpu")
)


class Block(nn.Module):
    """Two projections and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class LanguageModel(nn.Module):
    """Blocks between an embedding and a head that shares its weight, and a count of calls."""

    def __init__(self, layers: int = 3, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB_SIZE, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCAB_SIZE, bias=False)
        self.register_buffer("seen", torch.zeros(()))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if self.training:
            self.seen += 1
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def language_model(layers: int = 3, tied: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return LanguageModel(layers, tied).double()


def batch(seed: int, rows: int = 5, length: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB_SIZE, (rows, length), generator=generator)
    labels = ids.roll(-1, 1)
    labels[0, :2] = -100
    return {"ids": ids, "labels": labels}


BATCHES = [batch(seed, rows) for seed, rows in enumerate((5, 4, 6))]


def shared_scale(named: Any) -> torch.optim.Optimizer:
    """Return an optimizer whose step depends on all tensors: they share one scale."""

    class Together(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            with_grads = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
            largest = max((float(p.grad.abs().max()) for p in with_grads), default=1.0)
            with torch.no_grad():
                for p in with_grads:
                    p.mul_(1 - 0.01 / (1 + largest))
            return super().step(closure)

    return Together([p for _, p in named], lr=0.01, momentum=0.5)


@pytest.mark.parametrize("optimizer", [adamw, shared_scale], ids=["adamw", "together"])
@pytest.mark.parametrize(
    "rows",
    [
        "offload(optimizer)",
        "offload(gradients)",
        "layers.* offload(parameters, prefetch=0)",
        "embed, layers.* offload(parameters, prefetch=2)",
        OFFLOAD_ALL.format("disk"),
        LEAST_MEMORY,
    ],
)
def test_same_bits(threads: Threads, rows: str, optimizer: Any) -> None:
    """Losses, gradients, norms, weights and state of three clipped steps are bitwise equal."""
    order = '\npipeline(order="GPipe", micro=2)'
    offloaded, plain = (
        train_on_ranks(
            threads, make_plan(language_model(), r + order), BATCHES, optimizer, clip=0.5
        )
        for r in (rows, "")
    )
    assert_same(offloaded, plain)


@pytest.mark.parametrize(
    "mesh, base",
    [
        ("tp=2", "layers.*.up shard(col, over=tp)\nlayers.*.down shard(row, over=tp)"),
        ("dp=2", "zero(stage=1, over=dp)"),
        ("dp=2", 'zero(stage=2, over=dp)\npipeline(order="GPipe", micro=2)'),
        ("dp=2", "zero(stage=3, over=dp)"),
        ("a=2, b=2", "zero(stage=3, over=a)\nzero(stage=0, over=b)"),
        ("pp=2", 'layers pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)'),
        (
            "pp=2, dp=2",
            "layers pipeline_split(over=pp)\nzero(stage=1, over=dp)\n"
            'overlap(gradients)\npipeline(order="ZB-H1", micro=2)',
        ),
    ],
    ids=["tensor", "zero 1", "zero 2", "zero 3", "hybrid", "1F1B", "halves"],
)
@pytest.mark.parametrize(
    "rows",
    [LEAST_MEMORY, pytest.param(OFFLOAD_ALL.format("disk"), marks=pytest.mark.deep)],
    ids=["host", "disk"],
)
def test_same_bits_on_ranks(threads: Threads, mesh: str, base: str, rows: str) -> None:
    """On several ranks too, with everything off the device."""
    offloaded, plain = (
        train_on_ranks(threads, make_plan(language_model(), r, mesh), BATCHES[:2], adamw, clip=0.5)
        for r in (_insert_rows(rows, base), base)
    )
    assert_same(offloaded, plain)


def _insert_rows(rows: str, base: str) -> str:
    """Put rows after `shard` rows and before all others."""
    lines = base.split("\n")
    shards = [line for line in lines if "shard(" in line]
    return "\n".join([*shards, rows, *(line for line in lines if line not in shards)])


def adafactor(named: Any) -> torch.optim.Optimizer:
    """Return an optimizer that needs complete tensors."""
    return torch.optim.Adafactor([p for _, p in named], lr=0.01)


@pytest.mark.parametrize(
    "base, mesh",
    [
        ("layers.*.up shard(col, over=tp)\nlayers.*.down shard(row, over=tp)", "tp=2"),
        ("zero(stage=1, over=dp)", "dp=2"),
    ],
    ids=["tensor", "zero"],
)
def test_same_bits_of_whole_steps(threads: Threads, base: str, mesh: str) -> None:
    """An optimizer that needs complete tensors also works with tensors on the host."""
    rows = (_insert_rows("layers.* offload(parameters)\noffload(gradients)", base), base)
    offloaded, plain = (
        train_on_ranks(threads, make_plan(language_model(), r, mesh), BATCHES, adafactor)
        for r in rows
    )
    assert_same(offloaded, plain)


def step_gradients(plan: Any) -> list[Tensor | None]:
    """Return on a rank without an optimizer the gradients on the parameters after a step."""
    program = build(plan, BATCHES[0])
    program.train_step(BATCHES[0])
    grads = [parameter.grad for parameter in program.assembly.parameters.values()]
    return [g.to_local() if hasattr(g, "to_local") else g for g in grads]


def test_gradients_of_slices_come_back(threads: Threads) -> None:
    """Without an optimizer, each rank's shard of an offloaded gradient is on its parameter
    again."""
    base = "zero(stage=2, over=dp)"
    offloaded, plain = (
        threads.run(step_gradients, 2, make_plan(language_model(), r, "dp=2"))
        for r in (f"offload(gradients)\n{base}", base)
    )
    pairs = [
        (a, b)
        for offloaded_grads, plain_grads in zip(offloaded, plain)
        for a, b in zip(offloaded_grads, plain_grads)
    ]
    assert pairs and all(a is not None and torch.equal(a, b) for a, b in pairs)


def test_proven(threads: Threads) -> None:
    """Tensor and data parallelism, with everything off the device, trains as the original."""
    rows = "layers.*.up shard(col, over=tp)\nlayers.*.down shard(row, over=tp)\n"
    rows += OFFLOAD_ALL.format("cpu") + "\nzero(stage=1, over=dp)"
    assert_proven(
        threads, make_plan(language_model(2), rows, "dp=2, tp=2"), [batch(5, 6), batch(2, 7)]
    )


# -- what lies where -------------------------------------------------------------------------------


def tier_peaks(rows: str, layers: int) -> dict[str, int]:
    """Return the peak bytes of each tier in a program's second step."""
    plan = make_plan(language_model(layers), rows)
    program = build(plan, BATCHES[0], optimizer=adamw)
    program.train_step(BATCHES[0])
    gc.collect()
    with TierCounter() as counter:
        program.train_step(BATCHES[0])
    return counter.ledger.peak


def test_device_does_not_grow_with_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    """With streamed layers, 4, 8 and 16 of them need equal bytes on the device; without, they grow
    with depth."""
    monkeypatch.setattr("schedlang.runtime.offload.offloaded_activations.MIN_BYTES", 0)
    monkeypatch.setattr("schedlang.runtime.grad_reduction.gradient.BUCKET_BYTES", 1)
    rows = "layers.* checkpoint()\nlayers.* offload(activations)\n" + OFFLOAD_ALL.format("cpu")
    four, eight, sixteen = (tier_peaks(rows, layers) for layers in (4, 8, 16))
    assert four["device"] == eight["device"] == sixteen["device"]
    assert eight["cpu"] - four["cpu"] == (sixteen["cpu"] - eight["cpu"]) / 2 > 0
    plain = [tier_peaks("", layers)["device"] for layers in (4, 8)]
    assert plain[1] > 1.5 * plain[0] > 4 * four["device"]


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_layers_are_loaded_twice(prefetch: int) -> None:
    """A step loads each streamed layer once forward and once backward, at any prefetch, with the
    given number on the device."""
    rows = f"layers.* offload(parameters, prefetch={prefetch})"
    program = build(make_plan(language_model(6), rows), BATCHES[0], optimizer=sgd)
    assert program.offloaded is not None
    window, peak = program.offloaded.window, [0]
    advance = window.advance

    def counted(*args: Any, **kwargs: Any) -> None:
        advance(*args, **kwargs)
        peak[0] = max(peak[0], len(window.on_device))

    window.advance = counted  # type: ignore[method-assign]
    program.train_step(BATCHES[0])  # learns the order
    loads_before = window.loads
    program.train_step(BATCHES[1])
    assert window.loads - loads_before == 12 and peak[0] == 1 + prefetch
    assert not window.on_device


def test_tiers() -> None:
    """Between steps parameters, gradients and moments are where rows say, shared ones too."""
    rows = "embed, layers[0] offload(parameters)\nlayers[0] offload(optimizer, to=disk)\n"
    plan = make_plan(language_model(), rows + "layers[1] offload(gradients)")
    tiers = tiers_of(plan)
    assert (
        tiers["embed.weight"] == ParameterTiers("cpu", "cpu", "cpu")
        and "layers.2.up.bias" not in tiers
    )
    assert tiers["layers.0.up.bias"] == ParameterTiers("cpu", "cpu", "disk")
    assert tiers["layers.1.up.bias"] == ParameterTiers("device", "cpu", "device")
    units = streamed_units(plan, frozenset(f"layers.{k}" for k in range(3)))
    assert set(units) == {"embed", "layers.0", "head"}
    assert units["head"][1] == ("embed.weight",)
    program = build(plan, BATCHES[0], optimizer=adamw)
    program.train_step(BATCHES[0])
    parameters = program.assembly.parameters
    assert program.optimizer is not None
    moments = {n: program.optimizer.state[p]["exp_avg"] for n, p in parameters.items()}
    for name in parameters:
        expected = tiers.get(name, ParameterTiers())
        assert (tier_of(parameters[name].data), tier_of(moments[name])) == (
            expected.parameter,
            expected.state,
        )
    assert parameters["layers.1.up.weight"].grad is None


def tier_bytes(plan: Any) -> dict[str, int]:
    """Return on a rank the bytes of parameters, gradients and moments on each tier, after a
    step."""
    program = build(plan, BATCHES[0], optimizer=adamw)
    program.train_step(BATCHES[0])
    sizes = dict.fromkeys(("device", "cpu", "disk"), 0)
    states: Any = program.optimizer.state if program.optimizer is not None else {}
    for parameter in program.assembly.parameters.values():
        state = states.get(parameter, {})
        value = local_tensor(parameter)
        sizes[tier_of(value)] += value.untyped_storage().nbytes()  # a slice has its padding
        states_of = (local_tensor(moment) for key, moment in state.items() if key != "step")
        for tensor in (local_gradient(parameter), *states_of):
            if tensor is not None:
                sizes[tier_of(tensor)] += tensor.nbytes
    return sizes


@pytest.mark.parametrize("base, mesh", [("", ""), ("zero(stage=3, over=dp)", "dp=2")])
def test_the_plan_counts_what_lies_where(threads: Threads, base: str, mesh: str) -> None:
    """The plan's bytes on each tier equal those of ranks after a step."""
    rows = "layers[:1] offload(parameters)\nlayers[2] offload(optimizer, to=disk)\n"
    plan = make_plan(language_model(), f"{rows}layers[2] offload(gradients)\n{base}", mesh)
    rank_classes = account(plan, BATCHES[0]).classes
    assert rank_classes is not None and rank_classes[0].disk > 0 < rank_classes[0].cpu
    actual = threads.run(tier_bytes, plan.mesh.world, plan)
    expected = [
        {"device": c.state, "cpu": c.cpu, "disk": c.disk}
        for c in rank_classes
        for _ in range(c.ranks)
    ]
    assert sorted(map(str, actual)) == sorted(map(str, expected))
    printed = format_view(make_view(plan, account(plan, BATCHES[0])))
    assert "on cpu" in printed and "on disk" in printed
    layer = sum(p.nbytes for p in language_model().layers[0].parameters())
    assert base or rank_classes[0].working == layer


def test_buffers_written_in_forward_are_kept() -> None:
    """What a forward writes into a streamed parameter is there in the next step."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.calls = nn.Parameter(torch.zeros(1), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.calls += 1
            return (x * self.weight).sum()

    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Counting()

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"loss": self.inner(x)}

    data = {"x": torch.randn(3, 4)}
    program = build(make_plan(Holds(), "inner offload(parameters)"), data, optimizer=sgd)
    for _ in range(2):
        program.train_step(data)
    assert float(program.state_dict()["inner.calls"]) == 2


# -- saved and loaded ------------------------------------------------------------------------------


def test_saved_and_loaded(tmp_path: Path) -> None:
    """A checkpoint from disk continues bitwise without offloading, and the other way."""
    on_disk, on_device = OFFLOAD_ALL.format("disk"), ""
    for first, then in ((on_disk, on_device), (on_device, on_disk)):
        source = build(make_plan(language_model(), first), BATCHES[0], optimizer=adamw)
        source.train_step(BATCHES[0])
        source.save(tmp_path / "state")
        target = build(make_plan(language_model(1 + 2), then), BATCHES[0], optimizer=adamw)
        target.train_step(BATCHES[2])
        target.load(tmp_path / "state")
        for program in (source, target):
            program.train_step(BATCHES[1])
        expected, actual = source.state_dict(), target.state_dict()
        assert all(torch.equal(expected[name], actual[name]) for name in expected)
        assert _equal_state(source.optimizer_state(), target.optimizer_state())


def adagrad(named: Any) -> torch.optim.Optimizer:
    """Return an optimizer that has state before its first step."""
    return torch.optim.Adagrad([p for _, p in named], lr=0.01)


def save_and_load(plan: Any, folder: str) -> Any:
    """Train two steps on a rank, saved and loaded between them; return the state."""
    for batch in BATCHES[:2]:
        program = build(plan, batch, optimizer=adagrad)
        if batch is BATCHES[1]:
            program.load(folder)
        program.train_step(batch)
        program.save(folder)
    return program.state_dict()


def test_slices_that_were_loaded(threads: Threads, tmp_path: Path) -> None:
    """Sharded state, loaded or initial, works with offloaded gradients."""
    base, plans = "zero(stage=1, over=dp)", []
    for rows in (_insert_rows("offload(gradients)", base), base):
        plans.append(make_plan(language_model(), rows, "dp=2"))
    offloaded, plain = (
        threads.run(save_and_load, 2, plan, str(tmp_path / str(k)))[0]
        for k, plan in enumerate(plans)
    )
    assert all(torch.equal(offloaded[name], value) for name, value in plain.items())


def _equal_state(left: dict[str, dict[str, Any]], right: dict[str, dict[str, Any]]) -> bool:
    pairs = [(v, right[name][key]) for name, slots in left.items() for key, v in slots.items()]
    return bool(pairs) and all(
        torch.equal(torch.as_tensor(x), torch.as_tensor(y)) for x, y in pairs
    )


def test_without_an_optimizer_gradients_come_back() -> None:
    """The caller's own step finds gradients on the parameters; a plain training loop is refused."""
    program = build(make_plan(language_model(), OFFLOAD_ALL.format("cpu")), BATCHES[0])
    plain = build(make_plan(language_model(), ""), BATCHES[0])
    for variant in (program, plain):
        variant.train_step(BATCHES[0])
    for name, parameter in plain.assembly.parameters.items():
        grad = program.assembly.parameters[name].grad
        assert grad is not None and torch.equal(grad, parameter.grad)
    with pytest.raises(Refusal, match="S617") as caught:
        _ = program.module
    assert "leave the device at once: your own loop would find none" in caught.value.render()


# -- files -----------------------------------------------------------------------------------------


def mapped_files(folder: Path) -> int:
    """Return the number of a folder's files that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(str(folder) in line for line in lines)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="maps are read from /proc")
def test_files_are_real_and_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on disk are mapped, unlinked files; they vanish with the program."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    program = build(
        make_plan(language_model(), OFFLOAD_ALL.format("disk")), BATCHES[0], optimizer=adamw
    )
    program.train_step(BATCHES[0])
    parameters = len(program.assembly.parameters)
    assert mapped_files(tmp_path) >= 3 * parameters  # values and two moments
    assert not list(tmp_path.iterdir())
    del program
    gc.collect()
    assert mapped_files(tmp_path) == 0


@contextlib.contextmanager
def limit_disk(written: int, scratch: ScratchFiles) -> Iterator[None]:
    """Make the disk full after so many more bytes."""
    original, room = os.posix_fallocate, [written]

    def reserve(file: int, offset: int, size: int) -> None:
        room[0] -= size
        if room[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(file, offset, size)

    os.posix_fallocate = reserve
    try:
        yield
    finally:
        os.posix_fallocate = original


def full_state(program: Program) -> dict[str, Any]:
    slots = program.optimizer_state()
    moments = {
        f"{n}.{k}": torch.as_tensor(v).clone() for n, s in slots.items() for k, v in s.items()
    }
    return {**{n: v.clone() for n, v in program.state_dict().items()}, **moments}


@pytest.mark.parametrize("room", [0, 1 << 15])
@pytest.mark.parametrize(
    "rows",
    [OFFLOAD_ALL.format("disk"), "offload(optimizer, to=disk)", "offload(gradients, to=disk)"],
)
def test_a_full_disk_undoes_the_step(rows: str, room: int) -> None:
    """Wherever the disk is full in a step: a clear refusal, state as before, and once there is room
    training goes on."""
    program, plain = (
        build(make_plan(language_model(), r), BATCHES[0], optimizer=adamw) for r in (rows, "")
    )
    assert program.offloaded is not None
    for variant in (program, plain):
        variant.train_step(BATCHES[0])
    before = full_state(program)
    with limit_disk(room, program.offloaded.scratch), pytest.raises(Refusal) as caught:
        program.train_step(BATCHES[1])
    message = caught.value.render()
    assert "S850" in message and os.strerror(errno.ENOSPC) in message and "TMPDIR" in message
    after = full_state(program)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    for variant in (program, plain):
        variant.train_step(BATCHES[2])
    expected, actual = full_state(plain), full_state(program)
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


def test_a_full_disk_at_build_and_in_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters that do not fit are refused by `build`, activations by the step."""
    monkeypatch.setattr("schedlang.runtime.offload.offloaded_activations.MIN_BYTES", 0)
    with limit_disk(100, ScratchFiles()), pytest.raises(Refusal, match="was not built"):
        build(
            make_plan(language_model(), "offload(parameters, to=disk)"), BATCHES[0], optimizer=sgd
        )
    rows = "layers.* offload(activations, to=disk)"
    program = build(make_plan(language_model(), rows), BATCHES[0], optimizer=sgd)
    before = full_state(program)
    with (
        limit_disk(100, ScratchFiles()),
        pytest.raises(Refusal, match="nothing was changed: the state is that before the step"),
    ):
        program.train_step(BATCHES[0])
    after = full_state(program)
    assert all(torch.equal(before[name], after[name]) for name in before)


def fill_one_disk(plan: Any) -> tuple[str, bool]:
    """Train a step on a rank where only rank 1 finds the disk full."""
    program = build(plan, BATCHES[0], optimizer=sgd)
    before = {n: v.clone() for n, v in program.state_dict().items()}
    assert program.offloaded is not None
    if program.assembly.ranks.rank == 1:
        program.offloaded.scratch.failure = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(Refusal) as caught:
        program.train_step(BATCHES[0])
    after = program.state_dict()
    unchanged = all(torch.equal(before[name], after[name]) for name in before)
    return caught.value.diagnostic.code, unchanged


def test_all_ranks_refuse_alike(threads: Threads) -> None:
    """A full disk on one rank undoes the step on all."""
    plan = make_plan(
        language_model(), "offload(optimizer, to=disk)\nzero(stage=0, over=dp)", "dp=2"
    )
    assert threads.run(fill_one_disk, 2, plan) == [("S850", True)] * 2


# -- refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rows, mesh, code, said",
    [
        ("offload(optimizer, prefetch=2)", "", "S306", "leave out `prefetch`"),
        ("offload(parameters, prefetch=-1)", "", "S304", "`prefetch` must be 0 or more, not -1"),
        (
            "layers.* offload(parameters)\nlayers[0].up offload(parameters, to=disk)",
            "",
            "S501",
            "is offloaded already",
        ),
    ],
)
def test_refused(rows: str, mesh: str, code: str, said: str) -> None:
    """Rows without a meaning, and two places for one parameter."""
    message = refusal_text(language_model(), rows, mesh)
    assert code in message and said in message, message


def build_refusal(plan: Any) -> str:
    """Return the refusal that a rank's build ends with."""
    try:
        build(plan, BATCHES[0], optimizer=adafactor if plan.replicas else sgd)
    except Refusal as refusal:
        return refusal.render()
    return ""


@pytest.mark.parametrize(
    "rows, mesh, said",
    [
        (
            "layers.*.up offload(parameters)\nzero(stage=3, over=dp)",
            "dp=2",
            ("S854", "`zero` gathers `layers.0` as one", "select complete layers"),
        ),
        (
            OFFLOAD_ALL.format("disk") + "\nzero(stage=1, over=dp)",
            "dp=2",
            ("S855", "cannot be undone", "to=cpu"),
        ),
        (
            "offload(parameters)\nlayers pipeline_split(over=pp)\n"
            'pipeline(order="PipeDream", micro=4)',
            "pp=2",
            ("S625", "the parameters of several versions cannot be kept in host memory"),
        ),
    ],
    ids=["half a unit", "whole steps", "versions"],
)
def test_refused_when_built(threads: Threads, rows: str, mesh: str, said: tuple[str, ...]) -> None:
    """Half of a unit that is gathered as one, and weights of several versions."""
    relax = "staleness" if "PipeDream" in rows else ""
    for message in threads.run(
        build_refusal, 2, make_plan(language_model(tied=False), rows, mesh, relax)
    ):
        assert all(word in message for word in said), message


def test_the_page_is_executed(capsys: pytest.CaptureFixture[str]) -> None:
    """The program of docs/offload.md prints what the page says, within a tenth."""
    page = (Path(__file__).parents[2] / "docs" / "offload.md").read_text()
    source, expected = re.findall(r"^```(?:python)?\n((?:import|\d).*?)^```$", page, re.S | re.M)
    exec(compile(source, "offload.md", "exec"), {"__name__": "page"})
    printed = capsys.readouterr().out
    counts = [
        [int(word) for word in re.findall(r"(\d+) KiB", text)] for text in (printed, expected)
    ]
    assert len(counts[0]) == 4
    assert all(abs(a - b) < b / 10 for a, b in zip(*counts)), printed
    assert re.sub(r"\d+ KiB", "", printed) == re.sub(r"\d+ KiB", "", expected)
