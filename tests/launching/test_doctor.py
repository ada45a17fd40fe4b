"""`schedlang doctor`: it names the rank, module and schedule row of a hang or a slow rank."""

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
from schedlang.verbs.doctor import Diagnosis, diagnose
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


def run_job(folder: Path, fault: str, steps: int) -> subprocess.CompletedProcess[str]:
    """Run four ranks under torchrun that write records."""
    (folder / "train.py").write_text(MODEL)
    (folder / "net.sched").write_text(SCHEDULE)
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    variables = {"PYTHONPATH": str(ROOT), "SCHEDLANG_RECORD": str(folder / "record")}
    arguments = [*start, "train.py", fault, str(steps)]
    return forks.run(*arguments, cwd=folder, timeout=600, env={**os.environ, **variables})


def run_doctor(folder: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Return the exit code, the JSON and the text of `schedlang doctor`."""
    json_result = CliRunner().invoke(app, ["doctor", str(folder), "--json", *arguments])
    text_result = CliRunner().invoke(app, ["doctor", str(folder), *arguments])
    assert json_result.exit_code == text_result.exit_code, text_result.output
    return json_result.exit_code, json.loads(json_result.stdout), text_result.stdout


def test_a_rank_that_never_comes_back(tmp_path: Path) -> None:
    """After a hang: the absent rank, its all-reduce, module, row and current line; waiting ranks
    are not blamed."""
    process = run_job(tmp_path, "away", 6)
    assert process.returncode and "schedlang doctor" in process.stderr, process.stderr
    code, facts, text = run_doctor(tmp_path / "record", "--stuck-after", "3")
    assert code == 1 and facts["stuck"] and facts["causes"] == [1], text
    (entry,) = [pending for pending in facts["pending"] if pending["ranks"] == [0, 1]]
    assert (entry["op"], entry["module"], entry["absent"]) == ("all-reduce", "1.down", [1])
    assert entry["row"] == "net.sched:7  shard(row, over=tp)" and entry["waiting"] == [0]
    assert "rank 1 has not reached all-reduce" in text and "in never_comes_back" in text


def test_a_rank_that_skips(tmp_path: Path) -> None:
    """One rank skips a collective: values are wrong first, and the job hangs later at another one.

    The first difference names both, with module and row.
    """
    assert run_job(tmp_path, "skip", 6).returncode
    code, facts, text = run_doctor(tmp_path / "record", "--stuck-after", "3")
    assert code == 1 and facts["stuck"], text
    (difference,) = [candidate for candidate in facts["differs"] if candidate["ranks"] == [0, 1]]
    assert [op["module"] for op in difference["ops"]] == ["1.down", "2.down"]
    assert {op["row"] for op in difference["ops"]} == {"net.sched:7  shard(row, over=tp)"}
    assert "has skipped what only one of them does" in text


def test_a_slow_rank(tmp_path: Path) -> None:
    """In a running job: the rank with the longest own time, its module and rows; all four have
    equal steps, since they wait. The rates of groups are reported."""
    process = run_job(tmp_path, "slow", 8)
    assert process.returncode == 0, process.stderr
    code, facts, text = run_doctor(tmp_path / "record")
    assert code == 1 and facts["slow"] == [1] and not facts["stuck"], text
    assert facts["where"]["1"][0]["module"] == "1.up" and "slows" in facts["where"]["1"][0]["line"]
    assert "net.sched:6  shard(col, over=tp)" in facts["where"]["1"][0]["row"]
    assert sorted(entry["rank"] for entry in facts["steps"]) == [0, 1, 2, 3]
    assert {tuple(entry["ranks"]) for entry in facts["links"]} >= {(0, 1), (2, 3)}
    assert all(entry["rate"] > 0 for entry in facts["links"])


# -- what is written changes nothing ---------------------------------------------------------------


def train_on_rank(order: str) -> list[Any]:
    """Return losses of three steps, whether a record was written, and its length."""
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
    record = rank_record.current_record()
    return [losses, record is not None, len(record.ops) if record else 0]


ROWS = [
    '0  pipeline_split(over=pp)\n  zero(stage=3, over=dp)\n  pipeline(order="1F1B", micro=2)',
    "0  pipeline_split(over=pp)\n  zero(stage=1, over=dp)\n  overlap(gradients, transfers)\n"
    '  pipeline(order="ZB-H1", micro=2)',
]


@pytest.mark.parametrize("rows", ROWS, ids=["zero3", "overlapped"])
def test_a_record_changes_no_number(pool: Pool, tmp_path: Path, rows: str) -> None:
    """Losses are the same to the last bit; messages, overlapped sums and torch's fully_shard, which
    checks the class of handles, are recorded."""
    unrecorded = pool.run(train_on_rank, 4, rows, environ={"SCHEDLANG_RECORD": ""})
    recorded = pool.run(train_on_rank, 4, rows, environ={"SCHEDLANG_RECORD": str(tmp_path)})
    assert [result[0] for result in unrecorded] == [result[0] for result in recorded]
    assert not any(result[1] for result in unrecorded) and all(result[2] > 6 for result in recorded)
    code, facts, text = run_doctor(tmp_path)
    assert facts["over"] == [0, 1, 2, 3] and not facts["pending"], text


# -- what is judged --------------------------------------------------------------------------------


def make_ledger(rank: int, ops: Sequence[Op], **changes: Any) -> Ledger:
    counts: dict[Any, int] = {}
    for op in ops:
        counts[op.channel] = max(counts.get(op.channel, 0), op.number)
    lanes = {"a": (0, 1), "b": (1, 2), "c": (0, 2), "w": (0, 1, 2)}
    defaults = dict(host="h", device="cpu", began=0.0, written=100.0, over=False, error="", step=1)
    fields = {**defaults, "steps": (), "where": (), "stack": ("x.py:1 in f",), **changes}
    return Ledger(rank=rank, world=3, lanes=lanes, counts=counts, ops=tuple(ops), **fields)


def waiting_op(lane: str, number: int, **fields: Any) -> Op:
    return Op(lane, number, fields.pop("op", "all-reduce"), waits=True, began=50.0, **fields)


def diagnosis_of(*ledgers: Ledger, now: float = 101.0) -> Diagnosis:
    return diagnose(Job({one.rank: one for one in ledgers}, 3, now))


def test_a_chain_ends_at_its_cause() -> None:
    """Rank 0 waits for 1, 1 for 2: only 2 is the cause."""
    diagnosis = diagnosis_of(
        make_ledger(0, [waiting_op("a", 1)]),
        make_ledger(1, [waiting_op("b", 1)]),
        make_ledger(2, []),
    )
    assert diagnosis.is_stuck and diagnosis.causes == (2,)


def test_a_circle_has_no_cause() -> None:
    """Three groups of two, used in a circular order."""
    ops = [waiting_op("a", 1), waiting_op("b", 1), waiting_op("c", 1)]
    diagnosis = diagnosis_of(*(make_ledger(rank, [op]) for rank, op in enumerate(ops)))
    assert diagnosis.is_stuck and diagnosis.causes == () and len(diagnosis.missing) == 3
    assert [missing.absent for missing in diagnosis.missing] == [(1,), (2,), (0,)]


def test_messages_are_counted_by_pairs() -> None:
    """A receive waits for the second message of a channel; the sender sent one there, and others
    elsewhere."""
    sent = [
        Op("w", 1, "send", ends=(0, 1), ended=1.0),
        *(Op("w", k, "send", ends=(0, 2), ended=1.0) for k in (1, 2)),
    ]
    diagnosis = diagnosis_of(
        make_ledger(0, sent),
        make_ledger(1, [waiting_op("w", 2, op="receive", ends=(0, 1))]),
        make_ledger(2, []),
    )
    assert diagnosis.causes == (0,) and diagnosis.missing[0].absent == (0,)


def test_what_all_came_to_is_the_network() -> None:
    """No rank is blamed."""
    diagnosis = diagnosis_of(*(make_ledger(rank, [waiting_op("w", 4)]) for rank in range(3)))
    assert diagnosis.is_stuck and diagnosis.causes == () and diagnosis.missing[0].absent == ()


def test_silence_and_endings() -> None:
    """A killed process writes nothing more; one that raised records its error; one that never began
    has no file."""
    failed = make_ledger(1, [], over=True, error="ValueError: x")
    diagnosis = diagnosis_of(make_ledger(0, []), failed, now=130.0)
    assert (
        dict(diagnosis.silent) == {0: 30.0}
        and diagnosis.unrecorded == (2,)
        and not diagnosis.is_healthy
    )


def test_the_last_to_come_tells_of_the_link() -> None:
    """In a sum of 1 MiB over two ranks each sends half of it twice; the earlier rank waited."""
    ops = [Op("a", 1, "all-reduce", size=1 << 20, began=b, ended=3.0) for b in (1.0, 2.0)]
    diagnosis = diagnosis_of(*(make_ledger(rank, [op]) for rank, op in enumerate(ops)))
    (link,) = diagnosis.links
    assert link.ranks == (0, 1) and link.rate == pytest.approx(1 << 20)


# -- what is read ----------------------------------------------------------------------------------


def dump_recorder(folder: str) -> bool:
    """Rank 0 begins a sum that rank 1 has not reached; both dump torch's flight recorder."""
    rank, tensor = dist.get_rank(), torch.ones(4)
    dist.all_reduce(tensor)
    work = dist.all_reduce(tensor, async_op=True) if rank == 0 else None
    recorder: Any = torch._C._distributed_c10d
    dumped = recorder._dump_fr_trace(True, True, False)
    entries = len(pickle.loads(dumped)["entries"])
    Path(folder, f"nccl_trace_rank_{rank}").write_bytes(dumped)
    if rank == 1:
        dist.all_reduce(tensor)
    if work is not None:
        work.wait()
    return entries > 0


def test_dumps_of_torchs_flight_recorder(tmp_path: Path) -> None:
    """The dumps show the absent rank, the operation, and the line of its call."""
    with Pool() as fresh:  # the recorder of a process keeps entries of earlier jobs
        recorded = fresh.run(
            dump_recorder, 2, str(tmp_path), environ={"TORCH_FR_BUFFER_SIZE": "64"}
        )
    if not all(recorded):
        pytest.skip("this torch records nothing of gloo")
    code, facts, text = run_doctor(tmp_path, "--stuck-after", "0.1")
    (pending,) = [
        pending for pending in facts["pending"] if pending["absent"]
    ]  # others may end just now
    assert (pending["op"], pending["absent"], pending["waiting"]) == ("all-reduce", [1], [0]), text
    assert "test_doctor.py" in pending["module"] and facts["causes"] == [1]


def nccl_dump(rank: int, state: str) -> Mapping[str, Any]:
    """Return a dump as NCCL's: a message, pending or done, and its group's ranks."""
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
    """Positions in a group become ranks of the job; a peer without the other end is absent."""
    for rank, state in ((4, ""), (6, "started")):
        (tmp_path / f"trace_{rank}").write_bytes(pickle.dumps(nccl_dump(rank, state)))
    _, facts, text = run_doctor(tmp_path)
    (pending,) = facts["pending"]
    assert (pending["ends"], pending["absent"], pending["bytes"]) == ([4, 6], [4], 12), text


class EvilObject:
    def __reduce__(self) -> Any:
        return print, ("run",)


def test_what_is_refused(tmp_path: Path) -> None:
    """No folder, an empty one, a damaged record, one of another version; a dump runs no code."""
    runner = CliRunner()

    def said(folder: Path) -> str:
        result = runner.invoke(app, ["doctor", str(folder)])
        assert result.exit_code == 2, result.output
        assert "run\n" not in result.stdout
        return " ".join(result.stderr.split())

    assert "is no folder" in said(tmp_path / "none") and "neither" in said(tmp_path)
    (tmp_path / "trace_0").write_bytes(pickle.dumps({"entries": [EvilObject()]}))
    assert "it asks for" in said(tmp_path)
    (tmp_path / "rank0.json").write_text('{"version": 1, "rank"')
    assert "cannot be read" in said(tmp_path)
    (tmp_path / "rank0.json").write_text('{"version": 0}')
    assert "of version 0" in said(tmp_path)


def test_torch_is_not_imported() -> None:
    """Neither `--help` nor reading a folder imports torch."""
    code = (
        "import sys; sys.argv = ['schedlang', 'doctor', *sys.argv[1:]]\n"
        "from schedlang.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    assert 'torch' not in sys.modules"
    )
    for arguments in (["--help"], [str(ROOT / "nothing")]):
        process = forks.run_interpreter("-c", code, *arguments)
        assert process.returncode == 0, process.stderr
