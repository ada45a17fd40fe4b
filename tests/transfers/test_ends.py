"""Ends of transfers: state dicts, DTensors, modules, folders; what has changed; what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime.comm import world as comm
from schedlang.runtime.transfer.transfer import transfer
from tests.engine import Threads
from tests.layouts import equal, ids, points, program_under
from tests.models import gpt2
from tests.ranks import run_ranks


def blank(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Room for a state, with its ties."""
    made: dict[int, Tensor] = {}
    return {
        name: made.setdefault(value.data_ptr(), torch.full_like(value, 7))
        for name, value in state.items()
    }


def with_states(name: str) -> Any:
    """A program into plain tensors on every rank, and on one; and back from one."""
    a, rank = program_under(name), comm.rank()
    a.train_step(ids(0))
    wanted = a.state_dict()
    everywhere, alone = blank(wanted), blank(wanted) if rank == 1 else None
    first = transfer(a, everywhere, bucket_bytes=512)
    equal(everywhere, wanted)
    second = transfer(a, alone)
    if alone is not None:
        equal(alone, wanted)
    b = program_under(name, fresh=True)
    third = transfer(alone, b)
    equal(b.state_dict(), wanted)
    return [(told.bytes, told.bound, told.sent) for told in (first, second, third)]


@pytest.mark.parametrize("name", ["tp2", "dp2z3", "pp2"])
def test_plain_state_dicts(name: str, threads: Threads) -> None:
    """Whole tensors on all ranks or on one; ties are sent once."""
    for told in zip(*threads.run(with_states, 2, name)):
        assert sum(sent for *_, sent in told) == told[0][0] == told[0][1]


PLACEMENTS: list[tuple[Any, ...]] = [
    (Shard(0), Replicate()),
    (Replicate(), Shard(1)),
    (Shard(0), Shard(1)),
    (Shard(0), Shard(0)),
    (_StridedShard(0, split_factor=2), Shard(0)),
    (Shard(1), Replicate()),
]


def between_dtensors() -> None:
    """Each placement into each other, of sizes that the ranks do not divide."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = {"w": torch.arange(7.0 * 5).view(7, 5), "v": torch.arange(8.0 * 4).view(8, 4)}
    strided = (_StridedShard(0, split_factor=2), Shard(0))  # torch lays out even ones only
    for ours in PLACEMENTS:
        for theirs in PLACEMENTS:
            names = ["v"] if strided in (ours, theirs) else ["w", "v"]
            a = {name: distribute_tensor(whole[name], mesh, ours) for name in names}
            b = {
                n: distribute_tensor(torch.zeros_like(v), mesh, theirs)
                for n, v in whole.items()
                if n in names
            }
            told = transfer(a, b)
            assert told.bytes == told.bound
            for name in a:
                assert torch.equal(b[name].full_tensor(), whole[name]), (ours, theirs)


def test_dtensors() -> None:
    """State dicts of FSDP2 and tensor parallelism, on processes of gloo."""
    run_ranks(4, alone, between_dtensors)


def alone(_: int, work: Any, *args: Any) -> Any:
    """A rank with one thread."""
    torch.set_num_threads(1)
    return work(*args)


def in_partial() -> None:
    """A sum that is pending says nowhere where its values lie."""
    mesh = init_device_mesh("cpu", (2,))
    a = {"w": DTensor.from_local(torch.ones(4), mesh, [Partial()])}
    with pytest.raises(Refusal) as caught:
        transfer(a, {"w": torch.zeros(4)})
    assert caught.value.diagnostic.code == "S642"


def test_a_pending_sum_is_refused() -> None:
    """Before anything is sent, on all ranks."""
    run_ranks(2, alone, in_partial)


def changing() -> Any:
    """Bytes and tensors of transfers between which little, much or nothing changes."""
    a, b = program_under("dp2z3"), program_under("tp2", fresh=True)
    told = [transfer(a, b, changed_only=True)]
    told.append(transfer(a, b, changed_only=True))  # nothing has
    with torch.no_grad():
        a.assembly.parameters["transformer.ln_f.weight"].mul_(2)
    told.append(transfer(a, b, changed_only=True))
    equal(b.state_dict(), a.state_dict())
    with torch.no_grad():  # at the other end
        b.assembly.parameters["transformer.wte.weight"].mul_(0)
    told.append(transfer(a, b, changed_only=True))
    equal(b.state_dict(), a.state_dict())
    other = program_under("tp2", fresh=True)
    told.append(transfer(a, other, changed_only=True))  # it has never got any
    equal(other.state_dict(), a.state_dict())
    return [(one.tensors, one.left, one.bytes) for one in told]


def test_only_what_changed(threads: Threads) -> None:
    """What is equal at both ends, as it was after the last transfer, is not sent again."""
    for found in threads.run(changing, 2):
        every = found[0][0]
        assert [one[:2] for one in found] == [
            (every, 0),
            (0, every),
            (1, every - 1),
            (1, every - 1),
            (every, 0),
        ]
        assert found[1][2] == 0 < found[2][2] < found[0][2]


def from_folders(folder: str, name: str) -> None:
    """A checkpoint, safetensors, and what `save_pretrained` wrote, under a layout."""
    a = program_under(name)
    a.train_step(ids(0))
    a.save(f"{folder}/saved")
    a.export(f"{folder}/weights", gpt2(layers=2))
    for path in (f"{folder}/saved", Path(folder) / "weights"):
        for other in ("tp2", "dp2z3"):
            b = program_under(other, fresh=True)
            told = transfer(path, b, bucket_bytes=64)
            equal(b.state_dict(), a.state_dict())
            assert told.bytes == 0 < told.copied
        state = blank(a.state_dict())
        transfer(path, state)
        equal(state, a.state_dict())
    b = program_under("tp2", fresh=True)
    transfer(f"{folder}/saved", b, optimizer=True)
    assert b.step == 1
    equal(b.optimizer_state(), a.optimizer_state())
    with pytest.raises(Refusal) as caught:
        transfer(f"{folder}/none", b)
    assert caught.value.diagnostic.code == "S633"


def test_folders(tmp_path: Path, threads: Threads) -> None:
    """Each rank reads what it is to hold."""
    threads.run(from_folders, 2, str(tmp_path), "dp2z3")


def test_a_base_model_and_one_with_a_head(tmp_path: Path) -> None:
    """The folder of a base model has other names than the model that it is a part of."""
    whole = gpt2(layers=1)
    whole.transformer.save_pretrained(tmp_path)  # type: ignore[operator, union-attr]
    other = gpt2(layers=1)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    transfer(tmp_path, other)
    equal(dict(other.state_dict()), dict(whole.state_dict()))


class Tied(nn.Module):
    """Two weights, which may be one."""

    def __init__(self, tied: bool, width: int = 4, dtype: Any = torch.float32) -> None:
        super().__init__()
        self.one = nn.Linear(4, width, dtype=dtype)
        self.two = nn.Linear(4, width, dtype=dtype)
        if tied:
            self.two.weight = self.one.weight


def code_of(a: object, b: object, **options: Any) -> str:
    """How a transfer is refused."""
    with pytest.raises(Refusal) as caught:
        transfer(a, b, **options)
    return caught.value.diagnostic.code


def test_what_is_refused() -> None:
    """Names, shapes, dtypes, ties, and what is no end."""
    one = Tied(False)
    less = {name: value for name, value in one.state_dict().items() if name != "two.bias"}
    assert code_of(one, less) == "S634"
    assert code_of(less, one) == "S634"
    assert code_of(one, Tied(False, 5)) == "S635"
    assert code_of(one, Tied(False, dtype=torch.float64)) == "S635"
    assert code_of(one, Tied(True)) == "S642"
    transfer(Tied(True), one)  # each gets the value of both
    assert torch.equal(one.one.weight, one.two.weight)
    transfer(one, Tied(True))  # they are equal now
    assert code_of(one, 3) == "S642"
    assert code_of(one, {"one.weight": 3}) == "S642"
    assert code_of(one, None) == "S642"
    assert code_of(one, one, bucket_bytes=0) == "S642"
    assert code_of(one, one, optimizer=True) == "S642"


def refusing() -> list[str]:
    """Programs, of which one rank alone is wrong."""
    a, rank = program_under("dp2z1"), comm.rank()
    other = program_under("dp2z1", True)
    plain = program_under("dp2", optimizer=None)
    return [
        code_of(a, other),
        code_of(a, a if rank else None),
        code_of(a, a, optimizer=bool(rank)),
        code_of(a, {} if rank else a),
        code_of(plain, a, optimizer=True),
    ]


def test_all_ranks_refuse(threads: Threads) -> None:
    """Whoever is wrong, every rank says so, and none waits."""
    for found in threads.run(refusing, 2):
        assert found == ["S634", "S642", "S642", "S642", "S636"]


def going_on() -> None:
    """Without the optimizer of `a`, `b` trains on with its own."""
    a, b = program_under("tp2"), program_under("dp2", optimizer=None)
    transfer(a, b)
    torch.testing.assert_close(b.eval_step(ids(1))["loss"], a.eval_step(ids(1))["loss"])
    odd, same = program_under("dp2", True), program_under("pp2", True, fresh=True)
    odd.train_step(points(0))
    transfer(odd, same, optimizer=True)
    equal(same.state_dict(), odd.state_dict())
    equal(same.optimizer_state(), odd.optimizer_state())
    equal(same.buffers()["shift"], odd.buffers()["shift"])


def test_evaluated_under_another_layout(threads: Threads) -> None:
    """A program without an optimizer evaluates; odd sizes, scalars, buffers come along."""
    threads.run(going_on, 2)
