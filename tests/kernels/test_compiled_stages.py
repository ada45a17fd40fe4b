"""torch.compile(fullgraph=True) of a built stage: one graph, and what it computes without."""

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
from tests.proofs import planned

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


def model_of(kind: str, dtype: torch.dtype, dropout: float = 0.0, blocks: int = 2) -> Any:
    """A model of transformers with a loss that it can name, and no cache: both log while traced."""
    model: Any = models.gpt2(blocks, dropout) if kind == "gpt2" else models.llama(blocks)
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = dropout
    model.config.use_cache = False
    model.loss_type = "ForCausalLM"
    return model.to(dtype)


def rows_of(kind: str, parts: tuple[str, ...]) -> str:
    """The rows of some techniques, in the order of a file."""
    found = {
        "cast": "cast(bf16)",
        "whole cast": "cast(bf16, params=true)",
        "tp": SPLIT[kind],
        "checkpoint": f"{BLOCKS[kind]}.* checkpoint()",
        "saving": f"{BLOCKS[kind]}.* checkpoint(save=[linear])",
        "replicas": "zero(stage=0, over=dp)",
        "zero": "zero(stage=3, over=dp)",
        "stages": BLOCKS[kind] + STAGES,
    }
    return "\n".join(row for name, row in found.items() if name in parts)


def _trained(kind: str, parts: tuple[str, ...], backend: str) -> tuple[list[float], list[Any]]:
    """Two steps eagerly and two compiled: losses and parameters; how many graphs were made."""
    torch._dynamo.reset()
    counters.clear()
    low = bool({"cast", "whole cast"} & set(parts))
    # two where each is a graph: equal ones share it
    blocks = 2 if {"zero", "stages"} & set(parts) else 1
    axes = {"zero": "dp", "replicas": "dp", "tp": "tp", "stages": "pp"}
    mesh = ", ".join(f"{axis}=2" for part, axis in axes.items() if part in parts)
    batch: dict[str, Any] = {**models.tokens(rows=4), "use_cache": False}
    found: list[Any] = []
    for compiles in (False, True):
        dropout = 0.1 if "dropout" in parts else 0.0
        model = model_of(kind, torch.float32 if low else torch.float64, dropout, blocks)
        plan = planned(model, rows_of(kind, parts), mesh, *(("dtype",) if low else ()))
        program = build(plan, batch, optimizer=_sgd)
        for stage in _graphs(program.assembly.module, kind, parts) if compiles else ():
            stage.compile(fullgraph=True, backend=backend)
        torch.manual_seed(7)
        losses = [program.train_step(batch).item() for _ in range(2)]
        found.append((losses, program.state_dict()))
    return found, [counters["stats"]["unique_graphs"], dict(counters["graph_break"])]


def _graphs(module: nn.Module, kind: str, parts: tuple[str, ...]) -> list[nn.Module]:
    """What may be one graph: the stage; where units of it gather their parameters, or are told
    apart, each of them."""
    if "stages" in parts:
        return list(module.get_submodule(BLOCKS[kind]))  # type: ignore[call-overload]
    units = [one for one in module.modules() if isinstance(one, FSDPModule) and one is not module]
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
CASES = {  # of these models in the ordinary tests; of the other in deep ones
    ("tp", "checkpoint", "cast"): "llama",
    ("zero", "tp", "checkpoint", "cast"): "gpt2",
    ("stages",): "llama",
    ("replicas", "checkpoint", "dropout"): "gpt2",
}


def _cases(kind: str) -> list[Any]:
    ordinary = [parts for parts, of in CASES.items() if of == kind]
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
    """Under each technique, and all of them, a stage compiles whole and trains as it does without;
    equal blocks share a graph, before torch 2.13 unless each sends under a name of its own."""
    shared = torch.__version__ >= "2.13" or not {"zero", "tp"} <= {*parts}
    world = 2 ** len({"zero", "tp", "stages", "replicas"} & set(parts))
    for (eager, compiled), (graphs, breaks) in pool.run(_trained, world, kind, parts, "aot_eager"):
        assert graphs == (1 if shared else 2) and not breaks
        same(eager, compiled, 1e-6 if {"cast", "whole cast"} & set(parts) else 1e-12)


def same(
    eager: tuple[list[float], Mapping[str, Tensor]],
    compiled: tuple[list[float], Mapping[str, Tensor]],
    rtol: float,
) -> None:
    """The same losses and parameters, which have changed on the way."""
    assert eager[0] == pytest.approx(compiled[0], rel=rtol) and eager[0][0] != eager[0][1]
    assert list(eager[1]) == list(compiled[1])
    for name, value in eager[1].items():
        assert (value - compiled[1][name]).norm() <= rtol * value.norm() + 1e-12, name


@pytest.mark.deep
def test_inductor_computes_the_same(pool: Pool) -> None:
    """Under tensor parallelism and recomputation, by the backend that users have."""
    for (eager, compiled), _ in pool.run(_trained, 2, "gpt2", ("tp", "checkpoint"), "inductor"):
        same(eager, compiled, 1e-9)


class _Block(nn.Module):
    """A feed-forward layer around which a residual goes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def _two() -> nn.Module:
    """One block on each of two stages."""
    return models.Stack(_Block() for _ in range(2)).double()


LENGTHS = (3, 5)
HALVES = """blocks.* fuse()
blocks pipeline_split(over=pp)
blocks[1] split_backward()"""


def _points(length: int) -> dict[str, Tensor]:
    return {"x": torch.linspace(-1, 1, 4 * length * 8, dtype=torch.float64).view(4, length, 8)}


def _in_halves() -> list[dict[str, Tensor]]:
    """The gradients of one step for each length, of stages whose backwards are run in halves."""
    program = build(planned(_two(), HALVES, "pp=2"), _points(4))
    found = []
    for length in LENGTHS:
        program.train_step(_points(length))
        found.append(program.gradients())
    return found


def test_fused_blocks_in_halves(pool: Pool) -> None:
    """What the first half of a backward needs of a compiled block is there for the second, also
    where a graph is compiled for another length."""
    for found in pool.run(_in_halves, 2):
        for length, gradients in zip(LENGTHS, found, strict=True):
            model = _two()
            model(**_points(length)).backward()
            for name, parameter in model.named_parameters():
                assert torch.allclose(gradients[name], parameter.grad, rtol=1e-9, atol=1e-12), name
