"""Files as ends of a transfer: no byte is read twice, and what others have written is read, too."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import schedlang
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime.checkpointing import boxes
from schedlang.runtime.checkpointing.index import read_index
from schedlang.runtime.comm import world as comm
from schedlang.runtime.storage.offloaded_gradients import local_tensor
from tests.engine import Threads
from tests.layouts import equal, ids, last, program_under, seen
from tests.models import gpt2, llama
from tests.ranks import run_ranks
from tests.transfers.test_transfer import world_of

READ: Counter[int] = Counter()  # by rank, in the process that the threads are of


def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the bytes of the boxes that each rank reads."""
    plain = boxes._read_box

    def box(*given: Any) -> Any:
        found = plain(*given)
        READ[comm.rank()] += found.nbytes
        return found

    READ.clear()
    monkeypatch.setattr(boxes, "_read_box", box)


def saving(name: str, folder: str) -> Any:
    """A trained program's state, saved."""
    program = program_under(name)
    program.train_step(ids(0))
    program.save(folder)
    return seen(program)


def loading(name: str, folder: str) -> Any:
    """Load into a program of another layout: its state, and the bytes that this rank holds."""
    program = program_under(name, fresh=True)
    program.load(folder)
    held = list(program.assembly.parameters.values())
    state = program.optimizer.state if program.optimizer is not None else {}
    size = sum(local_tensor(p).nbytes for p in held)
    for p in held:
        own = (local_tensor(v) for v in state[p].values())
        size += sum(v.nbytes for v in own if v.shape == local_tensor(p).shape)
    return seen(program), size


@pytest.mark.parametrize("alive", [64 << 20, 1 << 10])
@pytest.mark.parametrize(
    ("one", "other"), [("one", "tp2"), ("pp2", "dp2tp2"), ("dp2z3", "tp2"), ("dp2tp2", "dp2z3")]
)
def test_no_more_is_read_than_is_held(
    one: str,
    other: str,
    alive: int,
    tmp_path: Path,
    threads: Threads,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A box that is cut between ranks is read by one of them, and each rank has all of its part."""
    saved = threads.run(saving, world_of(one), one, str(tmp_path))[0]
    counted(monkeypatch)
    monkeypatch.setattr(boxes, "LIVE_BYTES", alive)
    found = threads.run(loading, world_of(other), other, str(tmp_path))
    for state, _ in found:
        equal(state["state"], saved["state"])
        equal(state["moments"], saved["moments"])
    assert 0 < sum(READ.values()) <= sum(size for _, size in found)
    assert all(READ[rank] for rank in range(world_of(other)))  # and the reading is shared


def in_vain(name: str, folder: str) -> Any:
    """Try to load a damaged checkpoint, which changes nothing: the refusal."""
    program = program_under(name, fresh=True)
    before = seen(program)
    with pytest.raises(Refusal) as caught:
        program.load(folder)
    equal(seen(program), before)
    return caught.value.render()


def test_damage_in_what_is_read_for_others(tmp_path: Path, threads: Threads) -> None:
    """One rank reads it; all refuse it, and none waits."""
    threads.run(saving, 1, "one", str(tmp_path))
    path = last(tmp_path) / "__0_0.distcp"
    place = (
        read_index(path.parent).tensors["model.transformer.h.0.attn.c_attn.weight"].boxes[0].place
    )
    data = bytearray(path.read_bytes())
    data[place.at + place.length // 2] ^= 1
    path.write_bytes(data)
    for told in threads.run(in_vain, 2, "tp2", str(tmp_path)):
        assert "S633" in told and "the checksum of box" in told


def from_dcp(folder: str, head: str) -> None:
    """Take over weights that another program has saved by torch.distributed.checkpoint."""
    program = program_under("tp2", fresh=True)
    schedlang.transfer(f"{folder}/{head}", program)
    equal(program.state_dict(), dict(gpt2(layers=2).state_dict()))


def test_a_folder_of_torchs_own(tmp_path: Path, threads: Threads) -> None:
    """With the names of the model, or below `model`, beside an optimizer's state or alone."""
    state, beside = gpt2(layers=2).state_dict(), {"momentum": torch.ones(3)}
    every = {"flat": state, "nested": {"model": state, "optim": beside}, "alone": {"model": state}}
    for head, saved in every.items():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp_save(saved, storage_writer=FileSystemWriter(tmp_path / head), no_dist=True)
        threads.run(from_dcp, 2, str(tmp_path), head)


@pytest.mark.parametrize("beside", [(), ("optimizer", "train_state")], ids=["alone", "beside"])
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "flat"])
def test_names_that_begin_as_the_word_before_them(
    tmp_path: Path, nested: bool, beside: tuple[str, ...]
) -> None:
    """`model.layers...` of Llama is a name of the model, and may lie below `model` all the same."""
    real, other = llama(), llama()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    state = dict(real.state_dict())
    saved = {"model": state} if nested else state
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        more = {word: {"x": torch.ones(3)} for word in beside}
        dcp_save({**saved, **more}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    schedlang.transfer(tmp_path, other)
    equal(dict(other.state_dict()), state)


def with_dtensors(_: int) -> None:
    """DTensors over a mesh of their own into a program, and back into others."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    program = program_under("dp2tp2", fresh=True)
    wanted = {n: t for n, t in gpt2(layers=2).state_dict().items() if n != "lm_head.weight"}
    given = {n: distribute_tensor(t, mesh, (Shard(0), Replicate())) for n, t in wanted.items()}
    told = schedlang.transfer(given, program)
    equal({n: t for n, t in program.state_dict().items() if n in wanted}, wanted)
    back = {
        n: distribute_tensor(torch.zeros_like(t), mesh, (Shard(t.ndim - 1), Shard(0)))
        for n, t in wanted.items()
    }
    again = schedlang.transfer(program, back)
    equal({n: t.full_tensor() for n, t in back.items()}, wanted)
    assert told.bytes == told.bound and again.bytes == again.bound > 0


def test_dtensors_into_a_program_and_back() -> None:
    """The state of FSDP2 or of tensor parallelism, in the fewest bytes."""
    run_ranks(4, with_dtensors)
