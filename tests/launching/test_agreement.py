"""Agreement of ranks: different builds are refused with their difference, and no rank hangs.

Each kind of disagreement occurs in jobs: another seed, file, version, setting, batch.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import schedlang
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime.comm import agreement
from schedlang.runtime.comm.agreement import (
    AgreementItem,
    checksum,
    describe_differences,
    join_world,
)
from schedlang.runtime.launch.pool import Pool
from tests.launching.elastic_nodes import is_running

WIDE = 8


class Block(nn.Module):
    """A residual pair of linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDE, 2 * WIDE), nn.Linear(2 * WIDE, WIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of both branches."""
        output: torch.Tensor = x + self.down(F.gelu(self.up(x)))
        return output


class Net(nn.Module):
    """Blocks, and their own loss."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.scale = scale

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the mean of squares."""
        for block in self.blocks:
            x = block(x)
        return {"loss": F.mse_loss(x * self.scale, y)}


class Steep(Net):
    """Another forward with the same parameters."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the mean of absolute values."""
        for block in self.blocks:
            x = block(x)
        return {"loss": F.l1_loss(x, y)}


def _batch(seed: int = 0, rows: int = 4) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(rows, WIDE, generator=draw) for name in "xy"}


def _adamw(named: Any, lr: float = 1e-3, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=lr, **options)


def _schedule(model: nn.Module, layout: str = "zero 1") -> Any:
    sch = schedlang.create_schedule(model)
    kind, _, number = layout.partition(" ")
    if kind == "zero":
        sch.mesh(dp=2)
        sch.zero(stage=int(number), over="dp")
    elif kind == "tp":
        sch.mesh(tp=2)
        sch["blocks.*.up"].shard("col", over="tp")
        sch["blocks.*.down"].shard("row", over="tp")
    else:
        sch.mesh(pp=2)
        sch["blocks"].pipeline_split(over="pp")
        sch.pipeline(order="1F1B", micro=int(number))
    return sch


def train_on_rank(
    layout: str = "zero 1",
    seed: int = 0,
    made: Callable[[], nn.Module] = Net,
    steps: int = 1,
    batch: Callable[[int], Any] = _batch,
    first: Any = None,
    **options: Any,
) -> list[float]:
    """Train on this rank as a user's script does, and return the losses."""
    torch.manual_seed(seed)
    options = {"optimizer": _adamw, "batch": first or _batch()} | options
    program = _schedule(made(), layout).build(**options)
    return [float(program.train_step(batch(step))) for step in range(steps)]


def on_rank_one(**options: Any) -> dict[str, Any]:
    """Return these options on rank 1, none elsewhere."""
    return options if dist.get_rank() == 1 else {}


def half_on_rank_one() -> nn.Module:
    return Net().double()


def frozen_on_rank_one() -> nn.Module:
    model = Net()
    model.blocks[0].up.bias.requires_grad_(False)
    return model


def _other_loss(output: Any, batch: Any) -> torch.Tensor:
    doubled: torch.Tensor = output["loss"] * 2
    return doubled


def _loss(output: Any, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = output["loss"]
    return loss


def with_two_groups(named: Any) -> torch.optim.Optimizer:
    (_, parameter), *others = named
    return torch.optim.AdamW(
        [{"params": [parameter], "weight_decay": 0.5}, {"params": [p for _, p in others]}], lr=1e-3
    )


def with_other_version() -> list[float]:
    if dist.get_rank() == 1:
        torch.__version__ = type(torch.__version__)("2.11.0")  # type: ignore[attr-defined]
    try:
        return train_on_rank()
    finally:
        torch.__version__ = "2.13.0"  # type: ignore[attr-defined]


# what rank 1 does otherwise -> what the refusal says of it
KINDS: dict[str, tuple[Callable[[], Any], str]] = {
    "weights, sliced": (
        lambda: train_on_rank("zero 3", **on_rank_one(seed=1)),
        "rank 1 has different initial weights",
    ),
    "weights, sharded": (
        lambda: train_on_rank("tp", **on_rank_one(seed=1)),
        "rank 1 has different initial weights",
    ),
    "weights, staged": (
        lambda: train_on_rank("pp 2", **on_rank_one(seed=1)),
        "rank 1 has different initial weights",
    ),
    "stage": (lambda: train_on_rank("zero 2" if dist.get_rank() else "zero 1"), "`row 1` is zero("),
    "schedule": (lambda: train_on_rank("tp" if dist.get_rank() else "zero 1"), "a different mesh"),
    "microbatches": (lambda: train_on_rank("pp 4" if dist.get_rank() else "pp 2"), "micro=4"),
    "rate": (
        lambda: train_on_rank(**on_rank_one(optimizer=lambda n: _adamw(n, lr=3e-4))),
        "0.0003 on rank 1",
    ),
    "optimizer": (
        lambda: train_on_rank(**on_rank_one(optimizer=lambda n: torch.optim.SGD(n, lr=1e-3))),
        "SGD",
    ),
    "groups": (
        lambda: train_on_rank(**on_rank_one(optimizer=with_two_groups)),
        "weight_decay 0.5 on rank 1",
    ),
    "no optimizer": (
        lambda: train_on_rank(**on_rank_one(optimizer=None)),
        "`optimizer` is None on rank 1",
    ),
    "clip": (lambda: train_on_rank(**on_rank_one(clip=1.0)), "different options of `build`"),
    "dtype": (
        lambda: train_on_rank(**on_rank_one(made=half_on_rank_one)),
        "float64 (16, 8) on rank 1",
    ),
    "frozen": (lambda: train_on_rank(**on_rank_one(made=frozen_on_rank_one)), "frozen on rank 1"),
    "constant": (lambda: train_on_rank(**on_rank_one(made=lambda: Net(2.0))), "scale=2.0"),
    "class": (lambda: train_on_rank(**on_rank_one(made=Steep)), "`the model` is Steep("),
    "loss": (
        lambda: train_on_rank(loss=_other_loss if dist.get_rank() else _loss),
        "`loss` differs on",
    ),
    "version": (with_other_version, "`torch` is 2.11.0 on rank 1, 2.1"),
    "names of the batch": (
        lambda: train_on_rank(**on_rank_one(first=_batch() | {"z": torch.ones(4)})),
        "a different batch to build",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_differs_is_named(pool: Pool, kind: str) -> None:
    """All ranks refuse equally before any group is created, and name the difference."""
    body, message = KINDS[kind]
    with pytest.raises(Refusal) as info:
        pool.run(body, 2)
    assert info.value.diagnostic.code == "S650"
    assert message in str(info.value), str(info.value)


@pytest.mark.parametrize("how", ["zero 3", "tp", "pp 2"])
def test_ranks_that_agree_train(pool: Pool, how: str) -> None:
    """The losses are those of a program without comparisons."""
    assert pool.run(train_on_rank, 2, how) == pool.run(
        lambda: train_on_rank(how, compare="nothing"), 2
    )
    batches = pool.run(lambda: train_on_rank(how, compare="batches", steps=2), 2)
    assert batches[0] == batches[1] and len(batches[0]) == 2


@pytest.mark.parametrize("comes", [0, 1])
def test_a_rank_that_does_not_come(pool: Pool, comes: int) -> None:
    """The waiting rank refuses after its timeout, and names the missing one."""

    def body() -> None:
        if dist.get_rank() == comes:
            train_on_rank(wait=1.0)
        else:
            time.sleep(3000)

    start = time.monotonic()
    with pytest.raises(Refusal) as info:
        pool.run(body, 2)
    assert info.value.diagnostic.code == "S651"
    assert f"rank {1 - comes} has not called `build` within 1 s" in str(info.value)
    assert time.monotonic() - start < 300  # no rank waits for the other to end


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', and must be a number of ranks above 0"),
        ({"WORLD_SIZE": "-1"}, "WORLD_SIZE is '-1'"),
        ({"RANK": "2"}, "RANK is '2', and must be a rank from 0 to 1"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR is not set"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT is 'http', and must be a port from 0 to 65535"),
    ],
    ids=lambda value: None if isinstance(value, str) else "".join(value),
)
def test_variables_of_no_job(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, str | None], says: str
) -> None:
    """Torch would raise its own error or wait for ten minutes, for a rank that does not exist."""
    job = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in {**job, **changed}.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    with pytest.raises(Refusal) as info:
        join_world(wait=1.0)
    assert info.value.diagnostic.code == "S654"
    assert info.value.diagnostic.title.startswith(f"the environment variable {says}")


ENDS_EARLY = """
import os, sys, time
if os.environ["RANK"] == "1":
    {how}
from schedlang.runtime.comm.agreement import join_world
began = time.monotonic()
try:
    join_world(wait=60.0)
finally:
    print(f"waited {{time.monotonic() - began < 20}}", flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="processes are read from /proc")
@pytest.mark.parametrize("how", ["sys.exit(0)", "raise ValueError('of its own')"])
def test_a_rank_that_ends_before_it_joins(tmp_path: Path, how: str) -> None:
    """It is noticed at once, not after the time in which a slow rank may come; and of a rank that
    fails, its own error is what is told."""
    script = tmp_path / "job.py"
    script.write_text(ENDS_EARLY.format(how=how))
    command = ("torchrun", "--nproc-per-node", "2", "--standalone", str(script))
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    if "exit" in how:
        assert "waited True" in done.stdout
        assert "error[S651]: rank 1 ended before all ranks had called `build`" in done.stderr
    else:
        assert "ValueError: of its own" in done.stderr and "S651" not in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="processes are read from /proc")
@pytest.mark.parametrize("how", ["time.sleep(7)", "sys.exit(0)"], ids=["slow", "ended"])
def test_ranks_that_scripts_start(tmp_path: Path, how: str) -> None:
    """A script around each rank (`numactl`, a shell) is no end of the others; nor are variables of
    torchrun's own process."""
    job, around = tmp_path / "job.py", tmp_path / "around.sh"
    job.write_text(ENDS_EARLY.format(how=how))
    around.write_text(f"#!/bin/sh\n{sys.executable} {job}\nstatus=$?\nexit $status\n")
    around.chmod(0o755)
    command = ("torchrun", "--nproc-per-node", "2", "--standalone", "--no-python", str(around))
    environment = {**os.environ, "RANK": "0"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert (done.returncode == 0) == ("sleep" in how), done.stderr
    assert ("S651" in done.stderr) == ("exit" in how)


def test_an_address_that_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks started by hand: rank 0 refuses a port that another program has; the others say within
    seconds what they wait for, where torch is silent for minutes."""
    monkeypatch.setattr(agreement, "_SILENCE", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        job = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in job.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(Refusal, match=f"another program of this machine has the port {port}"):
            join_world(wait=1.0)

        def what_is_told() -> str:
            with agreement._speak_while_waiting(1, 2, True):
                time.sleep(1.0)
            return capsys.readouterr().err

        capsys.readouterr()
        assert "does another program have this port?" in (text := what_is_told())
        assert f"rank 1 of 2 waits at MASTER_ADDR:MASTER_PORT 127.0.0.1:{port}" in text
    assert "nothing listens there" in what_is_told()
    monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
    assert "MASTER_ADDR=no-such-host.invalid has no address" in what_is_told()


def test_a_rank_that_cannot_build(pool: Pool) -> None:
    """The other ranks get the reason, and do not wait for it."""

    def broken(named: Any) -> torch.optim.Optimizer:
        raise ValueError("no such device")

    def body() -> str:
        try:
            train_on_rank(**on_rank_one(optimizer=broken))
        except Refusal as refusal:
            return str(refusal)
        except ValueError:
            return "its own"
        return "built"

    message, own_error = pool.run(body, 2)
    assert own_error == "its own"
    assert "rank 1 cannot build its part" in message and "ValueError: no such device" in message


BATCHES: dict[str, tuple[Callable[[int], Any], str]] = {
    "values": (
        lambda step: _batch(step + dist.get_rank()),
        "rank 1 has a different batch in step 0",
    ),
    "later": (lambda step: _batch(step + step * dist.get_rank()), "a different batch in step 1"),
    "rows": (lambda step: _batch(step, rows=4 + 2 * dist.get_rank()), "`x` is (6, 8) on rank 1"),
    "names": (
        lambda step: dict(list(_batch(step).items())[: 2 - dist.get_rank()]),
        "`y` is nothing on rank 1",
    ),
    "dtype": (
        lambda step: {k: v.double() if dist.get_rank() else v for k, v in _batch().items()},
        "`x` is float64 in 2 dims on rank 1",
    ),
}


@pytest.mark.parametrize("compare", ["batches", "build"])
@pytest.mark.parametrize("kind", BATCHES)
def test_batches_are_compared(pool: Pool, kind: str, compare: str) -> None:
    """All ranks refuse the step equally, before any computes; the first step always."""
    batch, message = BATCHES[kind]
    train = partial(train_on_rank, batch=batch, compare=compare, steps=2)
    if (kind, compare) == ("later", "build"):
        assert len(pool.run(train, 2)[0]) == 2
        return
    with pytest.raises(Refusal) as info:
        pool.run(train, 2)
    assert info.value.diagnostic.code == "S652" and message in str(info.value), str(info.value)


def test_the_first_evaluation_is_compared(pool: Pool) -> None:
    """Like the first step; later evaluations are not."""

    def body(apart: int) -> int:
        torch.manual_seed(0)
        program = _schedule(Net(), "tp").build(batch=_batch())
        for step in range(2):
            program.eval_step(_batch(dist.get_rank() if step == apart else 0))
        return apart

    with pytest.raises(Refusal, match="rank 1 has a different batch in an evaluation"):
        pool.run(body, 2, 0)
    assert pool.run(body, 2, 1) == [1, 1]


def test_rows_of_ones_own_may_differ(pool: Pool) -> None:
    """With `local=True` only ranks that share rows need the same batch."""

    def body(over: str) -> float:
        torch.manual_seed(0)
        program = _schedule(Net(), over).build(batch=_batch(), optimizer=_adamw, compare="batches")
        return float(program.train_step(_batch(dist.get_rank()), local=True))

    assert len(set(pool.run(body, 2, "zero 1"))) == 1
    with pytest.raises(Refusal, match="rank 1 has a different batch in step 0"):
        pool.run(body, 2, "tp")


def test_a_rate_that_is_changed_on_one_rank(pool: Pool) -> None:
    """A scheduler that ran on one rank only is detected with the batch."""

    def body() -> None:
        torch.manual_seed(0)
        program = _schedule(Net(), "tp").build(batch=_batch(), optimizer=_adamw, compare="batches")
        for group in program.optimizer.param_groups:
            group["lr"] = 0.1 * (1 + dist.get_rank())
        program.train_step(_batch())

    with pytest.raises(Refusal, match="rank 1 has a different optimizer in step 0"):
        pool.run(body, 2)


def test_groups_wait_as_long_as_the_world(pool: Pool) -> None:
    """A group of some ranks has the world's timeout, not torch's default."""

    def body() -> tuple[float, float]:
        from schedlang.runtime.comm import world as comm

        seconds = [
            group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
            for group in (dist.group.WORLD, comm.current_world().make_group([(0, 1)], "more"))
        ]
        return seconds[0], seconds[1]

    ((world, group), _) = pool.run(body, 2)
    assert world == group == 12 * 3600


def test_most_ranks_are_right() -> None:
    """The minority is named; with equal sides, the side without the lowest rank."""
    item = AgreementItem("optimizer", {})
    rates = {0: {"lr": "1"}, 1: {"lr": "2"}, 2: {"lr": "1"}, 3: {"lr": "1"}}
    assert describe_differences(item, rates) == (
        "rank 1 has a different optimizer",
        ["`lr` is 2 on rank 1, 1 on ranks 0, 2 and 3"],
    )
    title, _ = describe_differences(item, {0: {"lr": "1"}, 1: {"lr": "2"}})
    assert title == "rank 1 has a different optimizer"


def test_parts_that_some_hold() -> None:
    """Parts that a rank does not have are not compared with those of others."""
    item = AgreementItem("optimizer", {}, partial=True)
    assert describe_differences(item, {0: {"a": "1"}, 1: {"b": "1"}})[1] == []
    assert len(describe_differences(item, {0: {"a": "1"}, 1: {"b": "1", "a": "2"}})[1]) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_a_checksum_sees_every_change(dtype: torch.dtype) -> None:
    """It depends on each value, their order and the shape, not on the memory layout."""
    original = torch.arange(3 * 5000).reshape(3, 5000).remainder(97).to(dtype)
    expected = checksum(original)
    assert checksum(original.clone()) == expected == checksum(torch.cat([original, original])[3:])
    assert checksum(original.t().contiguous().t()) == expected
    swapped = original.clone()
    swapped[0, 1], swapped[2, 4000] = original[2, 4000] + 1, original[0, 1]
    different = [swapped, original.view(5000, 3), original.flip(0), original.roll(1, 1)]
    for index in (0, 7777, original.numel() - 1):
        changed = original.clone()
        changed.view(-1)[index] += 1
        different.append(changed)
    assert len({expected, *map(checksum, different)}) == 1 + len(different)


def test_a_checksum_of_nothing() -> None:
    """Tensors without readable bits are not compared; empty and single-element ones are."""
    assert checksum(torch.empty(3, device="meta")) == ""
    assert checksum(torch.zeros(())) != checksum(torch.ones(()))
    assert checksum(torch.ones(0)) != checksum(torch.ones(0, 2))


AGENT = """
import os, sys, time, torch, schedlang
from torch import nn

torch.manual_seed(0)
sch = schedlang.create_schedule(nn.Linear(4, 4))
sch.mesh(dp=2)
sch.zero(stage=0, over="dp")
program = sch.build(batch={"input": torch.ones(2, 4)}, loss=lambda out, batch: out.mean())
open(f"{sys.argv[1]}/{os.environ['RANK']}.new", "w").write(str(os.getpid()))
os.rename(f"{sys.argv[1]}/{os.environ['RANK']}.new", f"{sys.argv[1]}/{os.environ['RANK']}")
time.sleep(300)
"""


@pytest.mark.deep
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_killed_torchrun_leaves_no_rank(tmp_path: Path) -> None:
    """Ranks that wait in `build` end with the agent that started them."""
    (tmp_path / "train.py").write_text(AGENT)
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    agent = subprocess.Popen([*start, str(tmp_path / "train.py"), str(tmp_path)])
    files = [tmp_path / str(rank) for rank in range(2)]
    try:
        end = time.monotonic() + 120
        while not all(file.exists() for file in files) and time.monotonic() < end:
            time.sleep(0.2)
        pids = [int(file.read_text()) for file in files]
    finally:
        agent.kill()
        agent.wait()
    end = time.monotonic() + 5
    while any(map(is_running, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    alive = [pid for pid in pids if is_running(pid)]
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    assert not alive


def test_classes_of_one_name_are_told_apart() -> None:
    """A decorator's subclass keeps the name of its base: both are compared, in one order."""
    from schedlang.passes.lower.fingerprint import _code_items

    def made(base: type[nn.Module], times: float) -> type[nn.Module]:
        class Timed(base):  # type: ignore[misc, valid-type]
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x * times

            def other(self) -> float:
                return 3.0 if times else 4.0

        Timed.__qualname__ = base.__qualname__
        return Timed

    single, double = dict(_code_items(Net())), dict(_code_items(made(Net, 2.0)()))
    assert single.keys() == double.keys()
    name = Net.__qualname__
    assert single[name] in double[name] and double[name].count("forward ") == 2
