"""torch.compile(fullgraph=True) of a built stage: one graph, and the same training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FSDPModule

from schedlang.passes.lower.build import build
from schedlang.runtime.launch.pool import Pool
from tests import models
from tests.proofs import make_plan

SPLIT = {
    "gpt2": """transformer.h.*.attn.c_attn shard(col, blocks=3, over=tp)
transformer.h.*.attn.c_proj shard(row, over=tp)
transformer.h.*.mlp.c_fc shard(col, over=tp)
transformer.h.*.mlp.c_proj shard(row, over=tp)
""",
    "llama": """model.layers.*.self_attn.{q,k,v}_proj shard(col, over=tp)
model.layers.*.self_attn.o_proj shard(row, over=tp)
model.layers.*.mlp.{gate,up}_proj shard(col, over=tp)
model.layers.*.mlp.down_proj shard(row, over=tp)
""",
}
BLOCKS = {"gpt2": "transformer.h", "llama": "model.layers"}
STAGES = '[1] pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)'


def build_model(kind: str, dtype: torch.dtype, dropout: float = 0.0, blocks: int = 2) -> Any:
    """Return a model of transformers with a named loss and no cache: both would log while
    traced."""
    model: Any = models.gpt2(blocks, dropout) if kind == "gpt2" else models.llama(blocks)
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = dropout
    model.config.use_cache = False
    model.loss_type = "ForCausalLM"
    return model.to(dtype)


def schedule_text(kind: str, parts: tuple[str, ...]) -> str:
    """Return the rows of some techniques, in the order of a file."""
    rows = {
        "cast": "cast(bf16)",
        "whole cast": "cast(bf16, params=true)",
        "tp": SPLIT[kind],
        "checkpoint": f"{BLOCKS[kind]}.* checkpoint()",
        "saving": f"{BLOCKS[kind]}.* checkpoint(save=[linear])",
        "replicas": "zero(stage=0, over=dp)",
        "zero": "zero(stage=3, over=dp)",
        "stages": BLOCKS[kind] + STAGES,
    }
    return "\n".join(row for name, row in rows.items() if name in parts)


def _train_both(kind: str, parts: tuple[str, ...], backend: str) -> tuple[list[float], list[Any]]:
    """Train two steps eagerly and two compiled; return losses and parameters, and counts of
    graphs."""
    torch._dynamo.reset()
    counters.clear()
    low_precision = bool({"cast", "whole cast"} & set(parts))
    # two blocks where each is a graph: equal ones share it
    blocks = 2 if {"zero", "stages"} & set(parts) else 1
    axes = {"zero": "dp", "replicas": "dp", "tp": "tp", "stages": "pp"}
    mesh = ", ".join(f"{axis}=2" for part, axis in axes.items() if part in parts)
    batch: dict[str, Any] = {**models.tokens(rows=4), "use_cache": False}
    results: list[Any] = []
    for compiles in (False, True):
        dropout = 0.1 if "dropout" in parts else 0.0
        model = build_model(
            kind, torch.float32 if low_precision else torch.float64, dropout, blocks
        )
        plan = make_plan(
            model, schedule_text(kind, parts), mesh, *(("dtype",) if low_precision else ())
        )
        program = build(plan, batch, optimizer=_sgd)
        for stage in _compiled_units(program.assembly.module, kind, parts) if compiles else ():
            stage.compile(fullgraph=True, backend=backend)
        torch.manual_seed(7)
        losses = [program.train_step(batch).item() for _ in range(2)]
        results.append((losses, program.state_dict()))
    return results, [counters["stats"]["unique_graphs"], dict(counters["graph_break"])]


def _compiled_units(module: nn.Module, kind: str, parts: tuple[str, ...]) -> list[nn.Module]:
    """Return the modules to compile: the stage, its blocks in a pipeline, or its FSDP units."""
    if "stages" in parts:
        return list(module.get_submodule(BLOCKS[kind]))  # type: ignore[call-overload]
    units = [
        unit for unit in module.modules() if isinstance(unit, FSDPModule) and unit is not module
    ]
    return units or [module]


def _sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.1)


DEEP = [
    ("tp",),
    ("zero",),
    ("checkpoint",),
    ("cast",),
    ("tp", "checkpoint"),
    ("tp", "saving"),
    ("checkpoint", "whole cast"),
]
CASES = {  # with this model in the ordinary tests, with the other in deep ones
    ("tp", "checkpoint", "cast"): "llama",
    ("zero", "tp", "checkpoint", "cast"): "gpt2",
    ("stages",): "llama",
    ("replicas", "checkpoint", "dropout"): "gpt2",
}


def _cases(kind: str) -> list[Any]:
    ordinary = [parts for parts, model_kind in CASES.items() if model_kind == kind]
    rest = [parts for parts in (*CASES, *DEEP) if parts not in ordinary]
    return [
        *(pytest.param(kind, parts) for parts in ordinary),
        *(pytest.param(kind, parts, marks=pytest.mark.deep) for parts in rest),
    ]


@pytest.mark.parametrize(
    "kind, parts",
    [*_cases("gpt2"), *_cases("llama")],
    ids=lambda one: one if isinstance(one, str) else " ".join(one),
)
def test_a_stage_is_one_graph(pool: Pool, kind: str, parts: tuple[str, ...]) -> None:
    """With each technique a stage compiles as one graph and trains the same; equal blocks share a
    graph, before torch 2.13 unless each communicates under its own name."""
    shared = torch.__version__ >= "2.13" or not {"zero", "tp"} <= {*parts}
    world = 2 ** len({"zero", "tp", "stages", "replicas"} & set(parts))
    for (eager, compiled), (graphs, breaks) in pool.run(
        _train_both, world, kind, parts, "aot_eager"
    ):
        assert graphs == (1 if shared else 2) and not breaks
        assert_same_training(
            eager, compiled, 1e-6 if {"cast", "whole cast"} & set(parts) else 1e-12
        )


def assert_same_training(
    eager: tuple[list[float], Mapping[str, Tensor]],
    compiled: tuple[list[float], Mapping[str, Tensor]],
    rtol: float,
) -> None:
    """Assert equal losses and parameters, and that they changed."""
    assert eager[0] == pytest.approx(compiled[0], rel=rtol) and eager[0][0] != eager[0][1]
    assert list(eager[1]) == list(compiled[1])
    for name, value in eager[1].items():
        assert (value - compiled[1][name]).norm() <= rtol * value.norm() + 1e-12, name


@pytest.mark.deep
def test_inductor_computes_the_same(pool: Pool) -> None:
    """With tensor parallelism and recomputation, compiled by inductor."""
    for (eager, compiled), _ in pool.run(_train_both, 2, "gpt2", ("tp", "checkpoint"), "inductor"):
        assert_same_training(eager, compiled, 1e-9)


class _Block(nn.Module):
    """A feed-forward layer with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def _two_blocks() -> nn.Module:
    """Return a model with one block on each of two stages."""
    return models.Stack(_Block() for _ in range(2)).double()


LENGTHS = (3, 5)
HALVES = """blocks.* fuse()
blocks pipeline_split(over=pp)
blocks[1] split_backward()"""


def _batch_of(length: int) -> dict[str, Tensor]:
    return {"x": torch.linspace(-1, 1, 4 * length * 8, dtype=torch.float64).view(4, length, 8)}


def _split_gradients() -> list[dict[str, Tensor]]:
    """Return the gradients of one step for each length, with split backwards."""
    program = build(make_plan(_two_blocks(), HALVES, "pp=2"), _batch_of(4))
    gradients = []
    for length in LENGTHS:
        program.train_step(_batch_of(length))
        gradients.append(program.gradients())
    return gradients


def test_fused_blocks_in_halves(pool: Pool) -> None:
    """The second half of a backward finds what it needs of a compiled block, for another length
    too."""
    for by_length in pool.run(_split_gradients, 2):
        for length, gradients in zip(LENGTHS, by_length, strict=True):
            model = _two_blocks()
            model(**_batch_of(length)).backward()
            for name, parameter in model.named_parameters():
                assert torch.allclose(gradients[name], parameter.grad, rtol=1e-9, atol=1e-12), name
