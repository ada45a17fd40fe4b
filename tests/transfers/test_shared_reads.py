"""Reading checkpoint files: no byte is read twice, and files of other libraries load too."""

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
from tests.layouts import assert_equal, ids, newest_checkpoint, program_state, program_under
from tests.models import gpt2, llama
from tests.ranks import run_ranks
from tests.transfers.test_transfer import world_of

READ: Counter[int] = Counter()  # by rank, in the process of the threads


def count_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the bytes of the boxes that each rank reads."""
    original = boxes._read_box

    def box(*args: Any) -> Any:
        content = original(*args)
        READ[comm.rank()] += content.nbytes
        return content

    READ.clear()
    monkeypatch.setattr(boxes, "_read_box", box)


def save_state(name: str, folder: str) -> Any:
    """Save a trained program, and return its snapshot."""
    program = program_under(name)
    program.train_step(ids(0))
    program.save(folder)
    return program_state(program)


def load_state(name: str, folder: str) -> Any:
    """Load into a program of another layout: return its snapshot, and the bytes of this rank."""
    program = program_under(name, fresh=True)
    program.load(folder)
    parameters = list(program.assembly.parameters.values())
    state = program.optimizer.state if program.optimizer is not None else {}
    size = sum(local_tensor(p).nbytes for p in parameters)
    for p in parameters:
        moments = (local_tensor(v) for v in state[p].values())
        size += sum(v.nbytes for v in moments if v.shape == local_tensor(p).shape)
    return program_state(program), size


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
    """One rank reads a box that several need, and each rank gets all of its part."""
    saved = threads.run(save_state, world_of(one), one, str(tmp_path))[0]
    count_reads(monkeypatch)
    monkeypatch.setattr(boxes, "LIVE_BYTES", alive)
    results = threads.run(load_state, world_of(other), other, str(tmp_path))
    for state, _ in results:
        assert_equal(state["state"], saved["state"])
        assert_equal(state["moments"], saved["moments"])
    assert 0 < sum(READ.values()) <= sum(size for _, size in results)
    assert all(READ[rank] for rank in range(world_of(other)))  # all ranks share the reading


def refusal_of_load(name: str, folder: str) -> Any:
    """Try to load a damaged checkpoint, which must change nothing: return the refusal."""
    program = program_under(name, fresh=True)
    snapshot = program_state(program)
    with pytest.raises(Refusal) as caught:
        program.load(folder)
    assert_equal(program_state(program), snapshot)
    return caught.value.render()


def test_damage_in_what_is_read_for_others(tmp_path: Path, threads: Threads) -> None:
    """One rank reads it; all refuse it, and none waits."""
    threads.run(save_state, 1, "one", str(tmp_path))
    path = newest_checkpoint(tmp_path) / "__0_0.distcp"
    place = (
        read_index(path.parent).tensors["model.transformer.h.0.attn.c_attn.weight"].boxes[0].place
    )
    data = bytearray(path.read_bytes())
    data[place.at + place.length // 2] ^= 1
    path.write_bytes(data)
    for message in threads.run(refusal_of_load, 2, "tp2", str(tmp_path)):
        assert "S633" in message and "the checksum of box" in message


def load_dcp(folder: str, head: str) -> None:
    """Load weights that another program saved by torch.distributed.checkpoint."""
    program = program_under("tp2", fresh=True)
    schedlang.transfer(f"{folder}/{head}", program)
    assert_equal(program.state_dict(), dict(gpt2(layers=2).state_dict()))


def test_a_folder_of_torchs_own(tmp_path: Path, threads: Threads) -> None:
    """With the names of the model, or below `model`, beside an optimizer's state or alone."""
    state, moments = gpt2(layers=2).state_dict(), {"momentum": torch.ones(3)}
    saved_states = {
        "flat": state,
        "nested": {"model": state, "optim": moments},
        "alone": {"model": state},
    }
    for head, saved in saved_states.items():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp_save(saved, storage_writer=FileSystemWriter(tmp_path / head), no_dist=True)
        threads.run(load_dcp, 2, str(tmp_path), head)


@pytest.mark.parametrize("beside", [(), ("optimizer", "train_state")], ids=["alone", "beside"])
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "flat"])
def test_names_that_begin_as_the_word_before_them(
    tmp_path: Path, nested: bool, beside: tuple[str, ...]
) -> None:
    """Llama's names begin with `model.`; they may be stored below `model` too."""
    real, loaded = llama(), llama()
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.zero_()
    state = dict(real.state_dict())
    saved = {"model": state} if nested else state
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        others = {key: {"x": torch.ones(3)} for key in beside}
        dcp_save({**saved, **others}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    schedlang.transfer(tmp_path, loaded)
    assert_equal(dict(loaded.state_dict()), state)


def transfer_dtensors(_: int) -> None:
    """Transfer DTensors of their own mesh into a program, and back into others."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    program = program_under("dp2tp2", fresh=True)
    expected = {n: t for n, t in gpt2(layers=2).state_dict().items() if n != "lm_head.weight"}
    distributed = {
        n: distribute_tensor(t, mesh, (Shard(0), Replicate())) for n, t in expected.items()
    }
    stats = schedlang.transfer(distributed, program)
    assert_equal({n: t for n, t in program.state_dict().items() if n in expected}, expected)
    results = {
        n: distribute_tensor(torch.zeros_like(t), mesh, (Shard(t.ndim - 1), Shard(0)))
        for n, t in expected.items()
    }
    back_stats = schedlang.transfer(program, results)
    assert_equal({n: t.full_tensor() for n, t in results.items()}, expected)
    assert stats.bytes == stats.bound and back_stats.bytes == back_stats.bound > 0


def test_dtensors_into_a_program_and_back() -> None:
    """The state of FSDP2 or of tensor parallelism, in the fewest bytes."""
    run_ranks(4, transfer_dtensors)
