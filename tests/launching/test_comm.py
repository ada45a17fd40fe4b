"""One layer talks to other ranks: nobody else asks torch.distributed, and no group is left over."""

from __future__ import annotations

import ast
import copy
import gc
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import schedlang
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.mesh import Mesh
from schedlang.passes.lower.build import build
from schedlang.passes.verify.original import Sequential
from schedlang.runtime import full_tensors
from schedlang.runtime.checkpointing.holdings import first_rank
from schedlang.runtime.comm import agreement
from schedlang.runtime.comm import world as comm
from schedlang.runtime.comm.collectives import RankGroups
from schedlang.runtime.launch.pool import Pool
from tests import models
from tests.proofs import planned, sgd

ROOT = Path(schedlang.__file__).parent
HOMES = (
    "runtime/comm/",  # the layer itself
    "testing/",  # an instrument for any code, which is itself a backend of torch.distributed
)
# libraries of torch above its communication, and the files that are about what they hold
LIBRARIES = {
    "runtime/activation_memory/dynamic.py": {"fsdp"},  # gathers are no part of a recomputation
    "runtime/adapters/fully_shard.py": {"fsdp"},
    "runtime/adapters/torch_distributed.py": {""},  # its functions, where a rank is played
    "runtime/activation_memory/recompute.py": {"fsdp"},
    "runtime/checkpointing/boxes.py": {"checkpoint"},  # the format of its files
    "runtime/storage/offloaded_gradients.py": {"tensor"},
    "runtime/grad_reduction/gradient.py": {"tensor"},  # DTensor: parts have no flat gradient
    "runtime/grad_reduction/zero.py": {"fsdp", "device_mesh"},  # the mesh that fully_shard is given
    "runtime/initial/library_loading.py": {"fsdp"},  # a module of theirs cannot be copied
    "runtime/launch/recorded_calls.py": {""},  # its functions, each of which is written down
    "runtime/device_rates.py": {""},  # measures how fast torch's own are
    "runtime/optim/full_tensor_step.py": {"tensor"},  # DTensors, whose local parts are stepped on
    "kernels/sharding_rules.py": {"tensor"},
    "passes/judge/layouts.py": {"tensor"},  # what programs of others hold
    "passes/judge/subject.py": {"tensor"},
    "passes/judge/dropout_masks.py": {"tensor"},
    "passes/judge/discrete_choices.py": {"tensor"},
    "passes/judge/first_difference.py": {"tensor"},
    # what a collective returns that is waited for; functions that are heard of
    "passes/judge/async_collectives.py": {"", "Work"},
}
# stands below the runtime, and asks torchrun's own store before there is a world
STORES = {"diagnostics/job_refusals.py"}


def _imports(tree: ast.AST) -> Iterator[str]:
    """The parts of torch.distributed that a file imports or names, "" for itself."""
    for node in ast.walk(tree):
        names: Sequence[str] = ()
        if isinstance(node, ast.Import):
            names = [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = (
                [node.module]
                if node.module.startswith("torch.distributed.")
                else [f"{node.module}.{one.name}" for one in node.names]
            )
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            names = ["torch.distributed"]
        for name in names:
            if name.startswith(("torch.distributed", "torch._C._distributed_c10d")):
                yield name.removeprefix("torch.distributed").strip(".").partition(".")[0]


def _files() -> Iterator[tuple[str, ast.Module]]:
    for folder, _, names in os.walk(ROOT, followlinks=True):
        for name in names:
            path = Path(folder) / name
            # what nothing names needs no syntax: most files
            if name.endswith(".py") and "distributed" in (text := path.read_text()):
                yield path.relative_to(ROOT).as_posix(), ast.parse(text)


def test_one_layer_asks_torch_distributed() -> None:
    """Groups, messages and stores are asked for in one room; libraries are used where named."""
    wrong, used = {}, {}
    for path, tree in _files():
        found = set(_imports(tree))
        if not found or path.startswith(HOMES) or path in STORES:
            continue
        used[path] = found
        if not found <= LIBRARIES.get(path, set()):
            wrong[path] = sorted(found)
    assert not wrong
    assert used == LIBRARIES, "a file that is listed no longer needs it"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import torch.distributed as dist", {""}),
        ("from torch import distributed", {""}),
        ("def f():\n    from torch.distributed.fsdp import fully_shard", {"fsdp"}),
        ("import torch\ntorch.distributed.barrier()", {""}),
        ("from torch.distributed import barrier, tensor", {"barrier", "tensor"}),
        ("import torch\ntorch.nn.Linear", set()),
    ],
)
def test_each_way_to_import_is_seen(text: str, found: set[str]) -> None:
    """At the top, inside of a function, by attribute."""
    assert set(_imports(ast.parse(text))) == found


# -- groups ----------------------------------------------------------------------------------------

ROWS = """
transformer.h.*.mlp.c_fc    shard(col, over=tp)
transformer.h.*.mlp.c_proj  shard(row, over=tp)
zero(stage=0, over=dp)
overlap(gradients)
"""


def _rebuilt(times: int) -> list[tuple[int, ...]]:
    """How many groups, threads and open files there are after each build of a program that
    trains."""
    found, there = [], [at for at in ("/proc/self/task", "/proc/self/fd") if os.path.isdir(at)]
    batch = models.tokens()
    for _ in range(times):
        program = build(planned(models.gpt2(2), ROWS, "dp=2, tp=2"), batch, optimizer=sgd)
        program.train_step(batch)
        groups = len(dist.distributed_c10d._world.pg_map)
        found.append((groups, *(len(os.listdir(at)) for at in there)))
    return found


@pytest.fixture
def fresh() -> Iterator[Pool]:
    """Ranks of one test: no earlier job has left what could go meanwhile."""
    with Pool() as pool:
        yield pool


def test_a_program_built_again_makes_no_groups(fresh: Pool) -> None:
    """The groups of the first are those of the tenth; so are its threads and files."""
    for found in fresh.run(_rebuilt, 4, 10):
        assert len(set(found)) == 1


def _two_jobs(path: str) -> list[int]:
    """A world, a program, another world with a program of its own: the groups alive in each."""
    rank, found = dist.get_rank(), []
    dist.destroy_process_group()
    for turn in range(3):
        gc.collect()  # the world of the program before
        agreement.join_locally(rank, 2, f"{path}/{turn}")
        batch = models.tokens()
        program = build(planned(models.gpt2(2), "zero(stage=0, over=dp)", "dp=2"), batch)
        program.eval_step(batch)
        ranks = program.assembly.ranks
        assert ranks.world is comm.current_world()
        found.append(len(comm._worlds))
        del program, ranks
        agreement.leave_world()
    agreement.join_locally(rank, 2, f"{path}/last")
    dist.barrier()  # torch's, for ours makes a world: a rank that has joined may end first
    gc.collect()
    return [*found, len(comm._worlds)]


def _sliced() -> None:
    """A step of a program whose parameters are DTensors, of which torch remembers the mesh."""
    batch = models.tokens()
    row = "zero(stage=3, over=dp)"
    build(planned(models.gpt2(2), row, "dp=2"), batch, optimizer=sgd).train_step(batch)


def test_a_job_that_is_left_leaves_nothing(fresh: Pool, tmp_path: Path) -> None:
    """Another job of the same process has a world of its own, and the last one's is gone."""
    fresh.run(_sliced, 2)
    for found in fresh.run(_two_jobs, 2, str(tmp_path)):
        assert found == [1, 1, 1, 0]


class _Splits:
    """A world whose backend can be split, and what it was asked for."""

    supports_splitting = True

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def _get_backend(self, device: torch.device) -> _Splits:
        return self

    def split_group(self, split_ranks: Any, timeout: Any) -> str:
        self.asked.append(split_ranks)
        return "mine"


def test_groups_of_an_axis_are_split_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a device and a backend that splits: one exchange an axis, however many groups it has."""
    splits = _Splits()
    world = comm.World(5, 64, {"cuda": "nccl"}, torch.device("cuda", 5))
    monkeypatch.setattr(comm.World, "group", property(lambda self: splits))
    monkeypatch.setattr(dist, "split_group", splits.split_group)
    monkeypatch.setattr(comm, "current_world", lambda: world)
    ranks = RankGroups(Mesh((("dp", 16), ("tp", 4))), torch.device("cuda", 5))
    for axis in ("dp", "tp", "dp"):
        ranks.group(axis)
    assert [len(one) for one in splits.asked] == [4, 16]
    assert ranks.group("tp").ranks == (4, 5, 6, 7) and ranks.messages_may_deadlock


def test_hosts_are_served_by_their_own_backend() -> None:
    """Which backend runs messages one after the other, and which has to be given host tensors."""
    cuda, cpu = torch.device("cuda", 0), torch.device("cpu")
    nccl = comm.World(0, 2, {"cpu": "gloo", "cuda": "nccl"})
    gloo = comm.World(0, 2, {"cpu": "gloo", "cuda": "gloo"})
    assert nccl.orders_messages(cuda) and not nccl.sends_by_host(cuda)
    assert gloo.sends_by_host(cuda) and not gloo.orders_messages(cuda)
    assert not any(
        (
            nccl.orders_messages(cpu),
            gloo.orders_messages(cpu),
            nccl.sends_by_host(cpu),
            gloo.sends_by_host(cpu),
        )
    )


def test_a_device_that_the_world_does_not_serve_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is sent, with the call that joins a world which does."""
    mesh, cuda = Mesh((("dp", 2),)), torch.device("cuda", 1)
    monkeypatch.setattr(comm, "current_world", lambda: comm.World(1, 2, {"cuda": "nccl"}))
    assert RankGroups(mesh, cuda).rank == 1
    monkeypatch.setattr(comm, "current_world", lambda: comm.World(1, 2, {"cpu": "gloo"}))
    assert RankGroups(mesh).rank == 1
    with pytest.raises(Refusal, match="process group does not serve") as refused:
        RankGroups(mesh, cuda)
    assert refused.value.diagnostic.code == "S607"
    assert 'init_process_group("cpu:gloo,cuda:nccl")' in str(refused.value)


def _assembled() -> tuple[int, int, int, bool]:
    """Messages and bytes by which this rank gives others what they lack; sums; is all right?"""
    batch, told = models.tokens(), {"isend": 0, "all_reduce": 0, "broadcast": 0}
    model = models.gpt2(2)
    program = build(planned(model, "zero(stage=3, over=dp)", "dp=4"), batch, optimizer=sgd)
    plain = {name: getattr(dist, name) for name in told}
    size = 0

    def counted(name: str) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal size
            told[name] += 1
            size += args[0].nbytes * (name == "isend")
            return plain[name](*args, **kwargs)

        return run

    for name in told:
        setattr(dist, name, counted(name))
    try:
        state = program.state_dict()
    finally:
        for name, function in plain.items():
            setattr(dist, name, function)
    same = all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    return told["isend"], size, told["all_reduce"] + told["broadcast"], same


def test_whole_tensors_are_sent_once_to_each_rank(pool: Pool) -> None:
    """A message in each round of doubling, in it what the other block lacks; nothing is summed."""
    found = pool.run(_assembled, 4)
    whole = sum(p.nbytes for p in models.gpt2(2).parameters())
    assert [(count, sums, same) for count, _, sums, same in found] == [(2, 0, True)] * 4
    assert sum(size for _, size, *_ in found) == 3 * whole


def _kinds() -> tuple[list[Any], list[int]]:
    """What ranks learn of each other four times, and the broadcasts of each."""
    plain, found, counts = dist.broadcast, [], [0]

    def broadcast(*args: Any, **kwargs: Any) -> Any:
        counts[-1] += 1
        return plain(*args, **kwargs)

    dist.broadcast = broadcast
    try:
        for value in (comm.rank() % 2, comm.rank() % 2, comm.rank() // 2, 7):
            found.append(comm.ranks_by_object({"of": value}))
            found[-1][0][0]["mine"] = True  # what one is told is one's own
            counts.append(0)
    finally:
        dist.broadcast = plain
    return found, counts[:-1]


def test_what_all_have_been_told_is_not_told_again(pool: Pool) -> None:
    """Values that were there before are known by their digest, whoever has them now."""
    for found, counts in pool.run(_kinds, 4):
        told = [[(value["of"], ranks) for value, ranks in one] for one in found]
        assert told[:2] == [[(0, (0, 2)), (1, (1, 3))]] * 2
        assert told[2:] == [[(0, (0, 1)), (1, (2, 3))], [(7, (0, 1, 2, 3))]]
        assert counts == [2, 0, 0, 0]
        assert all(one.keys() == {"of"} for kinds in found for one, _ in kinds[1:])


def _again() -> tuple[list[bool], int]:
    """Are whole tensors right after each of two steps; and how many the others have of rank 0's."""
    batch, model = models.tokens(), models.gpt2(2)
    program = build(planned(model, "zero(stage=3, over=dp)", "dp=2"), batch, optimizer=sgd)
    alone = Sequential(copy.deepcopy(model), sgd)
    same, spare = [], 0
    for _ in range(2):  # the second time by the ways of the first
        program.train_step(batch), alone.train_step(batch)
        state, grads = program.state_dict(), program.gradients()
        pairs = [(state[k], v) for k, v in alone.state_dict().items()]
        pairs += [(grads[k], v) for k, v in alone.gradients().items() if v is not None]
        same.append(all(torch.allclose(a, b, atol=1e-12) for a, b in pairs))
        first = full_tensors.full_gradients(program.assembly, first_rank)
        if comm.rank() == 0:
            same.append(all(torch.equal(first[k], v) for k, v in grads.items()))
        else:
            spare += len(first)
    return same, spare


def test_whole_tensors_follow_the_values(pool: Pool) -> None:
    """The way of the parts is found once, what goes it is not; and where one rank alone is to have
    them, no other is sent any."""
    assert pool.run(_again, 2) == [([True] * 4, 0), ([True] * 2, 0)]


def _handed() -> tuple[list[Any], Any, int]:
    """What ranks hand to each other, and the last one to all; the most that was pickled."""
    here, most = comm.rank(), [0]
    plain = comm.all_gather_object

    def gathered(value: Any, group: Any = None) -> list[Any]:
        most[0] = max(most[0], len(comm.pickle_value(value)))
        return plain(value, group)

    draw = torch.Generator().manual_seed(here)
    rows = torch.randn(3 + here, 4096, generator=draw)  # another number of rows on each rank
    value = {
        "rows": rows,
        "turned": rows.t()[::2],
        "half": (rows.bfloat16(), [here, None, "word"]),
        "yes": rows > 0,
        "none": rows[:0],
        "number": torch.tensor(here),
    }
    assert dist.group.WORLD is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm, "all_gather_object", gathered)
        found = comm.all_gather_tensors(value, dist.group.WORLD, torch.device("cpu"))
        told = comm.broadcast_tensors(comm.size() - 1, value, torch.device("cpu"))
    small = found[0]["number"].untyped_storage().nbytes() + told["number"].nbytes
    return found, told, max(most[0], small)


def test_tensors_are_handed_as_they_lie(pool: Pool) -> None:
    """Values of any form come to all ranks, and their tensors in no pickle; what is small keeps
    nothing else alive."""
    made = pool.run(_handed, 2)
    for found, told, most in made:
        assert most < 4096
        for rank, value in enumerate(found):
            draw = torch.Generator().manual_seed(rank)
            rows = torch.randn(3 + rank, 4096, generator=draw)
            assert torch.equal(value["rows"], rows) and torch.equal(value["turned"], rows.t()[::2])
            assert torch.equal(value["half"][0], rows.bfloat16())
            assert value["half"][1] == [rank, None, "word"] and int(value["number"]) == rank
            assert torch.equal(value["yes"], rows > 0) and value["none"].shape == (0, 4096)
        assert torch.equal(told["rows"], found[1]["rows"])


def _evaluated() -> tuple[int, torch.Tensor]:
    """The most that is pickled when a batch is evaluated, and the logits."""
    rows = "transformer.h  pipeline_split(over=pp)\nzero(stage=0, over=dp)\n"
    rows += 'pipeline(order="1F1B", micro=2)'
    batch = models.tokens(rows=8)
    plan = planned(models.gpt2(2), rows, "dp=2, pp=2")
    program = build(plan, batch, optimizer=sgd, wait=120)
    sizes: list[int] = []
    packed = comm.pickle_value
    with pytest.MonkeyPatch.context() as patch:

        def noting(value: object) -> bytes:
            sizes.append(len(packed(value)))
            return packed(value)

        patch.setattr(comm, "pickle_value", noting)
        output = program.eval_step(batch)
    return max(sizes, default=0), output["logits"]


def test_logits_are_not_pickled(pool: Pool) -> None:
    """What is evaluated comes to every rank from device to device, whole and equal."""
    batch = models.tokens(rows=8)
    wanted = models.gpt2(2).eval()(**batch)["logits"].detach()
    for most, logits in pool.run(_evaluated, 4):
        torch.testing.assert_close(logits, wanted, rtol=1e-9, atol=1e-11)
        assert most < logits.nbytes / 2
