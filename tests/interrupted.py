"""Kill saves, load during saves, flip bits of checkpoints, and count what is lost.

`python -m tests.interrupted FOLDER --kills 200 --loads 300 --flips 200` prints the figures.  Each
try forks the process, which therefore must have no other threads: `run_forked` starts it.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import schedlang
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime import weight_export
from schedlang.runtime.checkpointing import boxes
from schedlang.runtime.program import Program
from schedlang.runtime.storage import folder as exchange
from schedlang.runtime.weight_export import WEIGHTS_FILE
from tests import forks
from tests.layouts import OddModel, odd_program, points

CALLS = ("open", "mkdir", "rename", "replace", "fsync", "unlink", "rmdir", "ftruncate")
FIRST = 100  # the state that was saved before


def fill_state(program: Program, value: int) -> None:
    """Set every number of a program's state to one value."""
    a, optimizer = program.assembly, program.optimizer
    assert optimizer is not None
    with torch.no_grad():
        for tensor in (*a.parameters.values(), *a.buffers.values()):
            tensor.fill_(value)
        for state in optimizer.state.values():
            for moment in state.values():
                moment.fill_(value)
    program.step = value


def state_values(program: Program) -> set[float]:
    """All different numbers of the state: exactly one if the state is from one save."""
    numbers = {float(program.step)}
    for tensor in program.state_dict().values():
        numbers |= set(tensor.double().unique().tolist())
    for state in program.optimizer_state().values():
        for moment in state.values():
            numbers |= set(torch.as_tensor(moment).double().unique().tolist())
    return numbers


def _filled_program() -> Program:
    """A trained program whose state is filled with FIRST."""
    program = odd_program()
    program.train_step(points(0))
    fill_state(program, FIRST)
    return program


def _fork_child(act: Callable[[], Any]) -> int:
    """Fork a child that calls `act` and exits; return its process id."""
    sys.stdout.flush()
    child = os.fork()
    if not child:
        exit_code = 1
        try:
            act()
            exit_code = 0
        finally:
            os._exit(exit_code)
    return child


def _kill_at_call(call_number: int) -> None:
    """Kill this process right before the n-th call that changes the disk."""
    remaining = [call_number]

    def dying(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            remaining[0] -= 1
            if not remaining[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return counted

    for name in CALLS:
        setattr(os, name, dying(getattr(os, name)))
    io.open = dying(io.open)  # what pathlib calls
    for name in ("item", "_write_out"):  # each box of data, and each write of several
        setattr(boxes._Writer, name, dying(getattr(boxes._Writer, name)))
    exchange._exchange_atomically = dying(exchange._exchange_atomically)


def _leftovers(folder: Path) -> list[str]:
    """Names in and beside a folder that are no checkpoint, pointer or lock."""
    expected_names = ("latest", ".schedlang-lock")
    return [
        p.name
        for p in folder.iterdir()
        if not p.name.startswith("step-") and p.name not in expected_names
    ] + [p.name for p in folder.parent.iterdir() if p != folder]


def _check_recovery(
    program: Program, reader: Program, folder: Path, new_value: int, counts: Counter[str]
) -> None:
    """Load, save again as documented after a killed save, and count the outcome."""
    last = schedlang.last_checkpoint(folder)
    if last is None:
        counts["lost"] += 1
        return
    reader.load(last)
    by_name = state_values(reader)
    reader.load(folder)
    by_folder = state_values(reader)
    is_whole = by_name in ({FIRST}, {new_value}) and by_folder in ({FIRST}, {new_value})
    counts["whole" if is_whole else "mixture"] += 1
    fill_state(reader, new_value + 1)
    reader.save(folder, keep=2)  # the next save removes leftovers
    counts["left"] += len(_leftovers(folder))
    if len([p for p in folder.iterdir() if p.name.startswith("step-")]) > 2:
        counts["too many kept"] += 1


def kill_each_write(folder: Path) -> dict[str, int]:
    """Kill saves before the first, second, ... change of the disk, until one completes."""
    program, reader, counts = _filled_program(), _filled_program(), Counter[str]()
    for call_number in range(1, 1000):
        path = folder / f"each{call_number}" / "saved"
        for value in (FIRST - 1, FIRST):
            fill_state(program, value)
            program.save(path, keep=2)
        fill_state(program, FIRST + 1)

        def act(call_number: int = call_number, path: Path = path) -> None:
            _kill_at_call(call_number)
            program.save(path, keep=2)

        ended = os.waitstatus_to_exitcode(os.waitpid(_fork_child(act), 0)[1])
        counts["killed"] += ended == -signal.SIGKILL
        _check_recovery(program, reader, path, FIRST + 1, counts)
        shutil.rmtree(path.parent)
        if not ended:
            break
        assert ended == -signal.SIGKILL, ended
    return dict(counts)


def kill_randomly(folder: Path, count: int) -> dict[str, int]:
    """Kill saves at random moments."""
    program, reader, counts = _filled_program(), _filled_program(), Counter[str]()
    draw = random.Random(0)
    path = folder / "random" / "saved"
    start = time.perf_counter()
    for _ in range(5):
        program.save(path)
    save_seconds = (time.perf_counter() - start) / 5
    while counts["killed"] < count:
        fill_state(program, FIRST)
        program.save(path)
        fill_state(program, FIRST + 1)
        child = _fork_child(lambda: [program.save(path) for _ in range(50)])
        time.sleep(draw.uniform(0.2, 3) * save_seconds)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        counts["killed"] += 1
        _check_recovery(program, reader, path, FIRST + 1, counts)
    return dict(counts)


def _export_values(path: Path) -> set[float]:
    """All different numbers of an export: one if it is of one state, none if it is missing."""
    if not (path / WEIGHTS_FILE).is_file():
        return set()
    tensors = load_file(path / WEIGHTS_FILE).values()
    return {number for tensor in tensors for number in tensor.double().unique().tolist()}


def _disable_exchange() -> None:
    """Behave as on a system that cannot exchange two names atomically."""
    exchange._exchange_atomically = lambda first, second: False


def _check_export(program: Program, path: Path, at_once: bool, counts: Counter[str]) -> None:
    """Check what is stored after a killed export, export again, and count the outcome."""
    numbers = _export_values(path)
    if at_once or numbers:
        counts[
            "whole" if numbers in ({FIRST}, {FIRST + 1}) else "lost" if not numbers else "mixture"
        ] += 1
    else:  # the former export has another name; an export that fails restores it
        real, weight_export._write = (
            weight_export._write,
            lambda *arguments: (_ for _ in ()).throw(OSError("no")),
        )
        with suppress(Refusal):
            program.export(path, OddModel())
        weight_export._write = real
        counts["put back" if _export_values(path) == {FIRST} else "lost"] += 1
    fill_state(program, FIRST + 2)
    program.export(path, OddModel())  # the next export removes leftovers
    counts["left"] += len([p for p in path.parent.iterdir() if p != path])
    counts["not replaced"] += _export_values(path) != {FIRST + 2}


def kill_each_export(folder: Path, at_once: bool) -> dict[str, int]:
    """Kill exports before the first, second, ... change of the disk, until one completes."""
    program, counts = _filled_program(), Counter[str]()
    for call_number in range(1, 1000):
        path = folder / f"export{call_number}" / "weights"
        fill_state(program, FIRST)
        program.export(path, OddModel())
        fill_state(program, FIRST + 1)

        def act(call_number: int = call_number, path: Path = path) -> None:
            if not at_once:
                _disable_exchange()
            _kill_at_call(call_number)
            program.export(path, OddModel())

        ended = os.waitstatus_to_exitcode(os.waitpid(_fork_child(act), 0)[1])
        counts["killed"] += ended == -signal.SIGKILL
        _check_export(program, path, at_once, counts)
        shutil.rmtree(path.parent)
        if not ended:
            break
        assert ended == -signal.SIGKILL, ended
    return dict(counts)


def kill_exports(folder: Path, count: int) -> dict[str, int]:
    """Kill exports at random moments."""
    program, counts = _filled_program(), Counter[str]()
    draw = random.Random(0)
    path = folder / "exports" / "weights"
    start = time.perf_counter()
    for _ in range(5):
        program.export(path, OddModel())
    export_seconds = (time.perf_counter() - start) / 5
    for _ in range(count):
        fill_state(program, FIRST)
        program.export(path, OddModel())
        fill_state(program, FIRST + 1)
        child = _fork_child(lambda: [program.export(path, OddModel()) for _ in range(50)])
        time.sleep(draw.uniform(0.2, 3) * export_seconds)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        counts["killed"] += 1
        _check_export(program, path, True, counts)
    return dict(counts)


def two_exporters(folder: Path, count: int) -> dict[str, int]:
    """Two jobs export to one path: each export completes or is refused, and none is mixed."""
    program, counts = _filled_program(), Counter[str]()
    path = folder / "exporters" / "weights"
    program.export(path, OddModel())

    def act(base: int) -> None:
        written = 0
        while written < count:
            fill_state(program, base + written)
            try:
                program.export(path, OddModel())
                written += 1
            except Refusal as refusal:
                assert refusal.diagnostic.code == "S638", refusal
                time.sleep(0.003)

    children = {_fork_child(lambda base=base: act(base)) for base in (1000, 2000)}  # type: ignore[misc]
    while children:
        numbers = _export_values(path)
        counts["one state" if len(numbers) == 1 else "lost" if not numbers else "mixture"] += 1
        for child in list(children):
            ended_pid, status = os.waitpid(child, os.WNOHANG)
            if ended_pid:
                children.discard(child)
                counts["jobs that failed"] += os.waitstatus_to_exitcode(status) != 0
    counts["left"] = len([p for p in path.parent.iterdir() if p != path])
    return dict(counts)


def load_during_saves(folder: Path, count: int) -> dict[str, int]:
    """Load the last checkpoint while another job saves continuously."""
    program, counts = _filled_program(), Counter[str]()
    path = folder / "beside" / "saved"
    program.save(path)

    def act() -> None:
        value = FIRST
        while os.getppid() > 1:
            fill_state(program, value := value + 1)
            program.save(path, keep=1)

    reader = _filled_program()
    child = _fork_child(act)
    steps = set()
    try:
        for _ in range(count):
            try:
                reader.load(path)
            except Refusal:
                counts["refused"] += 1
                continue
            counts["one state" if len(state_values(reader)) == 1 else "mixture"] += 1
            steps.add(reader.step)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    counts["different steps"] = len(steps)
    return dict(counts)


def two_jobs(folder: Path, count: int) -> dict[str, int]:
    """Two jobs save into one folder: each save completes or is refused, and none is mixed."""
    program, counts = _filled_program(), Counter[str]()
    path = folder / "two" / "saved"
    program.save(path)

    def act(base: int) -> None:
        for k in range(count):
            fill_state(program, base + k)
            try:
                program.save(path)
            except Refusal as refusal:
                assert refusal.diagnostic.code == "S638", refusal
                assert f"process {os.getpid()}" not in refusal.render()
                time.sleep(0.003)

    children = {_fork_child(lambda base=base: act(base)) for base in (1000, 2000)}  # type: ignore[misc]
    reader = _filled_program()
    while children:
        reader.load(path)
        counts["one state" if len(state_values(reader)) == 1 else "mixture"] += 1
        for child in list(children):
            ended_pid, status = os.waitpid(child, os.WNOHANG)
            if ended_pid:
                children.discard(child)
                counts["jobs that failed"] += os.waitstatus_to_exitcode(status) != 0
    counts["left"] = len(_leftovers(path))
    return dict(counts)


def flip_bits(folder: Path, count: int) -> dict[str, int]:
    """Flip one bit of the data, then of the index; count which flips are detected."""
    program, reader, counts = _filled_program(), _filled_program(), Counter[str]()
    for k in range(3):
        program.train_step(points(k))
    program.save(folder / "good")
    good_path = schedlang.last_checkpoint(folder / "good")
    assert good_path is not None
    draw = random.Random(5)
    for file_name in ("__0_0.distcp", "schedlang.json"):
        for _ in range(count):
            bad_path = folder / "bad" / good_path.name
            shutil.copytree(good_path, bad_path)
            data = bytearray((bad_path / file_name).read_bytes())
            position, bit_mask = draw.randrange(len(data)), 1 << draw.randrange(8)
            data[position] ^= bit_mask
            (bad_path / file_name).write_bytes(data)
            fill_state(reader, FIRST)
            kind = "data" if file_name.endswith("distcp") else "index"
            try:
                reader.load(bad_path)
                counts[f"{kind}: not found"] += 1
            except Refusal as refusal:
                is_named = refusal.diagnostic.code == "S633" and file_name in refusal.render()
                unchanged = state_values(reader) == {FIRST}
                counts[f"{kind}: found" if is_named and unchanged else f"{kind}: badly told"] += 1
            shutil.rmtree(folder / "bad")
    return dict(counts)


def run_forked(folder: Path, **counts: int) -> dict[str, dict[str, int]]:
    """Run this module in a forked process and return its figures."""
    arguments = [
        argument for name, count in counts.items() for argument in (f"--{name}", str(count))
    ]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[1]
    process = forks.run("-m", "tests.interrupted", folder, *arguments, cwd=root, env=environ)
    assert not process.returncode, process.stderr
    figures: dict[str, dict[str, int]] = json.loads(process.stdout.splitlines()[-1])
    return figures


def main() -> None:
    """Run the requested trials and print their figures."""
    options = argparse.ArgumentParser()
    options.add_argument("folder", type=Path)
    for name in ("writes", "kills", "loads", "jobs", "flips", "exports"):
        options.add_argument(f"--{name}", type=int, default=0)
    arguments = options.parse_args()
    torch.set_num_threads(1)
    figures = {}
    if arguments.writes:
        figures["killed before each write"] = kill_each_write(arguments.folder)
    if arguments.kills:
        figures["killed at random"] = kill_randomly(arguments.folder, arguments.kills)
    if arguments.loads:
        figures["loads beside saves"] = load_during_saves(arguments.folder, arguments.loads)
    if arguments.jobs:
        figures["two jobs"] = two_jobs(arguments.folder, arguments.jobs)
    if arguments.flips:
        figures["bits flipped"] = flip_bits(arguments.folder, arguments.flips)
    if arguments.exports:
        for at_once in (True, False):
            name = f"exports killed before each write, {'one move' if at_once else 'three'}"
            figures[name] = kill_each_export(arguments.folder, at_once)
        figures["exports killed at random"] = kill_exports(arguments.folder, arguments.exports)
        figures["two exporters"] = two_exporters(arguments.folder, arguments.exports)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
