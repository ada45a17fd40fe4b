"""Tests of `doctor`: it names the rank, the module and the row of what hangs, or is slow."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from schedlang.cli import app
from schedlang.diagnostics.source import Source
from schedlang.language.syntax import parse
from schedlang.runtime.launch.pool import Pool
from schedlang.schedule import Schedule
from schedlang.verbs.diagnosis import Diagnosis, diagnose
from schedlang.verbs.ledgers import Job, Ledger, Op
from tests import forks

ROOT = Path(__file__).parents[2]

MODEL = '''
"""Three blocks of two projections each; on rank 1 something may go wrong in the fourth step."""

import os
import sys
import time

import torch
from torch import nn

import schedlang
from schedlang.runtime.comm import collectives
from schedlang.runtime.launch import hang_watch

hang_watch.HANG_AFTER = 4.0
HOW, STEPS = sys.argv[1], int(sys.argv[2])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 512), nn.Linear(512, 64)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def slows(*given):
    time.sleep(0.3)


def never_comes_back(*given):
    time.sleep(1000)


def skipping(label):
    """An all-reduce that leaves out the first one for a module."""
    plain, left = collectives.all_reduce, []

    def all_reduce(x, group):
        if group.label == label and not left:
            left.append(group)
            return x.clone()
        return plain(x, group)

    return all_reduce


torch.manual_seed(0)
model = nn.Sequential(*(Block() for _ in range(3)))
batch = {"input": torch.randn(1024, 64)}
program = schedlang.load("net.sched", model).build(
    batch=batch,
    loss=lambda output, batch: output.pow(2).mean(),
    optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=1e-3),
)
there = os.environ["RANK"] == "1"
if there and HOW == "slow":
    program.module[1].up.register_forward_hook(slows)
for step in range(STEPS):
    if there and step == 3 and HOW == "away":
        program.module[1].down.register_forward_pre_hook(never_comes_back)
    if there and step == 3 and HOW == "skip":
        collectives.all_reduce = skipping("1.down")
    program.train_step(batch)
'''

SCHEDULE = """schedule 1 for Sequential

mesh(dp=2, tp=2)

step "both" {
  *.up    shard(col, over=tp)
  *.down  shard(row, over=tp)
  zero(stage=1, over=dp)
}
"""


def _job(folder: Path, how: str, steps: int) -> subprocess.CompletedProcess[str]:
    """Four ranks under torchrun that write records."""
    (folder / "train.py").write_text(MODEL)
    (folder / "net.sched").write_text(SCHEDULE)
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    more = {"PYTHONPATH": str(ROOT), "SCHEDLANG_RECORD": str(folder / "record")}
    words = [*start, "train.py", how, str(steps)]
    return forks.run(*words, cwd=folder, timeout=600, env={**os.environ, **more})


def _doctor(folder: Path, *words: str) -> tuple[int, dict[str, Any], str]:
    """Its exit code, facts, and text."""
    facts = CliRunner().invoke(app, ["doctor", str(folder), "--json", *words])
    told = CliRunner().invoke(app, ["doctor", str(folder), *words])
    assert facts.exit_code == told.exit_code, told.output
    return facts.exit_code, json.loads(facts.stdout), told.stdout


def test_a_rank_that_never_comes_back(tmp_path: Path) -> None:
    """After a hang: the rank that did not come, to which all-reduce, for which module, by which
    row, and the line where it stands; others that wait are not blamed."""
    done = _job(tmp_path, "away", 6)
    assert done.returncode and "schedlang doctor" in done.stderr, done.stderr
    code, facts, text = _doctor(tmp_path / "record", "--stuck-after", "3")
    assert code == 1 and facts["stuck"] and facts["causes"] == [1], text
    (mine,) = [one for one in facts["pending"] if one["ranks"] == [0, 1]]
    assert (mine["op"], mine["module"], mine["absent"]) == ("all-reduce", "1.down", [1])
    assert mine["row"] == "net.sched:7  shard(row, over=tp)" and mine["waiting"] == [0]
    assert "rank 1 has not reached all-reduce" in text and "in never_comes_back" in text


def test_a_rank_that_skips(tmp_path: Path) -> None:
    """One rank leaves a collective out: values go wrong first, and the job hangs later, elsewhere.
    The first difference names both, with module and row."""
    assert _job(tmp_path, "skip", 6).returncode
    code, facts, text = _doctor(tmp_path / "record", "--stuck-after", "3")
    assert code == 1 and facts["stuck"], text
    (first,) = [one for one in facts["differs"] if one["ranks"] == [0, 1]]
    assert [op["module"] for op in first["ops"]] == ["1.down", "2.down"]
    assert {op["row"] for op in first["ops"]} == {"net.sched:7  shard(row, over=tp)"}
    assert "has skipped what only one of them does" in text


def test_a_slow_rank(tmp_path: Path) -> None:
    """In a job that gets on: whose own time is longer, in which module, and the rows at it; all
    four have steps of equal length, for they wait.  What the groups carried is told."""
    done = _job(tmp_path, "slow", 8)
    assert done.returncode == 0, done.stderr
    code, facts, text = _doctor(tmp_path / "record")
    assert code == 1 and facts["slow"] == [1] and not facts["stuck"], text
    assert facts["where"]["1"][0]["module"] == "1.up" and "slows" in facts["where"]["1"][0]["line"]
    assert "net.sched:6  shard(col, over=tp)" in facts["where"]["1"][0]["row"]
    assert sorted(one["rank"] for one in facts["steps"]) == [0, 1, 2, 3]
    assert {tuple(one["ranks"]) for one in facts["links"]} >= {(0, 1), (2, 3)}
    assert all(one["rate"] > 0 for one in facts["links"])


# -- what is written changes nothing ---------------------------------------------------------------


def _trained(order: str) -> list[Any]:
    """Losses of three steps, and whether a record was written."""
    from schedlang.runtime.launch import rank_record

    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 8) for _ in range(4)]
    model = torch.nn.Sequential(torch.nn.Sequential(*layers))
    text = f'schedule 1 for Sequential\n\nmesh(dp=2, pp=2)\n\nstep "s" {{\n  {order}\n}}\n'

    sch = Schedule(model, parse(Source("s", text)))
    batch = {"input": torch.randn(8, 8, generator=torch.Generator().manual_seed(1))}
    program = sch.build(
        batch=batch,
        loss=lambda output, batch: output.pow(2).mean(),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
    )
    losses = [float(program.train_step(batch)) for _ in range(3)]
    made = rank_record.current_record()
    return [losses, made is not None, len(made.ops) if made else 0]


ROWS = [
    '0  pipeline_split(over=pp)\n  zero(stage=3, over=dp)\n  pipeline(order="1F1B", micro=2)',
    "0  pipeline_split(over=pp)\n  zero(stage=1, over=dp)\n  overlap(gradients, transfers)\n"
    '  pipeline(order="ZB-H1", micro=2)',
]


@pytest.mark.parametrize("rows", ROWS, ids=["zero3", "overlapped"])
def test_a_record_changes_no_number(pool: Pool, tmp_path: Path, rows: str) -> None:
    """Losses are the same to the last bit: messages, overlapped sums and torch's fully_shard, which
    looks at the class of handles, go through the record."""
    plain = pool.run(_trained, 4, rows, environ={"SCHEDLANG_RECORD": ""})
    told = pool.run(_trained, 4, rows, environ={"SCHEDLANG_RECORD": str(tmp_path)})
    assert [one[0] for one in plain] == [one[0] for one in told]
    assert not any(one[1] for one in plain) and all(one[2] > 6 for one in told)
    code, facts, text = _doctor(tmp_path)
    assert facts["over"] == [0, 1, 2, 3] and not facts["pending"], text


# -- what is judged --------------------------------------------------------------------------------


def _ledger(rank: int, ops: Sequence[Op], **more: Any) -> Ledger:
    counts: dict[Any, int] = {}
    for one in ops:
        counts[one.channel] = max(counts.get(one.channel, 0), one.number)
    lanes = {"a": (0, 1), "b": (1, 2), "c": (0, 2), "w": (0, 1, 2)}
    given = dict(host="h", device="cpu", began=0.0, written=100.0, over=False, error="", step=1)
    made = {**given, "steps": (), "where": (), "stack": ("x.py:1 in f",), **more}
    return Ledger(rank=rank, world=3, lanes=lanes, counts=counts, ops=tuple(ops), **made)


def _waiting(lane: str, number: int, **more: Any) -> Op:
    return Op(lane, number, more.pop("op", "all-reduce"), waits=True, began=50.0, **more)


def _found(*ledgers: Ledger, now: float = 101.0) -> Diagnosis:
    return diagnose(Job({one.rank: one for one in ledgers}, 3, now))


def test_a_chain_ends_at_its_cause() -> None:
    """Rank 0 waits for 1, 1 for 2: only 2 is the cause."""
    found = _found(_ledger(0, [_waiting("a", 1)]), _ledger(1, [_waiting("b", 1)]), _ledger(2, []))
    assert found.is_stuck and found.causes == (2,)


def test_a_circle_has_no_cause() -> None:
    """Three groups of two, taken in an order that closes a circle."""
    ops = [_waiting("a", 1), _waiting("b", 1), _waiting("c", 1)]
    found = _found(*(_ledger(rank, [op]) for rank, op in enumerate(ops)))
    assert found.is_stuck and found.causes == () and len(found.missing) == 3
    assert [one.absent for one in found.missing] == [(1,), (2,), (0,)]


def test_messages_are_counted_by_pairs() -> None:
    """A receive waits for the second message of a channel; the sender has sent one, and others
    elsewhere."""
    sent = [
        Op("w", 1, "send", ends=(0, 1), ended=1.0),
        *(Op("w", k, "send", ends=(0, 2), ended=1.0) for k in (1, 2)),
    ]
    found = _found(
        _ledger(0, sent), _ledger(1, [_waiting("w", 2, op="receive", ends=(0, 1))]), _ledger(2, [])
    )
    assert found.causes == (0,) and found.missing[0].absent == (0,)


def test_what_all_came_to_is_the_network() -> None:
    """Nobody is blamed."""
    found = _found(*(_ledger(rank, [_waiting("w", 4)]) for rank in range(3)))
    assert found.is_stuck and found.causes == () and found.missing[0].absent == ()


def test_silence_and_endings() -> None:
    """A process that was killed gives no sign; one that raised tells its error; one that never
    began has no file."""
    over = _ledger(1, [], over=True, error="ValueError: x")
    found = _found(_ledger(0, []), over, now=130.0)
    assert dict(found.silent) == {0: 30.0} and found.unrecorded == (2,) and not found.is_healthy


def test_the_last_to_come_tells_of_the_link() -> None:
    """Of a sum of 1 MiB over two ranks each sends half of it twice; whoever came first waited."""
    ops = [Op("a", 1, "all-reduce", size=1 << 20, began=b, ended=3.0) for b in (1.0, 2.0)]
    found = _found(*(_ledger(rank, [op]) for rank, op in enumerate(ops)))
    (link,) = found.links
    assert link.ranks == (0, 1) and link.rate == pytest.approx(1 << 20)


# -- what is read ----------------------------------------------------------------------------------


def _flown(folder: str) -> bool:
    """Rank 0 begins a sum that rank 1 has not come to; both dump torch's own recorder then."""
    rank, one = dist.get_rank(), torch.ones(4)
    dist.all_reduce(one)
    work = dist.all_reduce(one, async_op=True) if rank == 0 else None
    told: Any = torch._C._distributed_c10d
    dumped = told._dump_fr_trace(True, True, False)
    known = len(pickle.loads(dumped)["entries"])
    Path(folder, f"nccl_trace_rank_{rank}").write_bytes(dumped)
    if rank == 1:
        dist.all_reduce(one)
    if work is not None:
        work.wait()
    return known > 0


def test_dumps_of_torchs_flight_recorder(tmp_path: Path) -> None:
    """What torch writes is read: who has not come, to which operation, called at which line."""
    with Pool() as fresh:  # the recorder of a process keeps what earlier jobs did in it
        known = fresh.run(_flown, 2, str(tmp_path), environ={"TORCH_FR_BUFFER_SIZE": "64"})
    if not all(known):
        pytest.skip("this torch records nothing of gloo")
    code, facts, text = _doctor(tmp_path, "--stuck-after", "0.1")
    (one,) = [one for one in facts["pending"] if one["absent"]]  # what ends now may be there, too
    assert (one["op"], one["absent"], one["waiting"]) == ("all-reduce", [1], [0]), text
    assert "test_doctor.py" in one["module"] and facts["causes"] == [1]


def _nccl(rank: int, state: str) -> Mapping[str, Any]:
    """A dump as NCCL's: a message, pending or done, and its group's ranks."""
    entry = {
        "process_group": ("3", "pipe"),
        "collective_seq_id": 0,
        "p2p_seq_id": 1,
        "profiling_name": f"nccl:{'send' if rank == 4 else 'recv'} 0->1",
        "time_created_ns": 10**9,
        "input_sizes": [[2, 3]],
        "input_dtypes": ["BFloat16"],
        "state": state,
        "is_p2p": True,
    }
    entries = [entry] if state else []
    return {"pg_config": {"3": {"ranks": "[4, 6]"}}, "entries": entries}


def test_messages_in_a_dump(tmp_path: Path) -> None:
    """Places in a group are told as ranks of the job; a peer without the other end has not come."""
    for rank, state in ((4, ""), (6, "started")):
        (tmp_path / f"trace_{rank}").write_bytes(pickle.dumps(_nccl(rank, state)))
    _, facts, text = _doctor(tmp_path)
    (one,) = facts["pending"]
    assert (one["ends"], one["absent"], one["bytes"]) == ([4, 6], [4], 12), text


class _Evil:
    def __reduce__(self) -> Any:
        return print, ("run",)


def test_what_is_refused(tmp_path: Path) -> None:
    """No folder, nothing in it, a damaged record, one of another version; a dump runs no code."""
    runner = CliRunner()

    def said(folder: Path) -> str:
        result = runner.invoke(app, ["doctor", str(folder)])
        assert result.exit_code == 2, result.output
        assert "run\n" not in result.stdout
        return " ".join(result.stderr.split())

    assert "is no folder" in said(tmp_path / "none") and "neither" in said(tmp_path)
    (tmp_path / "trace_0").write_bytes(pickle.dumps({"entries": [_Evil()]}))
    assert "it asks for" in said(tmp_path)
    (tmp_path / "rank0.json").write_text('{"version": 1, "rank"')
    assert "cannot be read" in said(tmp_path)
    (tmp_path / "rank0.json").write_text('{"version": 0}')
    assert "of version 0" in said(tmp_path)


def test_torch_is_not_imported() -> None:
    """Neither its help nor its look at a folder needs torch."""
    code = (
        "import sys; sys.argv = ['schedlang', 'doctor', *sys.argv[1:]]\n"
        "from schedlang.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    assert 'torch' not in sys.modules"
    )
    for words in (["--help"], [str(ROOT / "nothing")]):
        done = forks.anew("-c", code, *words)
        assert done.returncode == 0, done.stderr
