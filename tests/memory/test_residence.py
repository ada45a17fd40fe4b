"""What lies off the device: the same bits, counted bytes, whole files, and undone steps."""

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
from tests.proofs import adamw, assert_same, planned, proven, refused, sgd, trained

WIDTH, WORDS = 24, 11
ALL = "offload(parameters, to={0})\noffload(optimizer, to={0})\noffload(gradients, to={0})"
SPARE = "layers.* checkpoint()\nlayers.* offload(activations, to=disk)\n" + ALL.format("cpu")


class Block(nn.Module):
    """Two projections, a norm, and a count of calls that training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Words(nn.Module):
    """Blocks between an embedding and a head that shares its weight; one layer is frozen."""

    def __init__(self, layers: int = 3, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
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


def words(layers: int = 3, tied: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return Words(layers, tied).double()


def batch(seed: int, rows: int = 5, length: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(WORDS, (rows, length), generator=generator)
    labels = ids.roll(-1, 1)
    labels[0, :2] = -100
    return {"ids": ids, "labels": labels}


BATCHES = [batch(seed, rows) for seed, rows in enumerate((5, 4, 6))]


def together(named: Any) -> torch.optim.Optimizer:
    """An optimizer that looks at all tensors together: they share one scale."""

    class Together(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            held = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
            largest = max((float(p.grad.abs().max()) for p in held), default=1.0)
            with torch.no_grad():
                for p in held:
                    p.mul_(1 - 0.01 / (1 + largest))
            return super().step(closure)

    return Together([p for _, p in named], lr=0.01, momentum=0.5)


@pytest.mark.parametrize("optimizer", [adamw, together], ids=["adamw", "together"])
@pytest.mark.parametrize(
    "rows",
    [
        "offload(optimizer)",
        "offload(gradients)",
        "layers.* offload(parameters, prefetch=0)",
        "embed, layers.* offload(parameters, prefetch=2)",
        ALL.format("disk"),
        SPARE,
    ],
)
def test_same_bits(threads: Threads, rows: str, optimizer: Any) -> None:
    """Losses, gradients, norms, weights and state of three clipped steps are those of no rows."""
    order = '\npipeline(order="GPipe", micro=2)'
    seen, plain = (
        trained(threads, planned(words(), r + order), BATCHES, optimizer, clip=0.5)
        for r in (rows, "")
    )
    assert_same(seen, plain)


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
    "rows", [SPARE, pytest.param(ALL.format("disk"), marks=pytest.mark.deep)], ids=["host", "disk"]
)
def test_same_bits_on_ranks(threads: Threads, mesh: str, base: str, rows: str) -> None:
    """On several ranks a program with everything off the device trains to the same bits."""
    seen, plain = (
        trained(threads, planned(words(), r, mesh), BATCHES[:2], adamw, clip=0.5)
        for r in (_under(rows, base), base)
    )
    assert_same(seen, plain)


def _under(rows: str, base: str) -> str:
    """Rows below shards, and above all else."""
    lines = base.split("\n")
    shards = [line for line in lines if "shard(" in line]
    return "\n".join([*shards, rows, *(line for line in lines if line not in shards)])


def adafactor(named: Any) -> torch.optim.Optimizer:
    """An optimizer that looks at whole tensors."""
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
    """An optimizer for which parameters are put together finds what lies on the host, too."""
    rows = (_under("layers.* offload(parameters)\noffload(gradients)", base), base)
    seen, plain = (trained(threads, planned(words(), r, mesh), BATCHES, adafactor) for r in rows)
    assert_same(seen, plain)


def own_gradients(plan: Any) -> list[Tensor | None]:
    """On a rank without an optimizer: what the caller finds on the parameters after a step."""
    program = build(plan, BATCHES[0])
    program.train_step(BATCHES[0])
    grads = [parameter.grad for parameter in program.assembly.parameters.values()]
    return [g.to_local() if hasattr(g, "to_local") else g for g in grads]


def test_gradients_of_slices_come_back(threads: Threads) -> None:
    """Without an optimizer each rank's slice of a gradient that left is on its parameter again."""
    base = "zero(stage=2, over=dp)"
    far, near = (
        threads.run(own_gradients, 2, planned(words(), r, "dp=2"))
        for r in (f"offload(gradients)\n{base}", base)
    )
    pairs = [(a, b) for one, other in zip(far, near) for a, b in zip(one, other)]
    assert pairs and all(a is not None and torch.equal(a, b) for a, b in pairs)


def test_proven(threads: Threads) -> None:
    """Tensor parallel and data parallel, everything off the device, trains as the original."""
    rows = "layers.*.up shard(col, over=tp)\nlayers.*.down shard(row, over=tp)\n"
    rows += ALL.format("cpu") + "\nzero(stage=1, over=dp)"
    proven(threads, planned(words(2), rows, "dp=2, tp=2"), [batch(5, 6), batch(2, 7)])


# -- what lies where -------------------------------------------------------------------------------


def peaks(rows: str, layers: int) -> dict[str, int]:
    """The most bytes on each tier in the second step of a program."""
    plan = planned(words(layers), rows)
    program = build(plan, BATCHES[0], optimizer=adamw)
    program.train_step(BATCHES[0])
    gc.collect()
    with TierCounter() as seen:
        program.train_step(BATCHES[0])
    return seen.ledger.peak


def test_device_does_not_grow_with_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    """With layers streamed, 4, 8 and 16 of them need the same bytes on the device; else they grow
    with every layer, and so does what lies on the host."""
    monkeypatch.setattr("schedlang.runtime.offload.offloaded_activations.MIN_BYTES", 0)
    monkeypatch.setattr("schedlang.runtime.grad_reduction.gradient.BUCKET_BYTES", 1)
    rows = "layers.* checkpoint()\nlayers.* offload(activations)\n" + ALL.format("cpu")
    four, eight, sixteen = (peaks(rows, layers) for layers in (4, 8, 16))
    assert four["device"] == eight["device"] == sixteen["device"]
    assert eight["cpu"] - four["cpu"] == (sixteen["cpu"] - eight["cpu"]) / 2 > 0
    plain = [peaks("", layers)["device"] for layers in (4, 8)]
    assert plain[1] > 1.5 * plain[0] > 4 * four["device"]


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_layers_are_loaded_twice(prefetch: int) -> None:
    """A step loads each streamed layer once forward and once backward, whatever comes ahead, and
    never holds more of them on the device than are asked for."""
    rows = f"layers.* offload(parameters, prefetch={prefetch})"
    program = build(planned(words(6), rows), BATCHES[0], optimizer=sgd)
    assert program.offloaded is not None
    window, most = program.offloaded.window, [0]
    turn = window.advance

    def counted(*args: Any, **kwargs: Any) -> None:
        turn(*args, **kwargs)
        most[0] = max(most[0], len(window.on_device))

    window.advance = counted  # type: ignore[method-assign]
    program.train_step(BATCHES[0])  # learns the order
    before = window.loads
    program.train_step(BATCHES[1])
    assert window.loads - before == 12 and most[0] == 1 + prefetch
    assert not window.on_device


def test_tiers() -> None:
    """Between two steps parameters, gradients and moments lie where rows say, shared ones too."""
    rows = "embed, layers[0] offload(parameters)\nlayers[0] offload(optimizer, to=disk)\n"
    plan = planned(words(), rows + "layers[1] offload(gradients)")
    here = tiers_of(plan)
    assert (
        here["embed.weight"] == ParameterTiers("cpu", "cpu", "cpu")
        and "layers.2.up.bias" not in here
    )
    assert here["layers.0.up.bias"] == ParameterTiers("cpu", "cpu", "disk")
    assert here["layers.1.up.bias"] == ParameterTiers("device", "cpu", "device")
    units = streamed_units(plan, frozenset(f"layers.{k}" for k in range(3)))
    assert set(units) == {"embed", "layers.0", "head"}
    assert units["head"][1] == ("embed.weight",)
    program = build(plan, BATCHES[0], optimizer=adamw)
    program.train_step(BATCHES[0])
    found = program.assembly.parameters
    assert program.optimizer is not None
    moments = {n: program.optimizer.state[p]["exp_avg"] for n, p in found.items()}
    for name in found:
        said = here.get(name, ParameterTiers())
        assert (tier_of(found[name].data), tier_of(moments[name])) == (said.parameter, said.state)
    assert found["layers.1.up.weight"].grad is None


def on_rank(plan: Any) -> dict[str, int]:
    """On a rank: bytes of parameters, gradients and moments on each tier, after a step."""
    program = build(plan, BATCHES[0], optimizer=adamw)
    program.train_step(BATCHES[0])
    found = dict.fromkeys(("device", "cpu", "disk"), 0)
    states: Any = program.optimizer.state if program.optimizer is not None else {}
    for parameter in program.assembly.parameters.values():
        state = states.get(parameter, {})
        each = [local_tensor(parameter), local_gradient(parameter)]
        each += [local_tensor(value) for key, value in state.items() if key != "step"]
        for value in each:
            if value is not None:
                found[tier_of(value)] += value.nbytes
    return found


@pytest.mark.parametrize("base, mesh", [("", ""), ("zero(stage=3, over=dp)", "dp=2")])
def test_the_plan_counts_what_lies_where(threads: Threads, base: str, mesh: str) -> None:
    """The bytes of each tier that a plan tells are those that ranks have after a step."""
    rows = "layers[:1] offload(parameters)\nlayers[2] offload(optimizer, to=disk)\n"
    plan = planned(words(), f"{rows}layers[2] offload(gradients)\n{base}", mesh)
    told = account(plan, BATCHES[0]).classes
    assert told is not None and told[0].disk > 0 < told[0].cpu
    seen = threads.run(on_rank, plan.mesh.world, plan)
    want = [{"device": c.state, "cpu": c.cpu, "disk": c.disk} for c in told for _ in range(c.ranks)]
    assert sorted(map(str, seen)) == sorted(map(str, want))
    printed = format_view(make_view(plan, account(plan, BATCHES[0])))
    assert "on cpu" in printed and "on disk" in printed
    layer = sum(p.nbytes for p in words().layers[0].parameters())
    assert base or told[0].working == layer


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
    program = build(planned(Holds(), "inner offload(parameters)"), data, optimizer=sgd)
    for _ in range(2):
        program.train_step(data)
    assert float(program.state_dict()["inner.calls"]) == 2


# -- saved and loaded ------------------------------------------------------------------------------


def test_saved_and_loaded(tmp_path: Path) -> None:
    """A checkpoint from disk tiers goes on to the same bits without any, and the other way."""
    far, near = ALL.format("disk"), ""
    for first, then in ((far, near), (near, far)):
        one = build(planned(words(), first), BATCHES[0], optimizer=adamw)
        one.train_step(BATCHES[0])
        one.save(tmp_path / "state")
        other = build(planned(words(1 + 2), then), BATCHES[0], optimizer=adamw)
        other.train_step(BATCHES[2])
        other.load(tmp_path / "state")
        for program in (one, other):
            program.train_step(BATCHES[1])
        want, got = one.state_dict(), other.state_dict()
        assert all(torch.equal(want[name], got[name]) for name in want)
        assert _same(one.optimizer_state(), other.optimizer_state())


def adagrad(named: Any) -> torch.optim.Optimizer:
    """An optimizer whose state is there before its first step."""
    return torch.optim.Adagrad([p for _, p in named], lr=0.01)


def gone_on(plan: Any, folder: str) -> Any:
    """On a rank: what two steps make, saved and loaded between them."""
    for batch in BATCHES[:2]:
        program = build(plan, batch, optimizer=adagrad)
        if batch is BATCHES[1]:
            program.load(folder)
        program.train_step(batch)
        program.save(folder)
    return program.state_dict()


def test_slices_that_were_loaded(threads: Threads, tmp_path: Path) -> None:
    """State that lies in slices, loaded or made with the optimizer, is stepped on elsewhere."""
    base, plans = "zero(stage=1, over=dp)", []
    for rows in (_under("offload(gradients)", base), base):
        plans.append(planned(words(), rows, "dp=2"))
    seen, plain = (
        threads.run(gone_on, 2, plan, str(tmp_path / str(k)))[0] for k, plan in enumerate(plans)
    )
    assert all(torch.equal(seen[name], value) for name, value in plain.items())


def _same(a: dict[str, dict[str, Any]], b: dict[str, dict[str, Any]]) -> bool:
    pairs = [(v, b[name][key]) for name, slots in a.items() for key, v in slots.items()]
    return bool(pairs) and all(
        torch.equal(torch.as_tensor(x), torch.as_tensor(y)) for x, y in pairs
    )


def test_without_an_optimizer_gradients_come_back() -> None:
    """The caller's own step finds the gradients on the parameters; a plain loop is refused."""
    program = build(planned(words(), ALL.format("cpu")), BATCHES[0])
    plain = build(planned(words(), ""), BATCHES[0])
    for one in (program, plain):
        one.train_step(BATCHES[0])
    for name, parameter in plain.assembly.parameters.items():
        mine = program.assembly.parameters[name].grad
        assert mine is not None and torch.equal(mine, parameter.grad)
    with pytest.raises(Refusal, match="S617") as caught:
        _ = program.module
    assert "leave the device at once: your own loop would find none" in caught.value.render()


# -- files -----------------------------------------------------------------------------------------


def mapped(folder: Path) -> int:
    """Files of a folder that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(str(folder) in line for line in lines)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="maps are read from /proc")
def test_files_are_real_and_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on disk are mapped files of the folder, which shows none; all go with the program."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    program = build(planned(words(), ALL.format("disk")), BATCHES[0], optimizer=adamw)
    program.train_step(BATCHES[0])
    parameters = len(program.assembly.parameters)
    assert mapped(tmp_path) >= 3 * parameters  # values and two moments
    assert not list(tmp_path.iterdir())
    del program
    gc.collect()
    assert mapped(tmp_path) == 0


@contextlib.contextmanager
def full_after(written: int, scratch: ScratchFiles) -> Iterator[None]:
    """A disk that has room for so many bytes more."""
    plain, left = os.posix_fallocate, [written]

    def reserve(file: int, at: int, size: int) -> None:
        left[0] -= size
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        plain(file, at, size)

    os.posix_fallocate = reserve
    try:
        yield
    finally:
        os.posix_fallocate = plain


def everything(program: Program) -> dict[str, Any]:
    slots = program.optimizer_state()
    moments = {
        f"{n}.{k}": torch.as_tensor(v).clone() for n, s in slots.items() for k, v in s.items()
    }
    return {**{n: v.clone() for n, v in program.state_dict().items()}, **moments}


@pytest.mark.parametrize("room", [0, 1 << 15])
@pytest.mark.parametrize(
    "rows", [ALL.format("disk"), "offload(optimizer, to=disk)", "offload(gradients, to=disk)"]
)
def test_a_full_disk_undoes_the_step(rows: str, room: int) -> None:
    """Wherever in a step the disk is full: a clear refusal, weights, moments and buffers as they
    were, and once there is room the steps go on as if nothing had been."""
    program, plain = (build(planned(words(), r), BATCHES[0], optimizer=adamw) for r in (rows, ""))
    assert program.offloaded is not None
    for one in (program, plain):
        one.train_step(BATCHES[0])
    before = everything(program)
    with full_after(room, program.offloaded.scratch), pytest.raises(Refusal) as caught:
        program.train_step(BATCHES[1])
    told = caught.value.render()
    assert "S850" in told and os.strerror(errno.ENOSPC) in told and "TMPDIR" in told
    after = everything(program)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    for one in (program, plain):
        one.train_step(BATCHES[2])
    want, got = everything(plain), everything(program)
    assert all(torch.equal(want[name], got[name]) for name in want)


def test_a_full_disk_at_build_and_in_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters that do not fit are refused by `build`, activations by the step."""
    monkeypatch.setattr("schedlang.runtime.offload.offloaded_activations.MIN_BYTES", 0)
    with full_after(100, ScratchFiles()), pytest.raises(Refusal, match="was not built"):
        build(planned(words(), "offload(parameters, to=disk)"), BATCHES[0], optimizer=sgd)
    rows = "layers.* offload(activations, to=disk)"
    program = build(planned(words(), rows), BATCHES[0], optimizer=sgd)
    before = everything(program)
    with (
        full_after(100, ScratchFiles()),
        pytest.raises(Refusal, match="nothing was changed: the state is that before the step"),
    ):
        program.train_step(BATCHES[0])
    after = everything(program)
    assert all(torch.equal(before[name], after[name]) for name in before)


def one_full(plan: Any) -> tuple[str, bool]:
    """On a rank: a step in which only rank 1 finds the disk full."""
    program = build(plan, BATCHES[0], optimizer=sgd)
    before = {n: v.clone() for n, v in program.state_dict().items()}
    assert program.offloaded is not None
    if program.assembly.ranks.rank == 1:
        program.offloaded.scratch.failure = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(Refusal) as caught:
        program.train_step(BATCHES[0])
    after = program.state_dict()
    same = all(torch.equal(before[name], after[name]) for name in before)
    return caught.value.diagnostic.code, same


def test_all_ranks_refuse_alike(threads: Threads) -> None:
    """A disk that is full on one rank undoes the step on all."""
    plan = planned(words(), "offload(optimizer, to=disk)\nzero(stage=0, over=dp)", "dp=2")
    assert threads.run(one_full, 2, plan) == [("S850", True)] * 2


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
    """Rows without meaning, and two homes for one parameter."""
    told = refused(words(), rows, mesh)
    assert code in told and said in told, told


def built(plan: Any) -> str:
    """The message of the refusal that a rank's build ends in."""
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
            ALL.format("disk") + "\nzero(stage=1, over=dp)",
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
    """Half of what is gathered as one, and weights of several versions."""
    relax = "staleness" if "PipeDream" in rows else ""
    for told in threads.run(built, 2, planned(words(tied=False), rows, mesh, relax)):
        assert all(word in told for word in said), told


def test_the_page_is_executed(capsys: pytest.CaptureFixture[str]) -> None:
    """The program of the page prints what the page says, give or take a tenth."""
    page = (Path(__file__).parents[2] / "docs" / "offload.md").read_text()
    source, told = re.findall(r"^```(?:python)?\n((?:import|\d).*?)^```$", page, re.S | re.M)
    exec(compile(source, "offload.md", "exec"), {"__name__": "page"})
    said = capsys.readouterr().out
    counts = [[int(word) for word in re.findall(r"(\d+) KiB", text)] for text in (said, told)]
    assert len(counts[0]) == 4
    assert all(abs(a - b) < b / 10 for a, b in zip(*counts)), said
    assert re.sub(r"\d+ KiB", "", said) == re.sub(r"\d+ KiB", "", told)
