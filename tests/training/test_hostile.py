"""Untrusted checkpoints: none of their code runs, and a refused load changes nothing."""

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
    assert_equal,
    index_table,
    newest_checkpoint,
    odd_program,
    points,
    program_state,
    save_old_format,
    trained_program,
    write_index,
)


class Evil:
    """An object that runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def other_program() -> Program:
    """Return a program trained differently."""
    program = odd_program()
    for seed in (5, 6):
        program.train_step(points(seed))
    return program


def refusal_of_load(act: Callable[[Program], None], codes: str = "S633") -> str:
    """Return the refusal of a load; the program must be the same to the last bit."""
    program = other_program()
    snapshot = copy.deepcopy(program_state(program))
    with pytest.raises(Refusal) as caught:
        act(program)
    assert caught.value.diagnostic.code in codes.split(), caught.value
    assert_equal(program_state(program), snapshot)
    program.train_step(points(7))  # it still trains
    return caught.value.render()


def evil_pickles(mark: Path) -> list[bytes]:
    """Return pickles that create a folder, call, or import something forbidden."""
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
    """The current format never reads torch's index; the old one reads it as plain data only."""
    program, mark = trained_program(), tmp_path / "ran"
    program.save(tmp_path / "a")
    step = newest_checkpoint(tmp_path / "a")
    old_step = save_old_format(step, tmp_path / "b")
    for data in evil_pickles(mark):
        (step / ".metadata").write_bytes(data)
        fresh = other_program()
        fresh.load(tmp_path / "a")
        assert_equal(program_state(fresh), program_state(program))
        (old_step / ".metadata").write_bytes(data)
        message = refusal_of_load(lambda p: p.load(old_step))
        assert "an index may hold only plain data" in message, message
        assert last_checkpoint(old_step) is None
        (step / "schedlang.json").rename(tmp_path / "away")  # as if it had the old format
        assert "plain data" in refusal_of_load(lambda p: p.load(tmp_path / "a"))
        (tmp_path / "away").rename(step / "schedlang.json")
    assert not mark.exists()


class OldPickler(pickle.Pickler):
    """Pickles members of enumerations as Python 3.11.3 and before does."""

    def reducer_override(self, value: Any) -> Any:
        """Reduce an enumeration member to an attribute of its class."""
        if isinstance(value, enum.Enum):
            return getattr, (type(value), value.name)
        return NotImplemented


def test_an_index_of_an_earlier_python(tmp_path: Path) -> None:
    """Its `getattr` is recorded like all else, and not called."""
    program = trained_program()
    program.save(tmp_path / "a")
    index = save_old_format(newest_checkpoint(tmp_path / "a"), tmp_path / "b") / ".metadata"
    with index.open("rb") as read:
        metadata = pickle.load(read)
    with index.open("wb") as write:
        OldPickler(write).dump(metadata)
    assert b"getattr" in index.read_bytes()
    fresh = other_program()
    fresh.load(index.parent)
    assert_equal(program_state(fresh), program_state(program))


def test_a_class_is_not_changed(tmp_path: Path) -> None:
    """An index that sets attributes of a class changes no class in use."""
    from torch.distributed.checkpoint.metadata import Metadata

    name = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    trained_program().save(tmp_path / "a")
    old_step = save_old_format(newest_checkpoint(tmp_path / "a"), tmp_path / "b")
    attributes = dict(vars(Metadata))  # pickling one, as above, stores its slots in the class
    for data in (name + b"(N(dS'version'\nS'x'\nstb.", name + b"(dS'version'\nS'x'\nsb."):
        (old_step / ".metadata").write_bytes(data)
        refusal_of_load(lambda p: p.load(old_step))
    assert dict(vars(Metadata)) == attributes


@pytest.mark.parametrize("what", ["box", "value"])
def test_no_code_of_the_data_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Data with a correct checksum that is no tensor, but a pickle that runs something."""
    mark = tmp_path / "ran"
    if what == "box":
        monkeypatch.setattr(boxes, "_on_host", lambda part: Evil(mark))
        trained_program().save(tmp_path / "a")
        monkeypatch.undo()
    else:
        save_changed(tmp_path / "a", monkeypatch, lambda values: {**values, "version": Evil(mark)})
    message = refusal_of_load(lambda p: p.load(tmp_path / "a"))
    assert "`__0_0.distcp` is damaged at " in message
    assert not mark.exists()


# -- crafted contents ------------------------------------------------------------------------------


def save_changed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], Any]
) -> None:
    """Save a checkpoint whose values are changed, with all checksums correct."""
    original = archive.write_file

    def write(folder_path: Path, id_: str, rank: int, tensors: Any, values: Any) -> Any:
        (key, content), *_ = values.items()
        return original(folder_path, id_, rank, tensors, {key: change(copy.deepcopy(content))})

    monkeypatch.setattr(archive, "write_file", write)
    trained_program().save(folder)
    monkeypatch.undo()


def set_value(*path: Any) -> Callable[[dict[str, Any]], Any]:
    """Return a change that sets a value at a path; "*" stands for the first key."""
    *keys, value = path

    def change(content: dict[str, Any]) -> dict[str, Any]:
        node: Any = content
        for key in keys[:-1]:
            node = next(iter(node.values())) if key == "*" else node[key]
        node[keys[-1]] = value
        return content

    return change


def drop_key(key: str) -> Callable[[dict[str, Any]], Any]:
    """Return a change that removes one entry."""
    return lambda content: {k: v for k, v in content.items() if k != key}


NAN, INF = float("nan"), float("inf")
CONTENTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    **{
        f"without {key}": drop_key(key)
        for key in ("version", "step", "optimizer", "parameters", "buffers", "dtypes", "ties")
    },
    **{
        f"step {step!r}": set_value("step", step)
        for step in ("x", -5, NAN, True, 2.0, 1 << 70, None)
    },
    "not a table": lambda found: [1],
    "version": set_value("version", 2),
    "optimizer {}": set_value("optimizer", {}),
    "optimizer none": set_value("optimizer", None),
    "kind a list": set_value("optimizer", "kind", [1]),
    "has an unknown entry": set_value("optimizer", "evil", [1]),
    "parameters a list": set_value("parameters", [1]),
    "shape a text": set_value("parameters", "row", "17"),
    "shape below zero": set_value("parameters", "row", [-1, 7]),
    "dtypes of none": set_value("dtypes", {}),
    "dtype a function": set_value("dtypes", "row", "load"),
    "state of a function": set_value("optimizer", "parts", "*", "exp_avg", "load"),
    "state of another dtype": set_value("optimizer", "parts", "*", "exp_avg", "float32"),
    "state that is not there": set_value("optimizer", "parts", "*", "evil", "float64"),
    "state of no parameter": set_value("optimizer", "values", "evil", {"step": 1}),
    "state twice": set_value("optimizer", "values", "row", {"exp_avg": 1}),
    "a value of no kind": set_value("optimizer", "values", "row", {"step": {"tensor": 3}}),
    "group of a place beyond": set_value("optimizer", "of", "row", 9),
    "a group's parameters": set_value("optimizer", "groups", 0, "params", []),
    "lr a text": set_value("optimizer", "groups", 0, "lr", "fast"),
    "betas a number": set_value("optimizer", "groups", 0, "betas", 3),
    "betas too many": set_value("optimizer", "groups", 0, "betas", (0.9, 0.9, 0.9)),
    "foreach a text": set_value("optimizer", "groups", 0, "amsgrad", "yes"),
    "groups none": set_value("optimizer", "groups", []),
    "sums a list": set_value("sums", [1]),
    "sums of many": set_value("sums", {"step": 0, "places": 1 << 50, "errors": {}, "starts": {}}),
    "scale": set_value("loss scale", {"scale": NAN, "good": 0}),
    "scale of none": set_value("loss scale", {"good": 0}),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_crafted_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Each is refused before any number of the program changes."""
    save_changed(tmp_path / "a", monkeypatch, CONTENTS[name])
    message = refusal_of_load(lambda p: p.load(tmp_path / "a"), "S633 S634 S635 S636")
    assert "Error" not in message, message  # in schedlang's own words


# -- crafted indexes -------------------------------------------------------------------------------


def rewrite_index(step: Path, change: Callable[[dict[str, Any], list[Any]], Any]) -> None:
    """Rewrite an index with a correct checksum: its table, and a line for each tensor."""
    path = step / "schedlang.json"
    head, second_line, *others = path.read_bytes().splitlines()
    header, table, lines = (
        json.loads(head),
        json.loads(second_line),
        [json.loads(record) for record in others],
    )
    change(table, lines)
    encoded = [json.dumps(record).encode() + b"\n" for record in lines]
    if table.get("tensors"):
        for record, line in zip(table["tensors"].values(), encoded):
            record["bytes"] = record["bytes"] if record.pop("lies", False) else len(line)
    body = json.dumps(table).encode() + b"\n" + b"".join(encoded)
    header |= {
        "bytes": len(body),
        "crc32": zlib.crc32(body, zlib.crc32(header["checksums"].encode())),
    }
    path.write_bytes(json.dumps(header).encode() + b"\n" + body)


ROW = "model.row"
OLD_INDEXES: dict[str, Callable[[dict[str, Any]], Any]] = {
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


def change_box(position: int, value: Any) -> Callable[[dict[str, Any], list[Any]], Any]:
    """Return a change of one number in the only box of a tensor of two dims."""

    def change(table: dict[str, Any], lines: list[Any]) -> None:
        lines[list(table["tensors"]).index(ROW)]["boxes"][0][position] = value

    return change


def change_line(value: Any) -> Callable[[dict[str, Any], list[Any]], Any]:
    """Return a change of the line of a tensor."""

    def change(table: dict[str, Any], lines: list[Any]) -> None:
        lines[list(table["tensors"]).index(ROW)] = value

    return change


def change_entry(**changes: Any) -> Callable[[dict[str, Any], list[Any]], Any]:
    """Return a change of the entry of a tensor in the table."""
    return lambda table, lines: table["tensors"][ROW].update(changes)


INDEXES: dict[str, Callable[[dict[str, Any], list[Any]], Any]] = {
    "file elsewhere": lambda t, _: t.__setitem__("lengths", {"../../x": 1}),
    "file of no number": change_box(4, 1),
    "file before": change_box(4, -1),
    "place before": change_box(5, -1),
    "place of no whole number": change_box(5, 0.5),
    "place beyond": change_box(5, 1 << 40),
    "place beyond all": change_box(5, 1 << 63),
    "length beyond": change_box(6, 1 << 50),
    "checksum of none": change_box(7, None),
    "checksum of text": change_box(7, "1"),
    "box beside": change_box(0, 1),
    "box smaller": change_box(3, 6),
    "boxes of other dims": change_line({"boxes": [[0, 7, 0, 64, 1, 1]]}),
    "boxes ragged": change_line({"boxes": [[0, 0, 1, 7, 0, 64, 1, 1], [1]]}),
    "boxes missing": change_line({"boxes": []}),
    "boxes a number": change_line({"boxes": 3}),
    "line a list": change_line([]),
    "line of another": lambda t, lines: lines.reverse(),
    "a line more": lambda t, lines: lines.append([]),
    "a line less": lambda t, lines: lines.pop(),
    "line shorter": change_entry(bytes=3, lies=True),
    "line of no length": change_entry(bytes=-1, lies=True),
    "dtype of none": change_entry(dtype="load"),
    "other dtype": change_entry(dtype="float32"),
    "another shape": change_entry(shape=[7, 1]),
    "shape of no numbers": change_entry(shape=["x"]),
    "value missing": lambda t, _: t["values"].clear(),
    "value elsewhere": lambda t, _: t["values"]["schedlang"].__setitem__(0, "../../x"),
    "tensors a list": lambda t, _: t.__setitem__("tensors", []),
    "nothing": lambda t, _: t.clear(),
}


MESSAGES = {
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
    ("now", "name"), [*((True, name) for name in INDEXES), *((False, name) for name in OLD_INDEXES)]
)
def test_crafted_indexes(tmp_path: Path, now: bool, name: str) -> None:
    """Each is refused with the file or the tensor, before anything changes."""
    trained_program().save(tmp_path / "a")
    step = newest_checkpoint(tmp_path / "a")
    (tmp_path / "x").write_bytes((step / "__0_0.distcp").read_bytes())
    if now:
        rewrite_index(step, INDEXES[name])
    else:
        head, table = (table := index_table(step)).pop("head"), table
        OLD_INDEXES[name](table)
        write_index(step, {"head": head, **table}, 3)
    message = refusal_of_load(lambda p: p.load(tmp_path / "a"))
    assert MESSAGES.get(name, "`schedlang.json` is damaged") in message, message


@pytest.mark.parametrize("version", [3, 4])
def test_an_index_of_before(tmp_path: Path, version: int) -> None:
    """An old index, and a rewritten current one, load the same state to the last bit."""
    program, fresh = trained_program(), other_program()
    program.save(tmp_path / "a")
    step = newest_checkpoint(tmp_path / "a")
    if version == 3:
        write_index(step, index_table(step), 3)
    else:
        rewrite_index(step, lambda table, lines: None)
    fresh.load(tmp_path / "a")
    assert_equal(program_state(fresh), program_state(program))
    assert last_checkpoint(tmp_path / "a") == step


@pytest.mark.parametrize("where", ["load", "zeros"])
def test_no_memory_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Where torch finds no memory, for a box or for a part, the refusal says so."""
    trained_program().save(tmp_path / "a")
    original = torch.load

    def load(*args: Any, **kwargs: Any) -> Any:
        loaded = original(*args, **kwargs)
        return torch.empty(1 << 50) if isinstance(loaded, torch.Tensor) else loaded

    with monkeypatch.context() as patched:
        if where == "load":
            patched.setattr(boxes.torch, "load", load)
        else:
            patched.setattr(archive, "zeros", lambda *_: torch.empty(1 << 50))
        message = refusal_of_load(lambda p: p.load(tmp_path / "a"))
    assert "there is no memory to read" in message and "is damaged" not in message, message
    assert "nothing in it was found to be damaged" in message and "bytes" in message
    assert "load another checkpoint" not in message


def test_files_of_two_saves(tmp_path: Path) -> None:
    """A file of another save than the index is refused with both ids; so is a pipe."""
    program = trained_program()
    for _ in range(2):
        program.save(tmp_path / "a")
        program.train_step(points(1))
    first_step, second_step = (tmp_path / "a" / f"step-{k:08d}" for k in (1, 2))
    data = second_step / "__0_0.distcp"
    content = data.read_bytes()
    data.write_bytes((first_step / "__0_0.distcp").read_bytes())
    assert "is of save `" in refusal_of_load(lambda p: p.load(tmp_path / "a"))
    assert last_checkpoint(tmp_path / "a") == first_step
    data.unlink()
    os.mkfifo(data)
    assert "the file `__0_0.distcp` is missing" in refusal_of_load(lambda p: p.load(second_step))
    data.unlink()
    data.write_bytes(content)
    index = second_step / "schedlang.json"
    index.write_bytes((first_step / "schedlang.json").read_bytes())
    assert "`latest` names" in refusal_of_load(lambda p: p.load(tmp_path / "a"))


def test_changed_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of the old format that is replaced during a load is refused."""
    program = trained_program()
    program.save(tmp_path / "a")
    old_step = save_old_format(newest_checkpoint(tmp_path / "a"), tmp_path / "b")
    original = archive.read_together

    def read(*args: Any) -> None:
        original(*args)
        listing = old_step / ".metadata"
        content = listing.read_bytes()
        listing.unlink()
        listing.write_bytes(content)

    program.load(old_step)
    monkeypatch.setattr(archive, "read_together", read)
    assert "changed while it was read" in refusal_of_load(lambda p: p.load(old_step))


def test_a_flipped_bit_is_told_with_its_box(tmp_path: Path) -> None:
    """The refusal names the file, the tensor, its box, and another checkpoint."""
    program = trained_program()
    for _ in range(2):
        program.save(tmp_path / "a")
        program.train_step(points(1))
    step = newest_checkpoint(tmp_path / "a")
    index = index_table(step)
    file, offset, length, _ = index["tensors"]["optim.state.row.exp_avg"]["boxes"][0][2]
    data = bytearray((step / file).read_bytes())
    values = program.optimizer_state()["row"]["exp_avg"]
    assert isinstance(values, torch.Tensor)
    data[offset + length // 2] ^= 4
    (step / file).write_bytes(data)
    message = refusal_of_load(lambda p: p.load(tmp_path / "a"))
    assert "`__0_0.distcp` is damaged" in message
    assert "box [0:1, 0:7] of `optim.state.row.exp_avg`" in message
    assert "load another checkpoint of this folder" in message and "step-00000001" in message
