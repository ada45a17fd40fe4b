"""Every feature on ranks with simulated devices: it trains as on a CPU, and nothing races or hangs.

The world knows device tensors alone, and batches lie on the device. What is exact is compared with
the untouched model on one CPU; what rounds or draws with the same program on ranks of the CPU.
"""

from __future__ import annotations

import math
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from schedlang.passes.lower.build import build
from schedlang.runtime.comm import world
from schedlang.testing.accelerator import current, spawn, unavailable
from tests.expert_models import WORDS as MIXED
from tests.expert_models import tiny
from tests.proofs import planned

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "it is there")

STEPS, WORDS, WIDTH = 3, 12, 16


class Attention(nn.Module):
    """Causal, of four heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            one(x).unflatten(-1, (4, -1)).transpose(1, 2) for one in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and an MLP, each behind a norm; some of what they give is dropped."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.calm, self.attn = nn.LayerNorm(WIDTH), Attention()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down, self.drop = nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.calm(x)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Words(nn.Module):
    """A language model."""

    def __init__(self, rate: float = 0.0, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(rate) for _ in range(depth))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def words(rate: float = 0.0, depth: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return Words(rate, depth).double()


def two() -> nn.Module:
    """Half as deep: where blocks are not parted into stages."""
    return words(depth=2)


def sized(mesh: str) -> Any:
    """What makes a model that is as deep as a mesh needs."""
    return words if "pp" in mesh else two


def single() -> nn.Module:
    return words().float()


def dropping() -> nn.Module:
    return words(0.2)


def batch(seed: int, count: int = WORDS, many: int = 8, tokens: int = 8) -> dict[str, Tensor]:
    """Some rows, of which some end early."""
    draw = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(count, (many, tokens), generator=draw) for _ in range(2))
    labels[1, 5:] = labels[6, 2:] = -100
    return {"ids": ids, "labels": labels}


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)


def torch_sgd(named: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=lr)


def muon(named: Any) -> torch.optim.Optimizer:
    """Looks at whole matrices."""
    held = [p for n, p in named if p.dim() == 2]
    return torch.optim.Muon(held, lr=0.02)


CUT = "blocks  pipeline_split(over=pp)\n"
PIPE = CUT + 'pipeline(order="1F1B", micro=4)'
SUM = "zero(stage=0, over=dp)\n"
RING = "blocks.*.attn  context_parallel({}, over={})\nzero(stage=0, over={})"
# feature -> mesh, rows, relaxed
EXACT = {
    "zero 0": ("dp=2", SUM),
    "zero 3": ("dp=2", "zero(stage=3, over=dp)"),
    "tensor": ("tp=2", "blocks.*.up  shard(col, over=tp)\nblocks.*.down  shard(row, over=tp)"),
    "zero 1": ("dp=2", "zero(stage=1, over=dp)"),
    "zero 2": ("dp=2", "zero(stage=2, over=dp)"),
    "checkpoint": ("dp=2", SUM + "blocks.*  checkpoint()"),
    "activations on the host": ("dp=2", SUM + "blocks.*  offload(activations)"),
    "activations on disk": ("dp=2", SUM + "blocks.*  offload(activations, to=disk)"),
    "parameters on the host": ("dp=2", SUM + "blocks.*  offload(parameters)"),
    "parameters on disk": (
        "dp=2",
        "zero(stage=3, over=dp)\nblocks.*  offload(parameters, to=disk)",
    ),
    "optimizer on disk": ("dp=2", "zero(stage=2, over=dp)\noffload(optimizer, to=disk)"),
    "parked on the host": ("pp=2", "blocks.*  offload(activations)\n" + PIPE),
    "parked on a peer": ("pp=2", "blocks.*  offload(activations, to=peer, over=pp)\n" + PIPE),
    "optimizer on a peer": ("pp=2", "blocks[0]  offload(optimizer, to=peer, over=pp)\n" + PIPE),
    "ring": ("cp=2", RING.format("ring", "cp", "cp")),
    "zigzag": ("cp=2", RING.format("ring, layout=zigzag", "cp", "cp")),
    "ulysses": ("cp=2", RING.format("ulysses", "cp", "cp")),
    "a ring around ulysses": (
        "r=2, c=2",
        "blocks.*.attn  context_parallel(ulysses, over=c)\n"
        "blocks.*.attn  context_parallel(ring, over=r, layout=zigzag)\nzero(stage=0, over=(r, c))",
    ),
    "double ring": ("r=2, c=2", RING.format("double_ring", "(r, c)", "(r, c)")),
    "nbody": ("r=2, c=2", RING.format("nbody", "(r, c)", "(r, c)")),
    **{
        order: ("pp=2", CUT + f'pipeline(order="{order}", micro=4{more})')
        for order, more in {
            "GPipe": "",
            "1F1B": "",
            "Interleaved1F1B": ", chunks=2",
            "ZB-H1": "",
            "ZB-V": "",
            "V-Half": "",
            "Varuna": "",
            "Chimera": "",
            "DualPipe": "",
            "Hanayo": ", chunks=2",
            "BFS": ", chunks=2",
        }.items()
    },
    "Varuna with slices": (
        "dp=2, pp=2",
        CUT + 'zero(stage=2, over=dp)\npipeline(order="Varuna", micro=4)',
    ),
    "Chimera with sums": (
        "dp=2, pp=2",
        CUT + 'zero(stage=1, over=dp)\npipeline(order="Chimera", micro=4)',
    ),
    "checkpoint in stages": ("pp=2", "blocks.*  checkpoint()\n" + PIPE),
    "sequence slices": ("pp=2", CUT + 'pipeline(order="Seq1F1B", micro=2, slices=2)'),
    "vocabulary": ("tp=2", "embed  shard(vocab, over=tp)\nhead  shard(vocab, over=tp)"),
}
SPREAD = "layers.*.experts  expert_parallel(over={})\n"
EP = SPREAD.format("ep{}") + "zero(stage=0, over=ep)"
BOTH = "dp=2, tp=2)\nview ep of (dp, tp"
# feature -> mesh, rows, waits of a step of two layers of experts
EXPERTS = {
    "experts": ("ep=2", EP.format(""), 2),
    "experts with room for some": ("ep=2", EP.format(", capacity=1.0"), 0),
    "room for some, sent": ("ep=2", EP.format(", capacity=1.0, dispatch=all_to_all"), 2),
    "room for some, fetched": ("ep=2", EP.format(", capacity=1.0, dispatch=fetch"), 0),
    "room for some where tokens are alike": (
        BOTH,
        SPREAD.format("ep, capacity=1.0") + "zero(stage=0, over=dp)",
        0,
    ),
    "experts over two axes": (
        "a=2, b=2)\nview ep of (a, b",
        SPREAD.format("ep") + "zero(stage=0, over=(a, b))",
        2,
    ),
    "where tokens are alike": (BOTH, SPREAD.format("ep") + "zero(stage=0, over=dp)", 2),
    "in chunks, of which some stay": ("ep=2", EP.format(", chunks=2, shadow=[0, 3]"), 2),
    "gathered": ("ep=2", EP.format(", dispatch=gather"), 2),
    "fetched": ("ep=2", EP.format(", dispatch=fetch"), 0),
    "experts that run again": ("ep=2", EP.format("") + "\nlayers.*  checkpoint()", 2),
    "experts made again in stages": (
        "ep=2, pp=2",
        SPREAD.format("ep") + "layers  pipeline_split(over=pp)\n"
        'zero(stage=0, over=ep)\npipeline(order="Varuna", micro=2)',
        2,  # two microbatches of one
    ),
}
CODES = {
    name: ("dp=2", SUM + f"compress(gradients, {name}, over=dp)")
    for name in ("int8", "onebit", "powersgd")
}
CODES["activations"] = ("dp=2", SUM + "blocks.*  compress(activations, int8)")


def trained(make: Any, mesh: str, rows: str, device: str | None, more: dict[str, Any]) -> Any:
    """On a rank: losses, norms and parameters of some steps, and where the program computes."""
    model = make() if device is None else make().to(device)
    given = {"optimizer": sgd, **more}
    size = given.pop("count", WORDS), given.pop("many", 8), given.pop("tokens", 8)
    relax = given.pop("relax", "lossy")
    program = build(planned(model, rows, mesh, relax=relax), batch(0, *size), **given)
    losses, norms = [], []
    for step in range(STEPS):
        loss = program.train_step({k: v.to(device or "cpu") for k, v in batch(step, *size).items()})
        losses.append(float(loss))
        norms.append(program.grad_norm)
    where = str(program.assembly.ranks.device)
    return losses, norms, program.state_dict(), where, max(program.replica_errors().values())


@cache  # most features are compared with the same
def alone(
    make: Any, count: int = WORDS, optimizer: Any = sgd, many: int = 8, tokens: int = 8
) -> Any:
    """The same of the untouched model, on the CPU."""
    model, losses = make(), []
    made = optimizer(model.named_parameters())
    for step in range(STEPS):
        made.zero_grad()
        loss = model(**batch(step, count, many, tokens))["loss"]
        loss.backward()
        made.step()
        losses.append(float(loss))
    return losses, None, {n: p.detach() for n, p in model.named_parameters()}


def ranks_of(mesh: str) -> int:
    return math.prod(int(size.split("=")[1]) for size in mesh.split(")")[0].split(","))


def on_ranks(
    make: Any, mesh: str, rows: str, device: str | None, *, bind: bool = False, **more: Any
) -> Any:
    """What `trained` gives on each rank; `bind`: in a world that is bound to its devices, as a job
    that the project joins itself is."""
    backend = "simccl" if device else "cpu:gloo,sim:simccl"
    given = (make, mesh, rows, device, more)
    return spawn(trained, *given, ranks=ranks_of(mesh), backend=backend, bind=bind)


def check(found: Any, wanted: Any, tolerance: float = 1e-9) -> None:
    """Losses, norms and parameters on each rank; whatever is copied is equal."""
    losses, norms, parameters = wanted[:3]
    for rank, (mine, told, state, where, apart) in enumerate(found):
        assert where == f"sim:{rank}" and apart == 0.0
        assert mine == pytest.approx(losses, rel=tolerance)
        assert norms is None or told == pytest.approx(norms, rel=tolerance)
        for name, value in parameters.items():
            assert state[name].device.type == "cpu"
            torch.testing.assert_close(
                state[name], value, rtol=tolerance, atol=tolerance / 100, msg=name
            )


@pytest.mark.parametrize("feature", EXACT)
def test_as_the_model_alone(feature: str) -> None:
    """Slices, stages, sequences and what is kept elsewhere."""
    mesh, rows = EXACT[feature]
    check(on_ranks(sized(mesh), mesh, rows, "sim"), alone(sized(mesh)))


def test_stages_of_a_bound_world() -> None:
    """Messages of a stage with those before and after it do not wait for each other there."""
    rows, make = CUT + 'pipeline(order="GIS-H", micro=4, chunks=2)', partial(words, 0.0, 8)
    check(on_ranks(make, "pp=4", rows, "sim", bind=True), alone(make))


@pytest.mark.parametrize(
    "feature",
    [
        "experts",
        "experts with room for some",
        *(pytest.param(one, marks=pytest.mark.deep) for one in list(EXPERTS)[2:]),
    ],
)
def test_experts(feature: str) -> None:
    """Rows on their way to experts and home; how often the host waits to know how many."""
    mesh, rows, most = EXPERTS[feature]
    more = {"count": MIXED, "relax": "routing"}
    wanted = on_ranks(tiny, mesh, rows, None, **more)[0]
    check(on_ranks(tiny, mesh, rows, "sim", **more), wanted)
    for found in spawn(expert_waits, mesh, rows, ranks=ranks_of(mesh)):
        # what experts ask for by themselves is theirs
        assert sum("expert_models.py" not in one for one in found) == most, found


def expert_waits(mesh: str, rows: str) -> list[str]:
    """On a rank: where the host waits in a step whose loss nobody reads."""
    plan = planned(tiny().to("sim"), rows, mesh, relax="routing")
    program = build(plan, batch(0, MIXED), optimizer=sgd, clip=0.1)
    given = [{k: v.to("sim") for k, v in batch(s, MIXED).items()} for s in range(3)]
    for one in given[:2]:
        program.train_step(one)
    seen = current()
    seen.reset()
    program.train_step(given[2])
    return [str(one) for one in seen.synchronisations()]


@pytest.mark.parametrize("code", CODES)
def test_compressed_sums(code: str) -> None:
    """As on ranks of the CPU: the same is left out, and added later.

    Of activations, numbers are drawn by their place among what a call saves, and attention saves
    other tensors on another device: there codes differ, and their errors are as large.
    """
    mesh, rows = CODES[code]
    found, wanted = on_ranks(two, mesh, rows, "sim"), on_ranks(two, mesh, rows, None)[0]
    if code != "activations":
        check(found, wanted, 1e-7)
        return
    for rank, (losses, _, parameters, where, apart) in enumerate(found):
        assert where == f"sim:{rank}" and apart == 0.0
        assert losses == pytest.approx(wanted[0], rel=1e-4)
        for name, value in wanted[2].items():
            assert (parameters[name] - value).norm() <= 2e-2 * value.norm(), name


def test_weights_of_before() -> None:
    """An order whose microbatches compute with older weights: as on ranks of the CPU."""
    rows = CUT + 'pipeline(order="PipeDream-2BW", micro=4)'
    given = {"relax": "staleness", "optimizer": partial(torch_sgd, lr=1e-3)}
    wanted = on_ranks(words, "pp=2", rows, None, **given)[0]
    check(on_ranks(words, "pp=2", rows, "sim", **given), wanted)


def test_whole_matrices() -> None:
    """An optimizer that looks at whole matrices, of which each rank holds a part."""
    rows = ("dp=2", "zero(stage=3, over=dp)")
    check(on_ranks(two, *rows, "sim", optimizer=muon), alone(two, optimizer=muon), 1e-6)


@pytest.mark.parametrize("word", ["bf16", "fp16", "bf16, params=true", "fp16, params=true"])
def test_fewer_bits(word: str) -> None:
    """Casts, with a loss that is scaled where they are to float16."""
    rows = ("dp=2", f"cast({word})\n{SUM}")
    wanted = on_ranks(single, *rows, None, relax="dtype")[0]
    check(on_ranks(single, *rows, "sim", relax="dtype"), wanted, 1e-2)


DROPPED = {
    "replicas": ("dp=2", SUM),
    "checkpoint": ("dp=2", SUM + "blocks.*  checkpoint()"),
    "tensor": ("tp=2", "blocks.*.up  shard(col, over=tp)\nblocks.*.down  shard(row, over=tp)"),
    "drawn again in stages": ("pp=2", CUT + 'pipeline(order="Varuna", micro=4)'),
    "context": ("cp=2", RING.format("ring", "cp", "cp")),
}


@pytest.mark.parametrize("feature", DROPPED)
def test_dropped(feature: str) -> None:
    """Native dropout: steps are finite, others than without, and copies stay equal."""
    mesh, rows = DROPPED[feature]
    found = on_ranks(dropping, mesh, rows, "sim")
    without = alone(words)[0]
    for losses, _, _, where, apart in found:
        assert where.startswith("sim") and apart == 0.0
        assert all(map(math.isfinite, losses)) and losses == found[0][0]
        assert losses[0] != pytest.approx(without[0], rel=1e-6)
        assert losses == pytest.approx(without, rel=0.3)


STATE = {
    "slices": ("dp=2", "zero(stage=3, over=dp)"),
    "stages": ("pp=2", PIPE),
    "tensor": ("tp=2", "blocks.*.up  shard(col, over=tp)\nblocks.*.down  shard(row, over=tp)"),
    "on disk": (
        "dp=2",
        SUM + "blocks.*  offload(parameters, to=disk)\noffload(optimizer, to=disk)",
    ),
    "context": ("cp=2", RING.format("ring", "cp", "cp")),
}


def kept(mesh: str, rows: str, folder: str) -> Any:
    """On a rank: outputs, and what a program that was loaded makes of another step."""
    given = [{k: v.to("sim") for k, v in batch(step).items()} for step in range(STEPS + 1)]

    def built() -> Any:
        return build(planned(sized(mesh)().to("sim"), rows, mesh), batch(0), optimizer=sgd)

    program = built()
    for step in range(STEPS):
        program.train_step(given[step])
    program.save(folder)
    program.export(f"{folder}/export", sized(mesh)())
    output = program.eval_step(given[0])
    ahead = float(program.train_step(given[STEPS]))
    other = built()
    other.load(folder)
    again = float(other.train_step(given[STEPS]))
    third = built()
    third.load_state_dict(program.state_dict())
    told = float(third.eval_step(given[0])["loss"]), float(program.eval_step(given[0])["loss"])
    inner = program.optimizer_state()
    gradients = program.gradients()
    assert all(v.device.type == "cpu" for v in gradients.values())
    return output["logits"].cpu(), ahead, again, told, sorted(inner), world.rank()


@pytest.mark.parametrize("layout", STATE)
def test_kept_and_taken_up(layout: str, tmp_path: Path) -> None:
    """Outputs are those of the model; a checkpoint and weights on disk go on as before."""
    make = sized(STATE[layout][0])
    model = make()
    model.load_state_dict(alone(make)[2])
    wanted = model(**batch(0))["logits"].detach()
    after = float(model(**batch(STEPS))["loss"])
    for logits, ahead, again, told, inner, _ in spawn(kept, *STATE[layout], str(tmp_path / "k")):
        torch.testing.assert_close(logits, wanted, rtol=1e-8, atol=1e-10)
        assert ahead == pytest.approx(after, rel=1e-9) and again == pytest.approx(after, rel=1e-9)
        assert told[0] == pytest.approx(told[1], rel=1e-9)
        assert inner == sorted(n for n, _ in model.named_parameters())
    from safetensors.torch import load_file

    whole = {}
    for file in (tmp_path / "k" / "export").glob("*.safetensors"):
        whole.update(load_file(file))
    for name, value in model.named_parameters():
        torch.testing.assert_close(whole[name], value.detach(), rtol=1e-9, atol=1e-11)


# features in whose steps the host waits for nothing, wherever labels lie
QUIET = (
    "ulysses",
    "zigzag",
    "a ring around ulysses",
    "zero 2",
    "checkpoint",
    "parked on the host",
    "parked on a peer",
    "optimizer on a peer",
    "Varuna",
    "Chimera",
    "sequence slices",
    "vocabulary",  # numbers outside of the table are found on the device
)


def waits(rows: str, mesh: str, there: bool) -> int:
    """On a rank: how often the host waits in a step whose loss nobody reads."""
    relax = "updates" if "freeze" in rows else "lossy"
    plan = planned(sized(mesh)().to("sim"), rows, mesh, relax=relax)
    program = build(plan, batch(0), optimizer=sgd, clip=0.1)
    given = [{k: v.to("sim" if there else "cpu") for k, v in batch(s).items()} for s in range(3)]
    for one in given[:2]:
        program.train_step(one)
    seen = current()
    seen.reset()
    program.train_step(given[2])
    return len(seen.synchronisations())


@pytest.mark.parametrize(
    "feature",
    [
        *QUIET,
        "int8",
        "activations",
        "some frozen",
        *(
            pytest.param(one, marks=pytest.mark.deep)
            for one in ("zero 1", "ring", "GPipe", "DualPipe", "powersgd")
        ),
    ],
)
def test_nothing_waits(feature: str) -> None:
    """Labels of the device are counted there, of parts and of slices of sequences alike; what is
    coded is judged in the first step."""
    frozen = "dp=2", "blocks[0]  freeze()\nzero(stage=2, over=dp)"
    mesh, rows = {**EXACT, **CODES, "some frozen": frozen}[feature]
    ranks = ranks_of(mesh)
    for there in (True, False):
        assert max(spawn(waits, rows, mesh, there, ranks=ranks)) == 0


class Uncertain(Words):
    """Weighs its loss by what it learns."""

    def __init__(self) -> None:
        super().__init__(depth=2)
        self.sure = nn.Parameter(torch.tensor(0.3))

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found = super().forward(ids, labels)
        return {"loss": found["loss"] * self.sure, "logits": found["logits"]}


def uncertain() -> nn.Module:
    torch.manual_seed(0)
    return Uncertain().double()


def unlabelled(seed: int, barest: int = 4) -> dict[str, Tensor]:
    """Batches whose last rows have no label at all; in slices of sequences, whole ends."""
    found = batch(seed)
    found["labels"][8 - barest :] = -100
    found["labels"][:, 4:] = -100 if seed % 2 else found["labels"][:, 4:]
    return found


def parts_without_labels(mesh: str, rows: str, local: bool) -> Any:
    """On a rank: losses and parameters of steps some of whose parts have no label, and waits."""
    given = [{k: v.to("sim") for k, v in unlabelled(step).items()} for step in range(STEPS)]
    program = build(planned(uncertain().to("sim"), rows, mesh), given[0], optimizer=sgd)
    if local:
        half = 8 // program.dp_size
        own = slice(program.dp_rank * half, (program.dp_rank + 1) * half)
        given = [{k: v[own] for k, v in one.items()} for one in given]
    seen, losses = current(), []
    for one in given:
        seen.reset()
        losses.append(program.train_step(one, local=local))
        waits = len(seen.synchronisations())
    return [float(loss) for loss in losses], program.state_dict(), waits


@pytest.mark.parametrize(
    "mesh, rows, local",
    [
        ("dp=2", SUM, False),
        ("dp=2", SUM, True),
        ("pp=2", PIPE, False),
        ("pp=2", CUT + 'pipeline(order="Seq1F1B", micro=2, slices=2)', False),
    ],
)
def test_parts_without_labels(mesh: str, rows: str, local: bool) -> None:
    """Parts that weigh nothing are known to the device alone, and give no gradient that is no
    number, also where what is computed from their loss would have one."""
    model, losses = uncertain(), []
    made = sgd(model.named_parameters())
    for step in range(STEPS):
        made.zero_grad()
        loss = model(**unlabelled(step))["loss"]
        loss.backward()
        made.step()
        losses.append(float(loss.detach()))
    for mine, state, waits in spawn(parts_without_labels, mesh, rows, local):
        assert mine == pytest.approx(losses, rel=1e-9) and waits == 0
        for name, value in model.named_parameters():
            torch.testing.assert_close(state[name], value.detach(), rtol=1e-9, atol=1e-11)


def test_a_batch_without_labels() -> None:
    """Then the loss is the model's own of nothing."""
    for mine, _, waits in spawn(nothing_at_all):
        assert math.isnan(mine) and waits == 0


def nothing_at_all() -> Any:
    """On a rank: the loss of a batch of which no label counts."""
    program = build(planned(two().to("sim"), SUM, "dp=2"), batch(0), optimizer=sgd)
    for _ in range(2):
        program.train_step({k: v.to("sim") for k, v in batch(0).items()})
    given = {k: v.to("sim") for k, v in unlabelled(0, barest=8).items()}
    seen = current()
    seen.reset()
    loss = program.train_step(given)
    waits = len(seen.synchronisations())
    return float(loss.detach()), None, waits
