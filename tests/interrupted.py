"""What is lost where saves are killed, loads run beside saves, bits flip: tried, and counted.

`python -m tests.interrupted FOLDER --kills 200 --loads 300 --flips 200` prints the figures.  The
process is forked for each try, so it is one of its own, without threads: `apart` starts it.
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
from tests.layouts import Odd, odd_program, points

CALLS = ("open", "mkdir", "rename", "replace", "fsync", "unlink", "rmdir", "ftruncate")
FIRST = 100  # the state that was saved before


def filled(program: Program, value: int) -> None:
    """Every number of the state is this one."""
    a, optimizer = program.assembly, program.optimizer
    assert optimizer is not None
    with torch.no_grad():
        for tensor in (*a.parameters.values(), *a.buffers.values()):
            tensor.fill_(value)
        for state in optimizer.state.values():
            for held in state.values():
                held.fill_(value)
    program.step = value


def values(program: Program) -> set[float]:
    """All numbers of the state: one, where it is of one save."""
    found = {float(program.step)}
    for tensor in program.state_dict().values():
        found |= set(tensor.double().unique().tolist())
    for state in program.optimizer_state().values():
        for held in state.values():
            found |= set(torch.as_tensor(held).double().unique().tolist())
    return found


def _program() -> Program:
    """A program all numbers of which are the first state's."""
    program = odd_program()
    program.train_step(points(0))
    filled(program, FIRST)
    return program


def _child(act: Callable[[], Any]) -> int:
    """Fork, act in the child, and end it: its process id."""
    sys.stdout.flush()
    child = os.fork()
    if not child:
        done = 1
        try:
            act()
            done = 0
        finally:
            os._exit(done)
    return child


def _killing(at: int) -> None:
    """From now on die at the so-manieth call that changes the disk, before it is made."""
    left = [at]

    def dying(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return counted

    for name in CALLS:
        setattr(os, name, dying(getattr(os, name)))
    io.open = dying(io.open)  # as pathlib opens
    for name in ("item", "_write_out"):  # each box of the data, each time that some are written
        setattr(boxes._Writer, name, dying(getattr(boxes._Writer, name)))
    exchange._exchange_atomically = dying(exchange._exchange_atomically)


def _left(folder: Path) -> list[str]:
    """What is neither a checkpoint nor its pointer nor the lock, here and beside."""
    known = ("latest", ".schedlang-lock")
    return [
        p.name for p in folder.iterdir() if not p.name.startswith("step-") and p.name not in known
    ] + [p.name for p in folder.parent.iterdir() if p != folder]


def _after(program: Program, other: Program, folder: Path, new: int, seen: Counter[str]) -> None:
    """The documented way to go on, after a save that may have been killed."""
    last = schedlang.last_checkpoint(folder)
    if last is None:
        seen["lost"] += 1
        return
    other.load(last)
    by_name = values(other)
    other.load(folder)
    by_folder = values(other)
    whole = by_name in ({FIRST}, {new}) and by_folder in ({FIRST}, {new})
    seen["whole" if whole else "mixture"] += 1
    filled(other, new + 1)
    other.save(folder, keep=2)  # the next save sweeps
    seen["left"] += len(_left(folder))
    if len([p for p in folder.iterdir() if p.name.startswith("step-")]) > 2:
        seen["too many kept"] += 1


def killed_at_each_write(folder: Path) -> dict[str, int]:
    """Saves that die before each call that changes the disk, until one comes through."""
    program, other, seen = _program(), _program(), Counter[str]()
    for at in range(1, 1000):
        place = folder / f"each{at}" / "saved"
        for value in (FIRST - 1, FIRST):
            filled(program, value)
            program.save(place, keep=2)
        filled(program, FIRST + 1)

        def act(at: int = at, place: Path = place) -> None:
            _killing(at)
            program.save(place, keep=2)

        ended = os.waitstatus_to_exitcode(os.waitpid(_child(act), 0)[1])
        seen["killed"] += ended == -signal.SIGKILL
        _after(program, other, place, FIRST + 1, seen)
        shutil.rmtree(place.parent)
        if not ended:
            break
        assert ended == -signal.SIGKILL, ended
    return dict(seen)


def killed_at_random(folder: Path, count: int) -> dict[str, int]:
    """Saves that die at moments drawn from all of the time that a save takes."""
    program, other, seen = _program(), _program(), Counter[str]()
    draw = random.Random(0)
    place = folder / "random" / "saved"
    start = time.perf_counter()
    for _ in range(5):
        program.save(place)
    takes = (time.perf_counter() - start) / 5
    while seen["killed"] < count:
        filled(program, FIRST)
        program.save(place)
        filled(program, FIRST + 1)
        child = _child(lambda: [program.save(place) for _ in range(50)])
        time.sleep(draw.uniform(0.2, 3) * takes)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        seen["killed"] += 1
        _after(program, other, place, FIRST + 1, seen)
    return dict(seen)


def _exported(place: Path) -> set[float]:
    """All numbers of an export: one, where it is of one state; none where there is no export."""
    if not (place / WEIGHTS_FILE).is_file():
        return set()
    found = load_file(place / WEIGHTS_FILE).values()
    return {number for tensor in found for number in tensor.double().unique().tolist()}


def _in_three() -> None:
    """From now on as where two names cannot be exchanged in one move."""
    exchange._exchange_atomically = lambda one, other: False


def _after_export(program: Program, place: Path, at_once: bool, seen: Counter[str]) -> None:
    """What lies there after an export that may have been killed, and what the next ones do."""
    there = _exported(place)
    if at_once or there:
        seen[
            "whole" if there in ({FIRST}, {FIRST + 1}) else "lost" if not there else "mixture"
        ] += 1
    else:  # the former waits under another name; one that fails puts it back
        real, weight_export._write = (
            weight_export._write,
            lambda *given: (_ for _ in ()).throw(OSError("no")),
        )
        with suppress(Refusal):
            program.export(place, Odd())
        weight_export._write = real
        seen["put back" if _exported(place) == {FIRST} else "lost"] += 1
    filled(program, FIRST + 2)
    program.export(place, Odd())  # the next one sweeps
    seen["left"] += len([p for p in place.parent.iterdir() if p != place])
    seen["not replaced"] += _exported(place) != {FIRST + 2}


def exports_killed_at_each_write(folder: Path, at_once: bool) -> dict[str, int]:
    """Exports that die before each call that changes the disk, until one comes through."""
    program, seen = _program(), Counter[str]()
    for at in range(1, 1000):
        place = folder / f"export{at}" / "weights"
        filled(program, FIRST)
        program.export(place, Odd())
        filled(program, FIRST + 1)

        def act(at: int = at, place: Path = place) -> None:
            if not at_once:
                _in_three()
            _killing(at)
            program.export(place, Odd())

        ended = os.waitstatus_to_exitcode(os.waitpid(_child(act), 0)[1])
        seen["killed"] += ended == -signal.SIGKILL
        _after_export(program, place, at_once, seen)
        shutil.rmtree(place.parent)
        if not ended:
            break
        assert ended == -signal.SIGKILL, ended
    return dict(seen)


def exports_killed_at_random(folder: Path, count: int) -> dict[str, int]:
    """Exports that die at moments drawn from all of the time that one takes."""
    program, seen = _program(), Counter[str]()
    draw = random.Random(0)
    place = folder / "exports" / "weights"
    start = time.perf_counter()
    for _ in range(5):
        program.export(place, Odd())
    takes = (time.perf_counter() - start) / 5
    for _ in range(count):
        filled(program, FIRST)
        program.export(place, Odd())
        filled(program, FIRST + 1)
        child = _child(lambda: [program.export(place, Odd()) for _ in range(50)])
        time.sleep(draw.uniform(0.2, 3) * takes)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        seen["killed"] += 1
        _after_export(program, place, True, seen)
    return dict(seen)


def two_exporters(folder: Path, count: int) -> dict[str, int]:
    """Two jobs that export to one place: each export is made or refused, what is there is whole."""
    program, seen = _program(), Counter[str]()
    place = folder / "exporters" / "weights"
    program.export(place, Odd())

    def act(base: int) -> None:
        made = 0
        while made < count:
            filled(program, base + made)
            try:
                program.export(place, Odd())
                made += 1
            except Refusal as refusal:
                assert refusal.diagnostic.code == "S638", refusal
                time.sleep(0.003)

    children = {_child(lambda base=base: act(base)) for base in (1000, 2000)}  # type: ignore[misc]
    while children:
        found = _exported(place)
        seen["one state" if len(found) == 1 else "lost" if not found else "mixture"] += 1
        for child in list(children):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                children.discard(child)
                seen["jobs that failed"] += os.waitstatus_to_exitcode(status) != 0
    seen["left"] = len([p for p in place.parent.iterdir() if p != place])
    return dict(seen)


def loads_beside_saves(folder: Path, count: int) -> dict[str, int]:
    """Loads of the last checkpoint while another job saves without a pause."""
    program, seen = _program(), Counter[str]()
    place = folder / "beside" / "saved"
    program.save(place)

    def act() -> None:
        value = FIRST
        while os.getppid() > 1:
            filled(program, value := value + 1)
            program.save(place, keep=1)

    other = _program()
    child = _child(act)
    steps = set()
    try:
        for _ in range(count):
            try:
                other.load(place)
            except Refusal:
                seen["refused"] += 1
                continue
            seen["one state" if len(values(other)) == 1 else "mixture"] += 1
            steps.add(other.step)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    seen["different steps"] = len(steps)
    return dict(seen)


def two_jobs(folder: Path, count: int) -> dict[str, int]:
    """Two jobs that save into one folder: each save is made or refused, and what is there whole."""
    program, seen = _program(), Counter[str]()
    place = folder / "two" / "saved"
    program.save(place)

    def act(base: int) -> None:
        for k in range(count):
            filled(program, base + k)
            try:
                program.save(place)
            except Refusal as refusal:
                assert refusal.diagnostic.code == "S638", refusal
                assert f"process {os.getpid()}" not in refusal.render()
                time.sleep(0.003)

    children = {_child(lambda base=base: act(base)) for base in (1000, 2000)}  # type: ignore[misc]
    other = _program()
    while children:
        other.load(place)
        seen["one state" if len(values(other)) == 1 else "mixture"] += 1
        for child in list(children):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                children.discard(child)
                seen["jobs that failed"] += os.waitstatus_to_exitcode(status) != 0
    seen["left"] = len(_left(place))
    return dict(seen)


def flipped(folder: Path, count: int) -> dict[str, int]:
    """Checkpoints of which one bit of the data, and then one of the index, has flipped."""
    program, other, seen = _program(), _program(), Counter[str]()
    for k in range(3):
        program.train_step(points(k))
    program.save(folder / "good")
    good = schedlang.last_checkpoint(folder / "good")
    assert good is not None
    draw = random.Random(5)
    for what in ("__0_0.distcp", "schedlang.json"):
        for _ in range(count):
            bad = folder / "bad" / good.name
            shutil.copytree(good, bad)
            data = bytearray((bad / what).read_bytes())
            at, bit = draw.randrange(len(data)), 1 << draw.randrange(8)
            data[at] ^= bit
            (bad / what).write_bytes(data)
            filled(other, FIRST)
            kind = "data" if what.endswith("distcp") else "index"
            try:
                other.load(bad)
                seen[f"{kind}: not found"] += 1
            except Refusal as refusal:
                named = refusal.diagnostic.code == "S633" and what in refusal.render()
                unchanged = values(other) == {FIRST}
                seen[f"{kind}: found" if named and unchanged else f"{kind}: badly told"] += 1
            shutil.rmtree(folder / "bad")
    return dict(seen)


def apart(folder: Path, **counts: int) -> dict[str, dict[str, int]]:
    """The figures, from a process of its own."""
    given = [word for name, count in counts.items() for word in (f"--{name}", str(count))]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    home = Path(__file__).parents[1]
    done = forks.run("-m", "tests.interrupted", folder, *given, cwd=home, env=environ)
    assert not done.returncode, done.stderr
    found: dict[str, dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Try what is asked for, and print what came of it."""
    options = argparse.ArgumentParser()
    options.add_argument("folder", type=Path)
    for name in ("writes", "kills", "loads", "jobs", "flips", "exports"):
        options.add_argument(f"--{name}", type=int, default=0)
    asked = options.parse_args()
    torch.set_num_threads(1)
    found = {}
    if asked.writes:
        found["killed before each write"] = killed_at_each_write(asked.folder)
    if asked.kills:
        found["killed at random"] = killed_at_random(asked.folder, asked.kills)
    if asked.loads:
        found["loads beside saves"] = loads_beside_saves(asked.folder, asked.loads)
    if asked.jobs:
        found["two jobs"] = two_jobs(asked.folder, asked.jobs)
    if asked.flips:
        found["bits flipped"] = flipped(asked.folder, asked.flips)
    if asked.exports:
        for at_once in (True, False):
            name = f"exports killed before each write, {'one move' if at_once else 'three'}"
            found[name] = exports_killed_at_each_write(asked.folder, at_once)
        found["exports killed at random"] = exports_killed_at_random(asked.folder, asked.exports)
        found["two exporters"] = two_exporters(asked.folder, asked.exports)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
