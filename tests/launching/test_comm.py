"""The communication layer: only it uses torch.distributed, and no group remains after a job."""

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
from tests.proofs import make_plan, sgd

ROOT = Path(schedlang.__file__).parent
ALLOWED = (
    "runtime/comm/",  # the layer itself
    "testing/",  # an instrument for any code, which is itself a backend of torch.distributed
)
# libraries of torch above its communication, and the files that are about what they hold
LIBRARIES = {
    "runtime/activation_memory/dynamic.py": {"fsdp"},  # recomputation must not repeat gathers
    "runtime/adapters/fully_shard.py": {"fsdp", "tensor"},  # its parameters are DTensors
    "runtime/adapters/torch_distributed.py": {""},  # its functions, where a rank is played
    "runtime/activation_memory/recompute.py": {"fsdp"},
    "runtime/checkpointing/boxes.py": {"checkpoint"},  # the format of its files
    "runtime/storage/offloaded_gradients.py": {"tensor"},
    "runtime/grad_reduction/gradient.py": {"tensor"},  # DTensor: parts have no flat gradient
    # the mesh, and the dims of its shards, that fully_shard is given
    "runtime/grad_reduction/zero.py": {"fsdp", "device_mesh", "tensor"},
    "runtime/initial/library_loading.py": {"fsdp"},  # a module of theirs cannot be copied
    "runtime/launch/recorded_calls.py": {""},  # its functions, each of which is written down
    "runtime/device_rates.py": {""},  # measures how fast torch's own are
    "runtime/shard_gradients.py": {"tensor"},  # slices of shards: DTensors that are parts
    "runtime/shard_state.py": {"tensor"},  # a DTensor says itself that it is a shard
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
STORE_FILES = {"diagnostics/job_refusals.py"}


def distributed_imports(tree: ast.AST) -> Iterator[str]:
    """Yield the parts of torch.distributed that a file imports or names, "" for itself."""
    for node in ast.walk(tree):
        names: Sequence[str] = ()
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = (
                [node.module]
                if node.module.startswith("torch.distributed.")
                else [f"{node.module}.{alias.name}" for alias in node.names]
            )
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            names = ["torch.distributed"]
        for name in names:
            if name.startswith(("torch.distributed", "torch._C._distributed_c10d")):
                yield name.removeprefix("torch.distributed").strip(".").partition(".")[0]


def parse_files() -> Iterator[tuple[str, ast.Module]]:
    for folder, _, names in os.walk(ROOT, followlinks=True):
        for name in names:
            path = Path(folder) / name
            # most files name nothing of it: no need to parse them
            if name.endswith(".py") and "distributed" in (text := path.read_text()):
                yield path.relative_to(ROOT).as_posix(), ast.parse(text)


def test_one_layer_asks_torch_distributed() -> None:
    """Only `runtime/comm` uses groups, messages and stores; other libraries only where listed."""
    violations, used = {}, {}
    for path, tree in parse_files():
        imports = set(distributed_imports(tree))
        if not imports or path.startswith(ALLOWED) or path in STORE_FILES:
            continue
        used[path] = imports
        if not imports <= LIBRARIES.get(path, set()):
            violations[path] = sorted(imports)
    assert not violations
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
    assert set(distributed_imports(ast.parse(text))) == found


# -- groups ----------------------------------------------------------------------------------------

ROWS = """
transformer.h.*.mlp.c_fc    shard(col, over=tp)
transformer.h.*.mlp.c_proj  shard(row, over=tp)
zero(stage=0, over=dp)
overlap(gradients)
"""


def build_repeatedly(times: int) -> list[tuple[int, ...]]:
    """Return the numbers of groups, threads and open files after each build of a training
    program."""
    counts, folders = (
        [],
        [folder for folder in ("/proc/self/task", "/proc/self/fd") if os.path.isdir(folder)],
    )
    batch = models.tokens()
    for _ in range(times):
        program = build(make_plan(models.gpt2(2), ROWS, "dp=2, tp=2"), batch, optimizer=sgd)
        program.train_step(batch)
        groups = len(dist.distributed_c10d._world.pg_map)
        counts.append((groups, *(len(os.listdir(folder)) for folder in folders)))
    return counts


@pytest.fixture
def fresh() -> Iterator[Pool]:
    """Yield a new pool: no earlier job has left anything that could end meanwhile."""
    with Pool() as pool:
        yield pool


def test_a_program_built_again_makes_no_groups(fresh: Pool) -> None:
    """Groups, threads and files after the first build equal those after the tenth."""
    for counts in fresh.run(build_repeatedly, 4, 10):
        assert len(set(counts)) == 1


def run_jobs(path: str) -> list[int]:
    """Join a world and build a program, three times: return the worlds alive in each, and at the
    end."""
    rank, counts = dist.get_rank(), []
    dist.destroy_process_group()
    for number in range(3):
        gc.collect()  # frees the world of the last program
        agreement.join_locally(rank, 2, f"{path}/{number}")
        batch = models.tokens()
        program = build(make_plan(models.gpt2(2), "zero(stage=0, over=dp)", "dp=2"), batch)
        program.eval_step(batch)
        ranks = program.assembly.ranks
        assert ranks.world is comm.current_world()
        counts.append(len(comm._worlds))
        del program, ranks
        agreement.leave_world()
    agreement.join_locally(rank, 2, f"{path}/last")
    dist.barrier()  # torch's barrier: schedlang's would create a world again
    gc.collect()
    return [*counts, len(comm._worlds)]


def train_sliced() -> None:
    """Train a step with DTensor parameters, whose mesh torch remembers."""
    batch = models.tokens()
    row = "zero(stage=3, over=dp)"
    build(make_plan(models.gpt2(2), row, "dp=2"), batch, optimizer=sgd).train_step(batch)


def test_a_job_that_is_left_leaves_nothing(fresh: Pool, tmp_path: Path) -> None:
    """Another job of the same process has its own world, and the last job's is gone."""
    fresh.run(train_sliced, 2)
    for counts in fresh.run(run_jobs, 2, str(tmp_path)):
        assert counts == [1, 1, 1, 0]


class SplittableBackend:
    """A world whose backend can split groups, and records the requests."""

    supports_splitting = True

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def _get_backend(self, device: torch.device) -> SplittableBackend:
        return self

    def split_group(self, split_ranks: Any, timeout: Any) -> str:
        self.asked.append(split_ranks)
        return "mine"


def test_groups_of_an_axis_are_split_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that splits needs one exchange per axis, with any number of groups."""
    splits = SplittableBackend()
    world = comm.World(5, 64, {"cuda": "nccl"}, torch.device("cuda", 5))
    monkeypatch.setattr(comm.World, "group", property(lambda self: splits))
    monkeypatch.setattr(dist, "split_group", splits.split_group)
    monkeypatch.setattr(comm, "current_world", lambda: world)
    ranks = RankGroups(Mesh((("dp", 16), ("tp", 4))), torch.device("cuda", 5))
    for axis in ("dp", "tp", "dp"):
        ranks.group(axis)
    assert [len(request) for request in splits.asked] == [4, 16]
    assert ranks.group("tp").ranks == (4, 5, 6, 7) and ranks.messages_may_deadlock


def test_hosts_are_served_by_their_own_backend() -> None:
    """Which backend orders messages, and which needs host tensors."""
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
    """Before anything is sent, with the call that joins a world which serves it."""
    mesh, cuda = Mesh((("dp", 2),)), torch.device("cuda", 1)
    monkeypatch.setattr(comm, "current_world", lambda: comm.World(1, 2, {"cuda": "nccl"}))
    assert RankGroups(mesh, cuda).rank == 1
    monkeypatch.setattr(comm, "current_world", lambda: comm.World(1, 2, {"cpu": "gloo"}))
    assert RankGroups(mesh).rank == 1
    with pytest.raises(Refusal, match="process group does not serve") as refused:
        RankGroups(mesh, cuda)
    assert refused.value.diagnostic.code == "S607"
    assert 'init_process_group("cpu:gloo,cuda:nccl")' in str(refused.value)


def count_messages() -> tuple[int, int, int, bool]:
    """Return the messages and bytes that this rank sends, its sums, and whether the state is
    right."""
    batch, counts = models.tokens(), {"isend": 0, "all_reduce": 0, "broadcast": 0}
    model = models.gpt2(2)
    program = build(make_plan(model, "zero(stage=3, over=dp)", "dp=4"), batch, optimizer=sgd)
    originals = {name: getattr(dist, name) for name in counts}
    size = 0

    def counted(name: str) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal size
            counts[name] += 1
            size += args[0].nbytes * (name == "isend")
            return originals[name](*args, **kwargs)

        return run

    for name in counts:
        setattr(dist, name, counted(name))
    try:
        state = program.state_dict()
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)
    is_equal = all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    return counts["isend"], size, counts["all_reduce"] + counts["broadcast"], is_equal


def test_whole_tensors_are_sent_once_to_each_rank(pool: Pool) -> None:
    """One message per doubling round, with what the other block lacks; nothing is summed."""
    ranks = pool.run(count_messages, 4)
    full_bytes = sum(p.nbytes for p in models.gpt2(2).parameters())
    assert [(count, sums, is_equal) for count, _, sums, is_equal in ranks] == [(2, 0, True)] * 4
    assert sum(size for _, size, *_ in ranks) == 3 * full_bytes


def exchange_kinds() -> tuple[list[Any], list[int]]:
    """Exchange objects four times: return what was learned, and the broadcasts of each."""
    original, learned, counts = dist.broadcast, [], [0]

    def broadcast(*args: Any, **kwargs: Any) -> Any:
        counts[-1] += 1
        return original(*args, **kwargs)

    dist.broadcast = broadcast
    try:
        for value in (comm.rank() % 2, comm.rank() % 2, comm.rank() // 2, 7):
            learned.append(comm.ranks_by_object({"of": value}))
            learned[-1][0][0]["mine"] = True  # a result may be changed freely
            counts.append(0)
    finally:
        dist.broadcast = original
    return learned, counts[:-1]


def test_what_all_have_been_told_is_not_told_again(pool: Pool) -> None:
    """Known values are recognized by their digest, whichever rank has them now."""
    for learned, counts in pool.run(exchange_kinds, 4):
        pairs = [[(value["of"], ranks) for value, ranks in kinds_of] for kinds_of in learned]
        assert pairs[:2] == [[(0, (0, 2)), (1, (1, 3))]] * 2
        assert pairs[2:] == [[(0, (0, 1)), (1, (2, 3))], [(7, (0, 1, 2, 3))]]
        assert counts == [2, 0, 0, 0]
        assert all(kinds_of.keys() == {"of"} for kinds in learned for kinds_of, _ in kinds[1:])


def train_and_compare() -> tuple[list[bool], int]:
    """Return whether full tensors are right after each of two steps, and how many other ranks got
    of rank 0's."""
    batch, model = models.tokens(), models.gpt2(2)
    program = build(make_plan(model, "zero(stage=3, over=dp)", "dp=2"), batch, optimizer=sgd)
    single = Sequential(copy.deepcopy(model), sgd)
    checks, spare = [], 0
    for _ in range(2):  # the second time by the routes of the first
        program.train_step(batch), single.train_step(batch)
        state, grads = program.state_dict(), program.gradients()
        pairs = [(state[k], v) for k, v in single.state_dict().items()]
        pairs += [(grads[k], v) for k, v in single.gradients().items() if v is not None]
        checks.append(all(torch.allclose(a, b, atol=1e-12) for a, b in pairs))
        gathered = full_tensors.full_gradients(program.assembly, first_rank)
        if comm.rank() == 0:
            checks.append(all(torch.equal(gathered[k], v) for k, v in grads.items()))
        else:
            spare += len(gathered)
    return checks, spare


def test_whole_tensors_follow_the_values(pool: Pool) -> None:
    """Routes are computed once, values are sent each time; tensors for one rank go to no other."""
    assert pool.run(train_and_compare, 2) == [([True] * 4, 0), ([True] * 2, 0)]


def exchange_tensors() -> tuple[list[Any], Any, int]:
    """Gather and broadcast tensors: return both results, and the most bytes pickled."""
    rank, largest = comm.rank(), [0]
    original = comm.all_gather_object

    def gathered(value: Any, group: Any = None) -> list[Any]:
        largest[0] = max(largest[0], len(comm.pickle_value(value)))
        return original(value, group)

    draw = torch.Generator().manual_seed(rank)
    rows = torch.randn(3 + rank, 4096, generator=draw)  # a different number of rows on each rank
    value = {
        "rows": rows,
        "turned": rows.t()[::2],
        "half": (rows.bfloat16(), [rank, None, "word"]),
        "yes": rows > 0,
        "none": rows[:0],
        "number": torch.tensor(rank),
    }
    assert dist.group.WORLD is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm, "all_gather_object", gathered)
        received = comm.all_gather_tensors(value, dist.group.WORLD, torch.device("cpu"))
        broadcast = comm.broadcast_tensors(comm.size() - 1, value, torch.device("cpu"))
    small = received[0]["number"].untyped_storage().nbytes() + broadcast["number"].nbytes
    return received, broadcast, max(largest[0], small)


def test_tensors_are_handed_as_they_lie(pool: Pool) -> None:
    """Values of any structure reach all ranks, their tensors without pickling; small ones keep no
    larger storage alive."""
    ranks = pool.run(exchange_tensors, 2)
    for gathered, broadcast, pickled in ranks:
        assert pickled < 4096
        for rank, value in enumerate(gathered):
            draw = torch.Generator().manual_seed(rank)
            rows = torch.randn(3 + rank, 4096, generator=draw)
            assert torch.equal(value["rows"], rows) and torch.equal(value["turned"], rows.t()[::2])
            assert torch.equal(value["half"][0], rows.bfloat16())
            assert value["half"][1] == [rank, None, "word"] and int(value["number"]) == rank
            assert torch.equal(value["yes"], rows > 0) and value["none"].shape == (0, 4096)
        assert torch.equal(broadcast["rows"], gathered[1]["rows"])


def evaluate_logits() -> tuple[int, torch.Tensor]:
    """Return the most bytes pickled when a batch is evaluated, and the logits."""
    rows = "transformer.h  pipeline_split(over=pp)\nzero(stage=0, over=dp)\n"
    rows += 'pipeline(order="1F1B", micro=2)'
    batch = models.tokens(rows=8)
    plan = make_plan(models.gpt2(2), rows, "dp=2, pp=2")
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
    """They reach every rank from device to device, complete and equal."""
    batch = models.tokens(rows=8)
    expected = models.gpt2(2).eval()(**batch)["logits"].detach()
    for pickled, logits in pool.run(evaluate_logits, 4):
        torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-11)
        assert pickled < logits.nbytes / 2
