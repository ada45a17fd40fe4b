"""Checkpoints of somebody else: nothing of them is run, and nothing wrong is taken over."""

from __future__ import annotations

import copy
import enum
import json
import os
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from schedlang import last_checkpoint
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime.checkpointing import archive, boxes
from schedlang.runtime.program import Program
from tests.layouts import (
    equal,
    former,
    index_of,
    last,
    odd_program,
    points,
    seen,
    trained,
    write_index,
)


class Evil:
    """What runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def other() -> Program:
    """A program that has gone another way."""
    program = odd_program()
    for seed in (5, 6):
        program.train_step(points(seed))
    return program


def unchanged(act: Callable[[Program], None], codes: str = "S633") -> str:
    """The refusal that loading ends in, with the program as it was to the last bit."""
    program = other()
    before = copy.deepcopy(seen(program))
    with pytest.raises(Refusal) as caught:
        act(program)
    assert caught.value.diagnostic.code in codes.split(), caught.value
    equal(seen(program), before)
    program.train_step(points(7))  # and works
    return caught.value.render()


def pickles(mark: Path) -> list[bytes]:
    """Pickles that make a folder, call, or reach for what they may not."""
    reach = [
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"cposix\nsystem\n(S'true'\ntR.",
        b"ctorch\nload\n(S'x'\ntR.",
        b"cschedlang.runtime.checkpointing.index\n_PickledObject\n.",
        b"ctorch.distributed.checkpoint.metadata\nos.system\n(S'true'\ntR.",
        b"(S'true'\nios\nsystem\n.",
    ]
    return [pickle.dumps(Evil(mark), protocol) for protocol in (0, 2, 4)] + reach


def test_no_code_of_an_index_is_run(tmp_path: Path) -> None:
    """Of today's folders torch's index is not read; of those of before, as plain data alone."""
    program, mark = trained(), tmp_path / "ran"
    program.save(tmp_path / "a")
    step = last(tmp_path / "a")
    before = former(step, tmp_path / "b")
    for data in pickles(mark):
        (step / ".metadata").write_bytes(data)
        fresh = other()
        fresh.load(tmp_path / "a")
        equal(seen(fresh), seen(program))
        (before / ".metadata").write_bytes(data)
        told = unchanged(lambda p: p.load(before))
        assert "an index may hold only plain data" in told, told
        assert last_checkpoint(before) is None
        (step / "schedlang.json").rename(tmp_path / "away")  # as if it were one of before
        assert "plain data" in unchanged(lambda p: p.load(tmp_path / "a"))
        (tmp_path / "away").rename(step / "schedlang.json")
    assert not mark.exists()


class Earlier(pickle.Pickler):
    """Pickles members of enumerations as Python 3.11.3 and before does."""

    def reducer_override(self, one: Any) -> Any:
        """An attribute of the class."""
        if isinstance(one, enum.Enum):
            return getattr, (type(one), one.name)
        return NotImplemented


def test_an_index_of_an_earlier_python(tmp_path: Path) -> None:
    """What it asks of `getattr` is noted as all else is, and nothing is asked."""
    program = trained()
    program.save(tmp_path / "a")
    index = former(last(tmp_path / "a"), tmp_path / "b") / ".metadata"
    with index.open("rb") as read:
        found = pickle.load(read)
    with index.open("wb") as write:
        Earlier(write).dump(found)
    assert b"getattr" in index.read_bytes()
    fresh = other()
    fresh.load(index.parent)
    equal(seen(fresh), seen(program))


def test_a_class_is_not_changed(tmp_path: Path) -> None:
    """An index that sets attributes of a class sets them of nothing that anybody uses."""
    from torch.distributed.checkpoint.metadata import Metadata

    name = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    trained().save(tmp_path / "a")
    before = former(last(tmp_path / "a"), tmp_path / "b")
    known = dict(vars(Metadata))  # pickling one, as was done here, notes its slots in the class
    for data in (name + b"(N(dS'version'\nS'x'\nstb.", name + b"(dS'version'\nS'x'\nsb."):
        (before / ".metadata").write_bytes(data)
        unchanged(lambda p: p.load(before))
    assert dict(vars(Metadata)) == known


@pytest.mark.parametrize("what", ["box", "value"])
def test_no_code_of_the_data_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Data whose checksum is right, and which is no tensor but a pickle that runs something."""
    mark = tmp_path / "ran"
    if what == "box":
        monkeypatch.setattr(boxes, "_on_host", lambda part: Evil(mark))
        trained().save(tmp_path / "a")
        monkeypatch.undo()
    else:
        crafted(tmp_path / "a", monkeypatch, lambda found: {**found, "version": Evil(mark)})
    told = unchanged(lambda p: p.load(tmp_path / "a"))
    assert "`__0_0.distcp` is damaged at " in told
    assert not mark.exists()


# -- crafted contents ------------------------------------------------------------------------------


def crafted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], Any]
) -> None:
    """A checkpoint whose small things are others, with all checksums right."""
    plain = archive.write_file

    def write(to: Path, id_: str, rank: int, tensors: Any, values: Any) -> Any:
        (key, found), *_ = values.items()
        return plain(to, id_, rank, tensors, {key: change(copy.deepcopy(found))})

    monkeypatch.setattr(archive, "write_file", write)
    trained().save(folder)
    monkeypatch.undo()


def put(*path: Any) -> Callable[[dict[str, Any]], Any]:
    """Another value at a place; a first name of "*" below `parts` stands for any."""
    *way, value = path

    def change(found: dict[str, Any]) -> dict[str, Any]:
        at: Any = found
        for key in way[:-1]:
            at = next(iter(at.values())) if key == "*" else at[key]
        at[way[-1]] = value
        return found

    return change


def without(key: str) -> Callable[[dict[str, Any]], Any]:
    """One entry less."""
    return lambda found: {k: v for k, v in found.items() if k != key}


NAN, INF = float("nan"), float("inf")
OTHERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    **{
        f"without {key}": without(key)
        for key in ("version", "step", "optimizer", "parameters", "buffers", "dtypes", "ties")
    },
    **{f"step {step!r}": put("step", step) for step in ("x", -5, NAN, True, 2.0, 1 << 70, None)},
    "not a table": lambda found: [1],
    "version": put("version", 2),
    "optimizer {}": put("optimizer", {}),
    "optimizer none": put("optimizer", None),
    "kind a list": put("optimizer", "kind", [1]),
    "has an unknown entry": put("optimizer", "evil", [1]),
    "parameters a list": put("parameters", [1]),
    "shape a text": put("parameters", "row", "17"),
    "shape below zero": put("parameters", "row", [-1, 7]),
    "dtypes of none": put("dtypes", {}),
    "dtype a function": put("dtypes", "row", "load"),
    "state of a function": put("optimizer", "parts", "*", "exp_avg", "load"),
    "state of another dtype": put("optimizer", "parts", "*", "exp_avg", "float32"),
    "state that is not there": put("optimizer", "parts", "*", "evil", "float64"),
    "state of no parameter": put("optimizer", "values", "evil", {"step": 1}),
    "state twice": put("optimizer", "values", "row", {"exp_avg": 1}),
    "a value of no kind": put("optimizer", "values", "row", {"step": {"tensor": 3}}),
    "group of a place beyond": put("optimizer", "of", "row", 9),
    "a group's parameters": put("optimizer", "groups", 0, "params", []),
    "lr a text": put("optimizer", "groups", 0, "lr", "fast"),
    "betas a number": put("optimizer", "groups", 0, "betas", 3),
    "betas too many": put("optimizer", "groups", 0, "betas", (0.9, 0.9, 0.9)),
    "foreach a text": put("optimizer", "groups", 0, "amsgrad", "yes"),
    "groups none": put("optimizer", "groups", []),
    "sums a list": put("sums", [1]),
    "sums of many": put("sums", {"step": 0, "places": 1 << 50, "errors": {}, "starts": {}}),
    "scale": put("loss scale", {"scale": NAN, "good": 0}),
    "scale of none": put("loss scale", {"good": 0}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_crafted_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Each is refused, before a single number of the program is another."""
    crafted(tmp_path / "a", monkeypatch, OTHERS[name])
    told = unchanged(lambda p: p.load(tmp_path / "a"), "S633 S634 S635 S636")
    assert "Error" not in told, told  # said in words of ours


# -- crafted indexes -------------------------------------------------------------------------------


def reindexed(step: Path, change: Callable[[dict[str, Any], list[Any]], Any]) -> None:
    """Another index, with its checksum right: its table, and a line for each tensor."""
    path = step / "schedlang.json"
    head, first, *rest = path.read_bytes().splitlines()
    told, table, lines = json.loads(head), json.loads(first), [json.loads(one) for one in rest]
    change(table, lines)
    some = [json.dumps(one).encode() + b"\n" for one in lines]
    if table.get("tensors"):
        for one, line in zip(table["tensors"].values(), some):
            one["bytes"] = one["bytes"] if one.pop("lies", False) else len(line)
    body = json.dumps(table).encode() + b"\n" + b"".join(some)
    told |= {"bytes": len(body), "crc32": zlib.crc32(body, zlib.crc32(told["checksums"].encode()))}
    path.write_bytes(json.dumps(told).encode() + b"\n" + body)


ROW = "model.row"
BEFORE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "file elsewhere": lambda f: f["tensors"][ROW]["boxes"][0][2].__setitem__(0, "../../x"),
    "file of no text": lambda f: f["tensors"][ROW]["boxes"][0][2].__setitem__(0, 3),
    "place before": lambda f: f["tensors"][ROW]["boxes"][0][2].__setitem__(1, -1),
    "place of no whole number": lambda f: f["tensors"][ROW]["boxes"][0][2].__setitem__(1, 0.5),
    "place beyond": lambda f: f["tensors"][ROW]["boxes"][0][2].__setitem__(1, 1 << 40),
    "place beyond all": lambda f: f["tensors"][ROW]["boxes"][0][2].__setitem__(1, 1 << 63),
    "length beyond": lambda f: f["tensors"][ROW]["boxes"][0][2].__setitem__(2, 1 << 50),
    "no checksum": lambda f: f["tensors"][ROW]["boxes"][0][2].__setitem__(3, None),
    "box beside": lambda f: f["tensors"][ROW]["boxes"][0].__setitem__(0, [1, 0]),
    "box smaller": lambda f: f["tensors"][ROW]["boxes"][0].__setitem__(1, [1, 6]),
    "box of other dims": lambda f: f["tensors"][ROW]["boxes"][0].__setitem__(1, [7]),
    "box of dims that add up": lambda f: f["tensors"][ROW]["boxes"].__setitem__(
        0, [[0], [0, 1, 7], f["tensors"][ROW]["boxes"][0][2]]
    ),
    "dtype of none": lambda f: f["tensors"][ROW].__setitem__("dtype", "load"),
    "other dtype": lambda f: f["tensors"][ROW].__setitem__("dtype", "float32"),
    "other shape": lambda f: f["tensors"][ROW].__setitem__("shape", [7, 1]),
    "tensor missing": lambda f: f["tensors"].pop(ROW),
    "boxes missing": lambda f: f["tensors"][ROW].__setitem__("boxes", []),
    "another's data": lambda f: f["tensors"].__setitem__(ROW, f["tensors"]["model.shift"]),
    "value missing": lambda f: f["values"].clear(),
    "tensors a list": lambda f: f.__setitem__("tensors", []),
    "nothing": lambda f: f.clear(),
}


def box(place: int, value: Any) -> Callable[[dict[str, Any], list[Any]], Any]:
    """Another number in the one box of a tensor of two dims."""

    def change(table: dict[str, Any], lines: list[Any]) -> None:
        lines[list(table["tensors"]).index(ROW)]["boxes"][0][place] = value

    return change


def line(value: Any) -> Callable[[dict[str, Any], list[Any]], Any]:
    """Another line for a tensor."""

    def change(table: dict[str, Any], lines: list[Any]) -> None:
        lines[list(table["tensors"]).index(ROW)] = value

    return change


def entry(**more: Any) -> Callable[[dict[str, Any], list[Any]], Any]:
    """Another entry in the table."""
    return lambda table, lines: table["tensors"][ROW].update(more)


INDEXES: dict[str, Callable[[dict[str, Any], list[Any]], Any]] = {
    "file elsewhere": lambda t, _: t.__setitem__("lengths", {"../../x": 1}),
    "file of no number": box(4, 1),
    "file before": box(4, -1),
    "place before": box(5, -1),
    "place of no whole number": box(5, 0.5),
    "place beyond": box(5, 1 << 40),
    "place beyond all": box(5, 1 << 63),
    "length beyond": box(6, 1 << 50),
    "checksum of none": box(7, None),
    "checksum of text": box(7, "1"),
    "box beside": box(0, 1),
    "box smaller": box(3, 6),
    "boxes of other dims": line({"boxes": [[0, 7, 0, 64, 1, 1]]}),
    "boxes ragged": line({"boxes": [[0, 0, 1, 7, 0, 64, 1, 1], [1]]}),
    "boxes missing": line({"boxes": []}),
    "boxes a number": line({"boxes": 3}),
    "line a list": line([]),
    "line of another": lambda t, lines: lines.reverse(),
    "a line more": lambda t, lines: lines.append([]),
    "a line less": lambda t, lines: lines.pop(),
    "line shorter": entry(bytes=3, lies=True),
    "line of no length": entry(bytes=-1, lies=True),
    "dtype of none": entry(dtype="load"),
    "other dtype": entry(dtype="float32"),
    "another shape": entry(shape=[7, 1]),
    "shape of no numbers": entry(shape=["x"]),
    "value missing": lambda t, _: t["values"].clear(),
    "value elsewhere": lambda t, _: t["values"]["schedlang"].__setitem__(0, "../../x"),
    "tensors a list": lambda t, _: t.__setitem__("tensors", []),
    "nothing": lambda t, _: t.clear(),
}


SAID = {
    "box smaller": "parts of `model.row` are not in it",
    "boxes missing": "parts of `model.row` are not in it",
    "other dtype": "`model.row` is float32 in it, but should be float64",
    "tensor missing": "`model.row` of [1, 7] is not in it",
    "another shape": "`model.row` of [1, 7] is not in it",
    "another's data": "`model.row` of [1, 7] is not in it",
    "value missing": "`schedlang` is not in it",
    "place beyond": "`__0_0.distcp` ends before box [0:1, 0:7] of `model.row` does",
    "length beyond": "`__0_0.distcp` ends before box [0:1, 0:7] of `model.row` does",
}


@pytest.mark.parametrize(
    ("now", "name"), [*((True, name) for name in INDEXES), *((False, name) for name in BEFORE)]
)
def test_crafted_indexes(tmp_path: Path, now: bool, name: str) -> None:
    """Each is refused with the file or the tensor, before anything is changed."""
    trained().save(tmp_path / "a")
    step = last(tmp_path / "a")
    (tmp_path / "x").write_bytes((step / "__0_0.distcp").read_bytes())
    if now:
        reindexed(step, INDEXES[name])
    else:
        head, table = (table := index_of(step)).pop("head"), table
        BEFORE[name](table)
        write_index(step, {"head": head, **table}, 3)
    told = unchanged(lambda p: p.load(tmp_path / "a"))
    assert SAID.get(name, "`schedlang.json` is damaged") in told, told


@pytest.mark.parametrize("version", [3, 4])
def test_an_index_of_before(tmp_path: Path, version: int) -> None:
    """The same state, to the last bit; one of today, written anew, too."""
    program, fresh = trained(), other()
    program.save(tmp_path / "a")
    step = last(tmp_path / "a")
    if version == 3:
        write_index(step, index_of(step), 3)
    else:
        reindexed(step, lambda table, lines: None)
    fresh.load(tmp_path / "a")
    equal(seen(fresh), seen(program))
    assert last_checkpoint(tmp_path / "a") == step


@pytest.mark.parametrize("where", ["load", "zeros"])
def test_no_memory_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Where torch finds no memory, for a box or for a part, that is what is told."""
    trained().save(tmp_path / "a")
    plain = torch.load

    def load(*given: Any, **more: Any) -> Any:
        found = plain(*given, **more)
        return torch.empty(1 << 50) if isinstance(found, torch.Tensor) else found

    with monkeypatch.context() as patched:
        if where == "load":
            patched.setattr(boxes.torch, "load", load)
        else:
            patched.setattr(archive, "zeros", lambda *_: torch.empty(1 << 50))
        told = unchanged(lambda p: p.load(tmp_path / "a"))
    assert "there is no memory to read" in told and "is damaged" not in told, told
    assert "nothing in it was found to be damaged" in told and "bytes" in told
    assert "load another checkpoint" not in told


def test_files_of_two_saves(tmp_path: Path) -> None:
    """A file of another save than the index is refused with both ids; so is a pipe."""
    program = trained()
    for _ in range(2):
        program.save(tmp_path / "a")
        program.train_step(points(1))
    old, new = (tmp_path / "a" / f"step-{k:08d}" for k in (1, 2))
    data = new / "__0_0.distcp"
    kept = data.read_bytes()
    data.write_bytes((old / "__0_0.distcp").read_bytes())
    assert "is of save `" in unchanged(lambda p: p.load(tmp_path / "a"))
    assert last_checkpoint(tmp_path / "a") == old
    data.unlink()
    os.mkfifo(data)
    assert "the file `__0_0.distcp` is missing" in unchanged(lambda p: p.load(new))
    data.unlink()
    data.write_bytes(kept)
    index = new / "schedlang.json"
    index.write_bytes((old / "schedlang.json").read_bytes())
    assert "`latest` names" in unchanged(lambda p: p.load(tmp_path / "a"))


def test_changed_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of before that is replaced in the middle of a load is no state."""
    program = trained()
    program.save(tmp_path / "a")
    before = former(last(tmp_path / "a"), tmp_path / "b")
    plain = archive.read_together

    def read(*args: Any) -> None:
        plain(*args)
        listing = before / ".metadata"
        again = listing.read_bytes()
        listing.unlink()
        listing.write_bytes(again)

    program.load(before)
    monkeypatch.setattr(archive, "read_together", read)
    assert "changed while it was read" in unchanged(lambda p: p.load(before))


def test_a_flipped_bit_is_told_with_its_box(tmp_path: Path) -> None:
    """The file, the tensor, its box, and which other checkpoint there is."""
    program = trained()
    for _ in range(2):
        program.save(tmp_path / "a")
        program.train_step(points(1))
    step = last(tmp_path / "a")
    found = index_of(step)
    file, at, length, _ = found["tensors"]["optim.state.row.exp_avg"]["boxes"][0][2]
    data = bytearray((step / file).read_bytes())
    values = program.optimizer_state()["row"]["exp_avg"]
    assert isinstance(values, torch.Tensor)
    data[at + length // 2] ^= 4
    (step / file).write_bytes(data)
    told = unchanged(lambda p: p.load(tmp_path / "a"))
    assert "`__0_0.distcp` is damaged" in told
    assert "box [0:1, 0:7] of `optim.state.row.exp_avg`" in told
    assert "load another checkpoint of this folder" in told and "step-00000001" in told
