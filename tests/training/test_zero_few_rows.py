"""Parameters with fewer rows than ranks: `zero` slices them along another dim, if one divides."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from schedlang.ir.placement import slicing_dim
from schedlang.ir.plan import Plan
from schedlang.passes.analyze.prepare import prepare
from schedlang.passes.lower.build import build
from schedlang.passes.simulate.account import account
from schedlang.runtime.checkpointing import holdings
from schedlang.runtime.float64 import Float64
from schedlang.runtime.grad_reduction import zero
from schedlang.runtime.modes import enter_modes
from schedlang.runtime.program import Program
from schedlang.runtime.transfer.transfer import transfer
from tests import expert_models as models
from tests.engine import Threads
from tests.layouts import assert_equal, program_state
from tests.models import llama_like, tokens
from tests.proofs import (
    adamw,
    assert_near,
    assert_proven,
    assert_same,
    make_plan,
    static_holds,
    train_on_ranks,
    train_sequential,
)
from tests.storage_counter import count_step

BATCHES = [models.batch(0, rows=14), models.batch(1, rows=7)]
SPREAD = "layers.*.experts  expert_parallel(over=ep{})\n"
STAGES = 'layers  pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)\n'
DEEP = pytest.mark.deep


def two_experts(frozen: bool = False) -> nn.Module:
    """Return layers of two experts, in tensors of two rows; `frozen`: some of them."""
    model = models.tiny_model(2)
    for name in ("layers.0.experts.up", "layers.1.experts.down"):
        model.get_parameter(name).requires_grad_(not frozen)
    return model


def plan_of(rows: str, mesh: str, relax: str = "", frozen: bool = False) -> Plan:
    return make_plan(two_experts(frozen), rows, mesh, relax)


@pytest.mark.parametrize(
    ("shape", "ranks", "dim"),
    [
        ((8, 6144, 4096), 64, 1),
        ((8, 4100, 4096), 64, 2),
        ((8, 4100, 4100), 64, 0),  # no dim is divided evenly
        ((8, 64), 8, 0),  # a row for each rank
        ((10, 64), 8, 0),
        ((8,), 64, 0),
        ((0, 64), 64, 0),
        ((), 64, 0),
        ((1, 64), 1, 0),
    ],
)
def test_the_dim_is_the_first_that_ranks_divide(
    shape: tuple[int, ...], ranks: int, dim: int
) -> None:
    """Dim 0 where it has a row for each rank, and where no dim is divided evenly."""
    assert slicing_dim(shape, ranks) == dim


def local_slices(plan: Plan) -> dict[str, tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Return the dim of each slice, its shape in torch, and its shape by the holdings."""
    a = build(plan, BATCHES[0]).assembly
    values: dict[str, Any] = dict(a.parameters)
    return {
        name: (
            value.placements[0].dim,
            tuple(value.to_local().shape),
            a.holdings[name].local_shape(a.ranks.mesh, a.ranks.rank),
        )
        for name, value in values.items()
    }


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_rank_has_its_share(stage: int, threads: Threads) -> None:
    """Of weights [2, 20, 6] four ranks hold [2, 5, 6] each; [2, 6, 10] they do not divide."""
    for slices in threads.run(local_slices, 4, plan_of(f"zero(stage={stage}, over=dp)", "dp=4")):
        assert slices["layers.0.experts.up"][:2] == (1, (2, 5, 6))
        assert slices["layers.0.experts.up_bias"][:2] == (1, (2, 5))
        assert slices["layers.0.experts.down"][0] == 0
        assert all(shape == planned for _, shape, planned in slices.values())


SCHEDULES = {
    "stage 1": ("zero(stage=1, over=dp)", "dp=4"),
    "stage 2": ("zero(stage=2, over=dp)", "dp=3"),
    "stage 3": ("zero(stage=3, over=dp)", "dp=3"),
    "microbatches": ('zero(stage=2, over=dp)\npipeline(order="GPipe", micro=2)', "dp=3"),
    "kept gathered": ("zero(stage=3, over=dp, prefetch=1, reshard=false)", "dp=4"),
    "spread": (SPREAD.format("") + "zero(stage=3, over=(dp, ep))", "dp=2, ep=2"),
    "split inside": (
        SPREAD.format(", inner=tp") + "zero(stage=3, over=(dp, ep))",
        "dp=2, ep=2, tp=2",
    ),
    "replicas": ("zero(stage=3, over=a)\nzero(stage=0, over=b)\noverlap(gradients)", "a=3, b=2"),
    "stages, 1": (STAGES + "zero(stage=1, over=dp)", "dp=3, pp=2"),
    "stages, 3": (STAGES + "zero(stage=3, over=dp)", "dp=3, pp=2"),
    "recomputed": ("layers.*  checkpoint()\nzero(stage=3, over=dp)", "dp=4"),
    "on the host": ("layers.*  offload(parameters)\nzero(stage=3, over=dp)", "dp=3"),
    "on disk": ("layers.*  offload(parameters, to=disk)\nzero(stage=3, over=dp)", "dp=3"),
    "moments on the host": ("layers.*  offload(optimizer)\nzero(stage=1, over=dp)", "dp=4"),
    "gradients on the host": ("layers.*  offload(gradients)\nzero(stage=2, over=dp)", "dp=3"),
}
QUICK = ("stage 3", "spread")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=DEEP) for name in SCHEDULES]
)
def test_programs_equal_the_original(name: str, threads: Any) -> None:
    """Outputs, losses, gradients, three steps and a save agree; static proofs hold."""
    plan = plan_of(*SCHEDULES[name])
    assert_proven(threads, plan, BATCHES)
    static_holds(plan, BATCHES[0])


@DEEP
@pytest.mark.parametrize("stage", [2, 3])
def test_some_are_frozen(stage: int, threads: Any) -> None:
    """A unit gathers frozen weights with the trained ones, and reduces only these."""
    plan = plan_of(f"zero(stage={stage}, over=dp)", "dp=3", frozen=True)
    assert_proven(threads, plan, BATCHES)


@DEEP
@pytest.mark.parametrize(
    ("rows", "relax"),
    [
        ("cast(bf16)\n", "dtype"),
        ("cast(bf16, params=true)\n", "dtype"),
        ("layers.*  compress(activations, int8)\n", "lossy"),
    ],
)
def test_with_fewer_bits(rows: str, relax: str, threads: Any) -> None:
    """Casts, also with masters in slices, and rounded activations."""
    assert_proven(threads, plan_of(rows + "zero(stage=3, over=dp)", "dp=3", relax), BATCHES)


@pytest.mark.parametrize("how", ["int8", pytest.param("powersgd", marks=DEEP)])
def test_compressed_sums_of_slices(how: str, threads: Any) -> None:
    """Errors are those of a slice; a rank whose slice is empty loads a state that has some."""
    rows = "zero(stage=3, over=a)\nzero(stage=0, over=b)\ncompress(gradients, {}, over=b)"
    assert_proven(threads, plan_of(rows.format(how), "a=3, b=2", "lossy"), BATCHES)


class RowNorms(torch.optim.Optimizer):
    """Steps of equal length along each row of the first dim: it looks at full tensors."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                rows = parameter.grad.reshape(len(parameter), -1)
                step = rows / (rows.norm(dim=1, keepdim=True) + 1e-3)
                parameter.sub_(group["lr"] * step.view_as(parameter))


def row_norms(named: Any) -> torch.optim.Optimizer:
    return RowNorms([parameter for _, parameter in named])


def adafactor(named: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor([parameter for _, parameter in named], lr=0.01)


@pytest.mark.parametrize("optimizer", [row_norms, adafactor, pytest.param(adamw, marks=DEEP)])
def test_optimizers_with_clipping(optimizer: Any, threads: Threads) -> None:
    """The norm is that of all slices; an optimizer of full tensors gets them."""
    plan = plan_of("zero(stage=3, over=dp)", "dp=3")
    trained = train_on_ranks(threads, plan, BATCHES, optimizer, clip=0.5)
    assert_near(trained, train_sequential(two_experts(), BATCHES, optimizer, clip=0.5))


@pytest.mark.parametrize("stage", [3, *(pytest.param(s, marks=DEEP) for s in (1, 2))])
def test_stages_are_equal_to_the_bit(stage: int, threads: Threads) -> None:
    """Slicing along another dim changes no sum."""
    sliced, full = (
        train_on_ranks(threads, plan_of(f"zero(stage={n}, over=dp)", "dp=3"), BATCHES, adamw)
        for n in (stage, 0)
    )
    for step in range(len(BATCHES)):  # a norm is summed slice by slice
        del sliced[f"norm {step}"], full[f"norm {step}"]
    assert_same(sliced, full)


def mixtral() -> nn.Module:
    """Return a Mixtral of two experts, whose step needs no values."""
    sizes = {"num_hidden_layers": 2, "num_local_experts": 2, "experts_implementation": "batched_mm"}
    model: nn.Module = llama_like("MixtralForCausalLM", **sizes)
    return model


@pytest.mark.parametrize(
    ("rows", "mesh"),
    [
        ("zero(stage=3, over=dp)", "dp=4"),
        pytest.param("zero(stage=1, over=dp)", "dp=4", marks=DEEP),
        pytest.param(
            'zero(stage=2, over=dp)\npipeline(order="GPipe", micro=2)', "dp=4", marks=DEEP
        ),
        pytest.param("zero(stage=3, over=a)\nzero(stage=0, over=b)", "a=4, b=2", marks=DEEP),
        pytest.param(f"model.{STAGES}zero(stage=3, over=dp)", "dp=4, pp=2", marks=DEEP),
    ],
)
def test_bytes_are_those_of_real_storages(rows: str, mesh: str, threads: Threads) -> None:
    """Of each rank, also of one whose slice of some parameters is only padding."""
    plan, batch = make_plan(mixtral(), rows, mesh), tokens(rows=16, seed=0)
    counts = threads.run(count_step, plan.mesh.world, plan, batch)
    planned = account(plan, batch, memory=True)
    buffers = sum(buffer.nbytes for buffer in mixtral().buffers())
    assert planned.memory is not None and planned.classes is not None and len(planned.memory) > 1
    for memory, kind in zip(planned.memory, planned.classes, strict=True):
        counted = counts[memory.first]
        assert kind.parameters + buffers == memory.moments[0].most[0] == counted.parameters
        assert kind.optimizer == memory.moments[0].most[2] == counted.optimizer
        assert memory.peak == pytest.approx(counted.most, rel=0.01)


# -- states ----------------------------------------------------------------------------------------

LAYOUTS = {
    "one": ("", ""),
    "dim 0": ("zero(stage=3, over=dp)", "dp=2"),
    "dim 1": ("zero(stage=3, over=dp)", "dp=4"),
    "dim 2": ("zero(stage=1, over=dp)", "dp=3"),
    "stages": (STAGES + "zero(stage=1, over=dp)", "dp=3, pp=2"),
}


def save_state(plan: Plan, path: str) -> Any:
    """Train two steps and save; return what was saved, and the state after one more step."""
    with enter_modes(Float64()):
        program = build(plan, BATCHES[0], optimizer=adamw)
        for batch in BATCHES:
            program.train_step(batch)
        program.save(path)
        saved = program_state(program)
        program.train_step(BATCHES[0])
        return saved, program.state_dict()


def go_on(plan: Plan, path: str) -> Any:
    """Load into a trained program: return what was loaded, and the state after a step."""
    with enter_modes(Float64()):
        program = build(plan, BATCHES[0], optimizer=adamw)
        program.train_step(BATCHES[1])
        program.load(path)
        loaded = program_state(program)
        program.train_step(BATCHES[0])
        return loaded, program.state_dict()


def check_states(saved: Any, ranks: list[Any]) -> None:
    """Assert equal states to the bit, and the same next step but for rounding."""
    for loaded, after in ranks:
        for part in ("state", "moments", "step"):
            assert_equal(loaded[part], saved[0][part], part)
        assert_near(after, saved[1])


PAIRS = [
    pair if pair == ("dim 0", "dim 1") else pytest.param(*pair, marks=DEEP)
    for pair in product(LAYOUTS, LAYOUTS)
]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_saved_states_go_on_with_other_ranks(
    source: str, target: str, tmp_path: Path, threads: Threads
) -> None:
    """Two ranks to four and back, with slices along other dims, in stages, and without."""
    plans = [plan_of(*LAYOUTS[name]) for name in (source, target)]
    path = str(tmp_path / "state")
    saved = threads.run(save_state, plans[0].mesh.world, plans[0], path)[0]
    check_states(saved, threads.run(go_on, plans[1].mesh.world, plans[1], path))


@pytest.fixture
def first_dims_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The rule of earlier versions: slices along the first dim, whatever the shape."""
    for module in (holdings, zero):
        monkeypatch.setattr(module, "slicing_dim", lambda shape, ranks: 0)
    for cached in (holdings._segments, holdings._sharding, holdings._recent_assembly):
        cached.cache_clear()
    yield monkeypatch
    for cached in (holdings._segments, holdings._sharding, holdings._recent_assembly):
        cached.cache_clear()


def test_older_states_are_read(
    first_dims_only: pytest.MonkeyPatch, tmp_path: Path, threads: Threads
) -> None:
    """A state is saved in boxes of full tensors: it does not matter which ranks had them."""
    path, plan = str(tmp_path / "state"), plan_of(*LAYOUTS["dim 1"])
    old = [rank["layers.0.experts.up"] for rank in threads.run(local_slices, 4, plan)]
    assert [shape for _, shape, _ in old] == [(1, 20, 6)] * 2 + [(0, 20, 6)] * 2
    saved = threads.run(save_state, 4, plan, path)[0]
    first_dims_only.undo()
    for cached in (holdings._segments, holdings._sharding, holdings._recent_assembly):
        cached.cache_clear()
    check_states(saved, threads.run(go_on, 4, plan_of(*LAYOUTS["dim 1"]), path))


def transfer_state(source: Plan, target: Plan) -> Any:
    """Transfer a trained program's state; return both states, and bytes sent and needed."""

    def trained(plan: Plan) -> Program:
        program = build(plan, BATCHES[0], optimizer=adamw)
        program.train_step(BATCHES[0])
        return program

    a, b = trained(source), trained(target)
    a.train_step(BATCHES[1])
    stats = transfer(a, b, optimizer=True)
    return program_state(a), program_state(b), stats.bytes, stats.bound


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (("zero(stage=3, over=dp)", "dp=4"), ("zero(stage=1, over=a)", "a=2, b=2")),
        pytest.param(("zero(stage=1, over=(a, b))", "a=2, b=3"), LAYOUTS["stages"], marks=DEEP),
    ],
)
def test_transfers_with_moments(source: Any, target: Any, threads: Threads) -> None:
    """Every tensor arrives to the bit, in the fewest bytes, between slices along other dims."""
    if target[1] == "a=2, b=2":
        target = (f"{target[0]}\nzero(stage=0, over=b)", target[1])
    plans = plan_of(*source), plan_of(*target)
    for before, after, sent, bound in threads.run(transfer_state, plans[0].mesh.world, *plans):
        assert sent == bound
        for part in ("state", "moments"):
            assert_equal(after[part], before[part], part)


def export_weights(plan: Plan, folder: str) -> Any:
    """Train a step and export; return the full weights."""
    program = build(plan, BATCHES[0], optimizer=adamw)
    program.train_step(BATCHES[0])
    program.export(folder, two_experts())
    return program.state_dict()


def test_exported_weights_are_full(tmp_path: Path, threads: Threads) -> None:
    """safetensors of slices along several dims have the model's own tensors."""
    from safetensors.torch import load_file

    plan = plan_of(*LAYOUTS["dim 1"])
    state = threads.run(export_weights, 4, plan, str(tmp_path / "weights"))[0]
    read = load_file(tmp_path / "weights" / "model.safetensors")
    assert_same(read, {name: value for name, value in state.items() if name in read})
    assert read.keys() == state.keys()


def test_gathers_are_not_padded() -> None:
    """Gathered and reduced bytes of a layer are those of its parameters, not of a row for each
    rank."""
    plan = make_plan(models.tiny_model(4), "zero(stage=3, over=dp)", "dp=10")
    prepared = prepare(plan, models.batch(0, rows=1))
    experts = {n: h for n, h in prepared.holdings.items() if ".experts." in n}
    dims = {n.rpartition(".")[2]: slicing_dim(h.layout.shape, 10) for n, h in experts.items()}
    assert dims == {"up": 1, "up_bias": 1, "down": 2}
    collectives = account(plan, models.batch(0, rows=10)).collectives or ()
    sizes = {collective.fqn: collective.bytes for collective in collectives}
    layer: Any = models.tiny_model(4).get_submodule("layers.0")
    padded = 10 * (6 + 6 + 1)  # rows of the router and of the shared layer, and its bias
    trained = sum(p.numel() for p in layer.experts.parameters())
    assert sizes["layers.0"] == 8 * (trained + padded)
