"""Every feature on ranks with simulated devices: it trains as on a CPU, without races or hangs.

The world has no backend for the host, and batches are on the device. Exact features are compared
with the original model on one CPU; features that round or draw random numbers, with the same
program on CPU ranks.
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
from tests.expert_models import tiny_model
from tests.proofs import make_plan

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "it is there")

STEPS, VOCAB_SIZE, WIDTH = 3, 12, 16


class Attention(nn.Module):
    """Causal, of four heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (4, -1)).transpose(1, 2)
            for projection in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and an MLP, each after a norm, with dropout on their outputs."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.calm, self.attn = nn.LayerNorm(WIDTH), Attention()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down, self.drop = nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.calm(x)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class LanguageModel(nn.Module):
    """A language model."""

    def __init__(self, rate: float = 0.0, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB_SIZE, WIDTH)
        self.blocks = nn.ModuleList(Block(rate) for _ in range(depth))
        self.head = nn.Linear(WIDTH, VOCAB_SIZE)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def language_model(rate: float = 0.0, depth: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return LanguageModel(rate, depth).double()


def shallow_model() -> nn.Module:
    """Return the model at half its depth, for meshes without stages."""
    return language_model(depth=2)


def model_for(mesh: str) -> Any:
    """Return the function that builds a model as deep as a mesh needs."""
    return language_model if "pp" in mesh else shallow_model


def float32_model() -> nn.Module:
    return language_model().float()


def dropout_model() -> nn.Module:
    return language_model(0.2)


def batch(seed: int, count: int = VOCAB_SIZE, many: int = 8, tokens: int = 8) -> dict[str, Tensor]:
    """Return some rows, of which some end early."""
    draw = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(count, (many, tokens), generator=draw) for _ in range(2))
    labels[1, 5:] = labels[6, 2:] = -100
    return {"ids": ids, "labels": labels}


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)


def torch_sgd(named: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=lr)


def muon(named: Any) -> torch.optim.Optimizer:
    """Return an optimizer that needs complete matrices."""
    matrices = [p for n, p in named if p.dim() == 2]
    return torch.optim.Muon(matrices, lr=0.02)


STAGE_SPLIT = "blocks  pipeline_split(over=pp)\n"
PIPELINE = STAGE_SPLIT + 'pipeline(order="1F1B", micro=4)'
ZERO_0 = "zero(stage=0, over=dp)\n"
RING = "blocks.*.attn  context_parallel({}, over={})\nzero(stage=0, over={})"
# feature -> mesh, rows, relaxed
EXACT = {
    "zero 0": ("dp=2", ZERO_0),
    "zero 3": ("dp=2", "zero(stage=3, over=dp)"),
    "tensor": ("tp=2", "blocks.*.up  shard(col, over=tp)\nblocks.*.down  shard(row, over=tp)"),
    "zero 1": ("dp=2", "zero(stage=1, over=dp)"),
    "zero 2": ("dp=2", "zero(stage=2, over=dp)"),
    "checkpoint": ("dp=2", ZERO_0 + "blocks.*  checkpoint()"),
    "activations on the host": ("dp=2", ZERO_0 + "blocks.*  offload(activations)"),
    "activations on disk": ("dp=2", ZERO_0 + "blocks.*  offload(activations, to=disk)"),
    "parameters on the host": ("dp=2", ZERO_0 + "blocks.*  offload(parameters)"),
    "parameters on disk": (
        "dp=2",
        "zero(stage=3, over=dp)\nblocks.*  offload(parameters, to=disk)",
    ),
    "optimizer on disk": ("dp=2", "zero(stage=2, over=dp)\noffload(optimizer, to=disk)"),
    "parked on the host": ("pp=2", "blocks.*  offload(activations)\n" + PIPELINE),
    "parked on a peer": ("pp=2", "blocks.*  offload(activations, to=peer, over=pp)\n" + PIPELINE),
    "optimizer on a peer": ("pp=2", "blocks[0]  offload(optimizer, to=peer, over=pp)\n" + PIPELINE),
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
        order: ("pp=2", STAGE_SPLIT + f'pipeline(order="{order}", micro=4{more})')
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
        STAGE_SPLIT + 'zero(stage=2, over=dp)\npipeline(order="Varuna", micro=4)',
    ),
    "Chimera with sums": (
        "dp=2, pp=2",
        STAGE_SPLIT + 'zero(stage=1, over=dp)\npipeline(order="Chimera", micro=4)',
    ),
    "checkpoint in stages": ("pp=2", "blocks.*  checkpoint()\n" + PIPELINE),
    "sequence slices": ("pp=2", STAGE_SPLIT + 'pipeline(order="Seq1F1B", micro=2, slices=2)'),
    "vocabulary": ("tp=2", "embed  shard(vocab, over=tp)\nhead  shard(vocab, over=tp)"),
}
EXPERT_PARALLEL = "layers.*.experts  expert_parallel(over={})\n"
EP = EXPERT_PARALLEL.format("ep{}") + "zero(stage=0, over=ep)"
DP_TP_MESH = "dp=2, tp=2)\nview ep of (dp, tp"
# feature -> mesh, rows, waits of a step of two layers of experts
EXPERTS = {
    "experts": ("ep=2", EP.format(""), 2),
    "experts with room for some": ("ep=2", EP.format(", capacity=1.0"), 0),
    "room for some, sent": ("ep=2", EP.format(", capacity=1.0, dispatch=all_to_all"), 2),
    "room for some, fetched": ("ep=2", EP.format(", capacity=1.0, dispatch=fetch"), 0),
    "room for some where tokens are alike": (
        DP_TP_MESH,
        EXPERT_PARALLEL.format("ep, capacity=1.0") + "zero(stage=0, over=dp)",
        0,
    ),
    "experts over two axes": (
        "a=2, b=2)\nview ep of (a, b",
        EXPERT_PARALLEL.format("ep") + "zero(stage=0, over=(a, b))",
        2,
    ),
    "where tokens are alike": (
        DP_TP_MESH,
        EXPERT_PARALLEL.format("ep") + "zero(stage=0, over=dp)",
        2,
    ),
    "in chunks, of which some stay": ("ep=2", EP.format(", chunks=2, shadow=[0, 3]"), 2),
    "gathered": ("ep=2", EP.format(", dispatch=gather"), 2),
    "fetched": ("ep=2", EP.format(", dispatch=fetch"), 0),
    "experts that run again": ("ep=2", EP.format("") + "\nlayers.*  checkpoint()", 2),
    "experts made again in stages": (
        "ep=2, pp=2",
        EXPERT_PARALLEL.format("ep") + "layers  pipeline_split(over=pp)\n"
        'zero(stage=0, over=ep)\npipeline(order="Varuna", micro=2)',
        2,  # two microbatches of one
    ),
}
COMPRESSED = {
    name: ("dp=2", ZERO_0 + f"compress(gradients, {name}, over=dp)")
    for name in ("int8", "onebit", "powersgd")
}
COMPRESSED["activations"] = ("dp=2", ZERO_0 + "blocks.*  compress(activations, int8)")


def train(make: Any, mesh: str, rows: str, device: str | None, more: dict[str, Any]) -> Any:
    """Train on a rank; return losses, norms, parameters, device and differences between
    replicas."""
    model = make() if device is None else make().to(device)
    options = {"optimizer": sgd, **more}
    size = options.pop("count", VOCAB_SIZE), options.pop("many", 8), options.pop("tokens", 8)
    relax = options.pop("relax", "lossy")
    program = build(make_plan(model, rows, mesh, relax=relax), batch(0, *size), **options)
    losses, norms = [], []
    for step in range(STEPS):
        loss = program.train_step({k: v.to(device or "cpu") for k, v in batch(step, *size).items()})
        losses.append(float(loss))
        norms.append(program.grad_norm)
    computed_on = str(program.assembly.ranks.device)
    return losses, norms, program.state_dict(), computed_on, max(program.replica_errors().values())


@cache  # most features have the same reference
def single_process(
    make: Any, count: int = VOCAB_SIZE, optimizer: Any = sgd, many: int = 8, tokens: int = 8
) -> Any:
    """Return the same for the original model in one process on the CPU."""
    model, losses = make(), []
    opt = optimizer(model.named_parameters())
    for step in range(STEPS):
        opt.zero_grad()
        loss = model(**batch(step, count, many, tokens))["loss"]
        loss.backward()
        opt.step()
        losses.append(float(loss))
    return losses, None, {n: p.detach() for n, p in model.named_parameters()}


def ranks_of(mesh: str) -> int:
    return math.prod(int(size.split("=")[1]) for size in mesh.split(")")[0].split(","))


def train_on_ranks(
    make: Any, mesh: str, rows: str, device: str | None, *, bind: bool = False, **more: Any
) -> Any:
    """Return what `train` gives on each rank; `bind`: in a world bound to its devices, as a job
    that the project joins itself is."""
    backend = "simccl" if device else "cpu:gloo,sim:simccl"
    args = (make, mesh, rows, device, more)
    return spawn(train, *args, ranks=ranks_of(mesh), backend=backend, bind=bind)


def check_training(results: Any, expected: Any, tolerance: float = 1e-9) -> None:
    """Compare losses, norms and parameters on each rank; replicas must be equal."""
    losses, norms, parameters = expected[:3]
    for rank, (actual, actual_norms, state, computed_on, replica_error) in enumerate(results):
        assert computed_on == f"sim:{rank}" and replica_error == 0.0
        assert actual == pytest.approx(losses, rel=tolerance)
        assert norms is None or actual_norms == pytest.approx(norms, rel=tolerance)
        for name, value in parameters.items():
            assert state[name].device.type == "cpu"
            torch.testing.assert_close(
                state[name], value, rtol=tolerance, atol=tolerance / 100, msg=name
            )


@pytest.mark.parametrize("feature", EXACT)
def test_as_the_model_alone(feature: str) -> None:
    """Sharding, stages, context parallelism and offloading train as the original model."""
    mesh, rows = EXACT[feature]
    check_training(
        train_on_ranks(model_for(mesh), mesh, rows, "sim"), single_process(model_for(mesh))
    )


def test_stages_of_a_bound_world() -> None:
    """Messages of a stage to the stages before and after it do not block each other."""
    rows, make = (
        STAGE_SPLIT + 'pipeline(order="GIS-H", micro=4, chunks=2)',
        partial(language_model, 0.0, 8),
    )
    check_training(train_on_ranks(make, "pp=4", rows, "sim", bind=True), single_process(make))


@pytest.mark.parametrize(
    "feature",
    [
        "experts",
        "experts with room for some",
        *(pytest.param(one, marks=pytest.mark.deep) for one in list(EXPERTS)[2:]),
    ],
)
def test_experts(feature: str) -> None:
    """Tokens go to their experts and back; the host waits as often as their counts need."""
    mesh, rows, expected_waits = EXPERTS[feature]
    options = {"count": MIXED, "relax": "routing"}
    expected = train_on_ranks(tiny_model, mesh, rows, None, **options)[0]
    check_training(train_on_ranks(tiny_model, mesh, rows, "sim", **options), expected)
    for waits in spawn(expert_waits, mesh, rows, ranks=ranks_of(mesh)):
        # waits in the experts' own code do not count
        assert sum("expert_models.py" not in wait for wait in waits) == expected_waits, waits


def expert_waits(mesh: str, rows: str) -> list[str]:
    """Return on a rank where the host waits in a step whose loss is not read."""
    plan = make_plan(tiny_model().to("sim"), rows, mesh, relax="routing")
    program = build(plan, batch(0, MIXED), optimizer=sgd, clip=0.1)
    batches = [{k: v.to("sim") for k, v in batch(s, MIXED).items()} for s in range(3)]
    for item in batches[:2]:
        program.train_step(item)
    simulation = current()
    simulation.reset()
    program.train_step(batches[2])
    return [str(item) for item in simulation.synchronisations()]


@pytest.mark.parametrize("code", COMPRESSED)
def test_compressed_sums(code: str) -> None:
    """As on CPU ranks: the same error is left out, and added later.

    For activations, random numbers depend on the order of saved tensors, and attention saves other
    tensors on another device: there codes differ, and errors are as large.
    """
    mesh, rows = COMPRESSED[code]
    results, expected = (
        train_on_ranks(shallow_model, mesh, rows, "sim"),
        train_on_ranks(shallow_model, mesh, rows, None)[0],
    )
    if code != "activations":
        check_training(results, expected, 1e-7)
        return
    for rank, (losses, _, parameters, computed_on, replica_error) in enumerate(results):
        assert computed_on == f"sim:{rank}" and replica_error == 0.0
        assert losses == pytest.approx(expected[0], rel=1e-4)
        for name, value in expected[2].items():
            assert (parameters[name] - value).norm() <= 2e-2 * value.norm(), name


def test_weights_of_before() -> None:
    """An order whose microbatches use stale weights: as on CPU ranks."""
    rows = STAGE_SPLIT + 'pipeline(order="PipeDream-2BW", micro=4)'
    options = {"relax": "staleness", "optimizer": partial(torch_sgd, lr=1e-3)}
    expected = train_on_ranks(language_model, "pp=2", rows, None, **options)[0]
    check_training(train_on_ranks(language_model, "pp=2", rows, "sim", **options), expected)


def test_whole_matrices() -> None:
    """An optimizer that needs complete matrices, while each rank has a shard."""
    rows = ("dp=2", "zero(stage=3, over=dp)")
    check_training(
        train_on_ranks(shallow_model, *rows, "sim", optimizer=muon),
        single_process(shallow_model, optimizer=muon),
        1e-6,
    )


@pytest.mark.parametrize("word", ["bf16", "fp16", "bf16, params=true", "fp16, params=true"])
def test_fewer_bits(word: str) -> None:
    """Casts, with loss scaling where they are to float16."""
    rows = ("dp=2", f"cast({word})\n{ZERO_0}")
    expected = train_on_ranks(float32_model, *rows, None, relax="dtype")[0]
    check_training(train_on_ranks(float32_model, *rows, "sim", relax="dtype"), expected, 1e-2)


DROPOUT = {
    "replicas": ("dp=2", ZERO_0),
    "checkpoint": ("dp=2", ZERO_0 + "blocks.*  checkpoint()"),
    "tensor": ("tp=2", "blocks.*.up  shard(col, over=tp)\nblocks.*.down  shard(row, over=tp)"),
    "drawn again in stages": ("pp=2", STAGE_SPLIT + 'pipeline(order="Varuna", micro=4)'),
    "context": ("cp=2", RING.format("ring", "cp", "cp")),
}


@pytest.mark.parametrize("feature", DROPOUT)
def test_dropped(feature: str) -> None:
    """Native dropout: losses are finite, differ from those without, and replicas stay equal."""
    mesh, rows = DROPOUT[feature]
    results = train_on_ranks(dropout_model, mesh, rows, "sim")
    reference = single_process(language_model)[0]
    for losses, _, _, computed_on, replica_error in results:
        assert computed_on.startswith("sim") and replica_error == 0.0
        assert all(map(math.isfinite, losses)) and losses == results[0][0]
        assert losses[0] != pytest.approx(reference[0], rel=1e-6)
        assert losses == pytest.approx(reference, rel=0.3)


SAVED = {
    "slices": ("dp=2", "zero(stage=3, over=dp)"),
    "stages": ("pp=2", PIPELINE),
    "tensor": ("tp=2", "blocks.*.up  shard(col, over=tp)\nblocks.*.down  shard(row, over=tp)"),
    "on disk": (
        "dp=2",
        ZERO_0 + "blocks.*  offload(parameters, to=disk)\noffload(optimizer, to=disk)",
    ),
    "context": ("cp=2", RING.format("ring", "cp", "cp")),
}


def save_and_load(mesh: str, rows: str, folder: str) -> Any:
    """Return on a rank outputs, and losses of programs that were saved and loaded."""
    batches = [{k: v.to("sim") for k, v in batch(step).items()} for step in range(STEPS + 1)]

    def built() -> Any:
        return build(make_plan(model_for(mesh)().to("sim"), rows, mesh), batch(0), optimizer=sgd)

    program = built()
    for step in range(STEPS):
        program.train_step(batches[step])
    program.save(folder)
    program.export(f"{folder}/export", model_for(mesh)())
    output = program.eval_step(batches[0])
    next_loss = float(program.train_step(batches[STEPS]))
    loaded = built()
    loaded.load(folder)
    loaded_loss = float(loaded.train_step(batches[STEPS]))
    restored = built()
    restored.load_state_dict(program.state_dict())
    evaluated = (
        float(restored.eval_step(batches[0])["loss"]),
        float(program.eval_step(batches[0])["loss"]),
    )
    state_names = program.optimizer_state()
    gradients = program.gradients()
    assert all(v.device.type == "cpu" for v in gradients.values())
    return (
        output["logits"].cpu(),
        next_loss,
        loaded_loss,
        evaluated,
        sorted(state_names),
        world.rank(),
    )


@pytest.mark.parametrize("layout", SAVED)
def test_kept_and_taken_up(layout: str, tmp_path: Path) -> None:
    """Outputs are the model's; training goes on from a checkpoint as before."""
    make = model_for(SAVED[layout][0])
    model = make()
    model.load_state_dict(single_process(make)[2])
    expected = model(**batch(0))["logits"].detach()
    expected_loss = float(model(**batch(STEPS))["loss"])
    for logits, next_loss, loaded_loss, evaluated, state_names, _ in spawn(
        save_and_load, *SAVED[layout], str(tmp_path / "k")
    ):
        torch.testing.assert_close(logits, expected, rtol=1e-8, atol=1e-10)
        assert next_loss == pytest.approx(expected_loss, rel=1e-9) and loaded_loss == pytest.approx(
            expected_loss, rel=1e-9
        )
        assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-9)
        assert state_names == sorted(n for n, _ in model.named_parameters())
    from safetensors.torch import load_file

    exported = {}
    for file in (tmp_path / "k" / "export").glob("*.safetensors"):
        exported.update(load_file(file))
    for name, value in model.named_parameters():
        torch.testing.assert_close(exported[name], value.detach(), rtol=1e-9, atol=1e-11)


# features in whose steps the host waits for nothing, wherever labels lie
WITHOUT_WAITS = (
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


def count_waits(rows: str, mesh: str, on_device: bool) -> int:
    """Return on a rank how often the host waits in a step whose loss is not read."""
    relax = "updates" if "freeze" in rows else "lossy"
    plan = make_plan(model_for(mesh)().to("sim"), rows, mesh, relax=relax)
    program = build(plan, batch(0), optimizer=sgd, clip=0.1)
    batches = [
        {k: v.to("sim" if on_device else "cpu") for k, v in batch(s).items()} for s in range(3)
    ]
    for item in batches[:2]:
        program.train_step(item)
    simulation = current()
    simulation.reset()
    program.train_step(batches[2])
    return len(simulation.synchronisations())


@pytest.mark.parametrize(
    "feature",
    [
        *WITHOUT_WAITS,
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
    """Labels are counted on the device, for microbatches and sequence slices too; compressed
    tensors are checked in the first step only."""
    frozen = "dp=2", "blocks[0]  freeze()\nzero(stage=2, over=dp)"
    mesh, rows = {**EXACT, **COMPRESSED, "some frozen": frozen}[feature]
    ranks = ranks_of(mesh)
    for on_device in (True, False):
        assert max(spawn(count_waits, rows, mesh, on_device, ranks=ranks)) == 0


class WeightedLoss(LanguageModel):
    """Multiplies its loss by a learned parameter."""

    def __init__(self) -> None:
        super().__init__(depth=2)
        self.sure = nn.Parameter(torch.tensor(0.3))

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        outputs = super().forward(ids, labels)
        return {"loss": outputs["loss"] * self.sure, "logits": outputs["logits"]}


def weighted_loss_model() -> nn.Module:
    torch.manual_seed(0)
    return WeightedLoss().double()


def unlabelled_batch(seed: int, barest: int = 4) -> dict[str, Tensor]:
    """Return batches whose last rows have no labels; on odd seeds the ends of sequences too."""
    result = batch(seed)
    result["labels"][8 - barest :] = -100
    result["labels"][:, 4:] = -100 if seed % 2 else result["labels"][:, 4:]
    return result


def parts_without_labels(mesh: str, rows: str, local: bool) -> Any:
    """Return on a rank losses, parameters and waits of steps where some parts have no label."""
    batches = [{k: v.to("sim") for k, v in unlabelled_batch(step).items()} for step in range(STEPS)]
    program = build(
        make_plan(weighted_loss_model().to("sim"), rows, mesh), batches[0], optimizer=sgd
    )
    if local:
        half = 8 // program.dp_size
        local_rows = slice(program.dp_rank * half, (program.dp_rank + 1) * half)
        batches = [{k: v[local_rows] for k, v in inputs.items()} for inputs in batches]
    simulation, losses = current(), []
    for inputs in batches:
        simulation.reset()
        losses.append(program.train_step(inputs, local=local))
        count = len(simulation.synchronisations())
    return [float(loss) for loss in losses], program.state_dict(), count


@pytest.mark.parametrize(
    "mesh, rows, local",
    [
        ("dp=2", ZERO_0, False),
        ("dp=2", ZERO_0, True),
        ("pp=2", PIPELINE, False),
        ("pp=2", STAGE_SPLIT + 'pipeline(order="Seq1F1B", micro=2, slices=2)', False),
    ],
)
def test_parts_without_labels(mesh: str, rows: str, local: bool) -> None:
    """Only the device knows which parts have no labels; they give no NaN gradient, even where
    something computed from their loss would."""
    model, losses = weighted_loss_model(), []
    optimizer = sgd(model.named_parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(**unlabelled_batch(step))["loss"]
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    for actual, state, count in spawn(parts_without_labels, mesh, rows, local):
        assert actual == pytest.approx(losses, rel=1e-9) and count == 0
        for name, value in model.named_parameters():
            torch.testing.assert_close(state[name], value.detach(), rtol=1e-9, atol=1e-11)


def test_a_batch_without_labels() -> None:
    """The loss is then the model's own, NaN."""
    for actual, _, count in spawn(no_labels):
        assert math.isnan(actual) and count == 0


def no_labels() -> Any:
    """Return on a rank the loss of a batch in which no label counts."""
    program = build(make_plan(shallow_model().to("sim"), ZERO_0, "dp=2"), batch(0), optimizer=sgd)
    for _ in range(2):
        program.train_step({k: v.to("sim") for k, v in batch(0).items()})
    inputs = {k: v.to("sim") for k, v in unlabelled_batch(0, barest=8).items()}
    simulation = current()
    simulation.reset()
    loss = program.train_step(inputs)
    count = len(simulation.synchronisations())
    return float(loss.detach()), None, count
