"""Ends of transfers: state dicts, DTensors, modules, folders; changed tensors only; refusals."""

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
from tests.layouts import assert_equal, ids, points, program_under
from tests.models import gpt2
from tests.ranks import run_ranks


def blank_copy(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return an empty state of the same shapes and ties."""
    tensors: dict[int, Tensor] = {}
    return {
        name: tensors.setdefault(value.data_ptr(), torch.full_like(value, 7))
        for name, value in state.items()
    }


def transfer_states(name: str) -> Any:
    """Transfer a program to plain tensors on every rank, and on one; and back from one."""
    a, rank = program_under(name), comm.rank()
    a.train_step(ids(0))
    expected = a.state_dict()
    everywhere, on_one = blank_copy(expected), blank_copy(expected) if rank == 1 else None
    to_all = transfer(a, everywhere, bucket_bytes=512)
    assert_equal(everywhere, expected)
    to_one = transfer(a, on_one)
    if on_one is not None:
        assert_equal(on_one, expected)
    b = program_under(name, fresh=True)
    from_one = transfer(on_one, b)
    assert_equal(b.state_dict(), expected)
    return [(stats.bytes, stats.bound, stats.sent) for stats in (to_all, to_one, from_one)]


@pytest.mark.parametrize("name", ["tp2", "dp2z3", "pp2"])
def test_plain_state_dicts(name: str, threads: Threads) -> None:
    """Full tensors on all ranks or on one; tied tensors are sent once."""
    for rank_stats in zip(*threads.run(transfer_states, 2, name)):
        assert sum(sent for *_, sent in rank_stats) == rank_stats[0][0] == rank_stats[0][1]


PLACEMENTS: list[tuple[Any, ...]] = [
    (Shard(0), Replicate()),
    (Replicate(), Shard(1)),
    (Shard(0), Shard(1)),
    (Shard(0), Shard(0)),
    (_StridedShard(0, split_factor=2), Shard(0)),
    (Shard(1), Replicate()),
]


def transfer_dtensors() -> None:
    """Transfer from each placement to each other, of sizes that the ranks do not divide."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    full = {"w": torch.arange(7.0 * 5).view(7, 5), "v": torch.arange(8.0 * 4).view(8, 4)}
    strided = (_StridedShard(0, split_factor=2), Shard(0))  # torch lays out even ones only
    for source in PLACEMENTS:
        for target in PLACEMENTS:
            names = ["v"] if strided in (source, target) else ["w", "v"]
            a = {name: distribute_tensor(full[name], mesh, source) for name in names}
            b = {
                n: distribute_tensor(torch.zeros_like(v), mesh, target)
                for n, v in full.items()
                if n in names
            }
            stats = transfer(a, b)
            assert stats.bytes == stats.bound
            for name in a:
                assert torch.equal(b[name].full_tensor(), full[name]), (source, target)


def test_dtensors() -> None:
    """State dicts of FSDP2 and tensor parallelism, on gloo processes."""
    run_ranks(4, run_single_thread, transfer_dtensors)


def run_single_thread(_: int, work: Any, *args: Any) -> Any:
    """Run work on a rank with one thread."""
    torch.set_num_threads(1)
    return work(*args)


def transfer_partial() -> None:
    """Try to transfer a pending sum, whose values are on no rank."""
    mesh = init_device_mesh("cpu", (2,))
    a = {"w": DTensor.from_local(torch.ones(4), mesh, [Partial()])}
    with pytest.raises(Refusal) as caught:
        transfer(a, {"w": torch.zeros(4)})
    assert caught.value.diagnostic.code == "S642"


def test_a_pending_sum_is_refused() -> None:
    """Before anything is sent, on all ranks."""
    run_ranks(2, run_single_thread, transfer_partial)


def transfer_changes() -> Any:
    """Transfer repeatedly with few, many or no changes: return the tensors and bytes of each."""
    a, b = program_under("dp2z3"), program_under("tp2", fresh=True)
    stats = [transfer(a, b, changed_only=True)]
    stats.append(transfer(a, b, changed_only=True))  # nothing has changed
    with torch.no_grad():
        a.assembly.parameters["transformer.ln_f.weight"].mul_(2)
    stats.append(transfer(a, b, changed_only=True))
    assert_equal(b.state_dict(), a.state_dict())
    with torch.no_grad():  # at the other end
        b.assembly.parameters["transformer.wte.weight"].mul_(0)
    stats.append(transfer(a, b, changed_only=True))
    assert_equal(b.state_dict(), a.state_dict())
    fresh = program_under("tp2", fresh=True)
    stats.append(transfer(a, fresh, changed_only=True))  # it has never received any
    assert_equal(fresh.state_dict(), a.state_dict())
    return [(stat.tensors, stat.left, stat.bytes) for stat in stats]


def test_only_what_changed(threads: Threads) -> None:
    """What has been equal at both ends since the last transfer is not sent again."""
    for stats in threads.run(transfer_changes, 2):
        count = stats[0][0]
        assert [stat[:2] for stat in stats] == [
            (count, 0),
            (0, count),
            (1, count - 1),
            (1, count - 1),
            (count, 0),
        ]
        assert stats[1][2] == 0 < stats[2][2] < stats[0][2]


def transfer_folders(folder: str, name: str) -> None:
    """Transfer from a checkpoint, safetensors, and a folder of `save_pretrained`."""
    a = program_under(name)
    a.train_step(ids(0))
    a.save(f"{folder}/saved")
    a.export(f"{folder}/weights", gpt2(layers=2))
    for path in (f"{folder}/saved", Path(folder) / "weights"):
        for layout in ("tp2", "dp2z3"):
            b = program_under(layout, fresh=True)
            stats = transfer(path, b, bucket_bytes=64)
            assert_equal(b.state_dict(), a.state_dict())
            assert stats.bytes == 0 < stats.copied
        state = blank_copy(a.state_dict())
        transfer(path, state)
        assert_equal(state, a.state_dict())
    b = program_under("tp2", fresh=True)
    transfer(f"{folder}/saved", b, optimizer=True)
    assert b.step == 1
    assert_equal(b.optimizer_state(), a.optimizer_state())
    with pytest.raises(Refusal) as caught:
        transfer(f"{folder}/none", b)
    assert caught.value.diagnostic.code == "S633"


def test_folders(tmp_path: Path, threads: Threads) -> None:
    """Each rank reads its own parts."""
    threads.run(transfer_folders, 2, str(tmp_path), "dp2z3")


def test_a_base_model_and_one_with_a_head(tmp_path: Path) -> None:
    """The folder of a base model has other names than the model that contains it."""
    source = gpt2(layers=1)
    source.transformer.save_pretrained(tmp_path)  # type: ignore[operator, union-attr]
    target = gpt2(layers=1)
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.zero_()
    transfer(tmp_path, target)
    assert_equal(dict(target.state_dict()), dict(source.state_dict()))


class TwoLayers(nn.Module):
    """Two layers, tied or not."""

    def __init__(self, tied: bool, width: int = 4, dtype: Any = torch.float32) -> None:
        super().__init__()
        self.one = nn.Linear(4, width, dtype=dtype)
        self.two = nn.Linear(4, width, dtype=dtype)
        if tied:
            self.two.weight = self.one.weight


def refusal_code(a: object, b: object, **options: Any) -> str:
    """Return the code with which a transfer is refused."""
    with pytest.raises(Refusal) as caught:
        transfer(a, b, **options)
    return caught.value.diagnostic.code


def test_what_is_refused() -> None:
    """Different names, shapes, dtypes, ties, and objects that are no end."""
    model = TwoLayers(False)
    less = {name: value for name, value in model.state_dict().items() if name != "two.bias"}
    assert refusal_code(model, less) == "S634"
    assert refusal_code(less, model) == "S634"
    assert refusal_code(model, TwoLayers(False, 5)) == "S635"
    assert refusal_code(model, TwoLayers(False, dtype=torch.float64)) == "S635"
    assert refusal_code(model, TwoLayers(True)) == "S642"
    transfer(TwoLayers(True), model)  # each gets the value of both
    assert torch.equal(model.one.weight, model.two.weight)
    transfer(model, TwoLayers(True))  # they are equal now
    assert refusal_code(model, 3) == "S642"
    assert refusal_code(model, {"one.weight": 3}) == "S642"
    assert refusal_code(model, None) == "S642"
    assert refusal_code(model, model, bucket_bytes=0) == "S642"
    assert refusal_code(model, model, optimizer=True) == "S642"


def refusal_codes() -> list[str]:
    """Return refusal codes of transfers of which one rank alone is wrong."""
    a, rank = program_under("dp2z1"), comm.rank()
    odd = program_under("dp2z1", True)
    without_optimizer = program_under("dp2", optimizer=None)
    return [
        refusal_code(a, odd),
        refusal_code(a, a if rank else None),
        refusal_code(a, a, optimizer=bool(rank)),
        refusal_code(a, {} if rank else a),
        refusal_code(without_optimizer, a, optimizer=True),
    ]


def test_all_ranks_refuse(threads: Threads) -> None:
    """Whichever rank is wrong, every rank refuses, and none waits."""
    for codes in threads.run(refusal_codes, 2):
        assert codes == ["S634", "S642", "S642", "S642", "S636"]


def train_after() -> None:
    """After a transfer without the optimizer of `a`, train `b` with its own."""
    a, b = program_under("tp2"), program_under("dp2", optimizer=None)
    transfer(a, b)
    torch.testing.assert_close(b.eval_step(ids(1))["loss"], a.eval_step(ids(1))["loss"])
    odd, odd_target = program_under("dp2", True), program_under("pp2", True, fresh=True)
    odd.train_step(points(0))
    transfer(odd, odd_target, optimizer=True)
    assert_equal(odd_target.state_dict(), odd.state_dict())
    assert_equal(odd_target.optimizer_state(), odd.optimizer_state())
    assert_equal(odd_target.buffers()["shift"], odd.buffers()["shift"])


def test_evaluated_under_another_layout(threads: Threads) -> None:
    """A program without an optimizer evaluates; odd sizes, scalars and buffers are transferred."""
    threads.run(train_after, 2)
