"""Evaluation of torch's encoder layers, whose fused operator calls none of their children."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schedlang.ir.plan import Plan
from schedlang.passes.analyze.prepare import Prepared
from schedlang.passes.lower.build import build
from tests.engine import Threads
from tests.proofs import Batch, make_plan, prepare_plan, sgd

PAIR = "linear1  shard(col, over=tp)\n{at}.linear2  shard(row, over=tp)"


def _layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, dtype=torch.float64)


class Encoder(nn.Module):
    """Encoder layers in a list, or as torch stacks them, with padding on the right."""

    def __init__(self, stacked: bool) -> None:
        super().__init__()
        layers = [_layer(), _layer()]
        self.stacked = stacked
        if stacked:
            norm = nn.LayerNorm(8, dtype=torch.float64)
            nn.init.ones_(norm.bias)
            self.trunk: Any = nn.TransformerEncoder(layers[0], 2, norm)
        else:
            self.trunk = nn.ModuleDict({"layers": nn.ModuleList(layers)})

    def forward(self, x: Tensor, gone: Tensor | None = None) -> dict[str, Tensor]:
        if self.stacked:
            x = self.trunk(x, src_key_padding_mask=gone)
        else:
            for layer in self.trunk["layers"]:
                x = layer(x)
        return {"loss": x.square().mean(), "out": x}


def _evaluated(plan: Plan, batch: Batch, prepared: Prepared) -> dict[str, Tensor]:
    """On a rank: outputs after a step, by the program and by its module, and its parameters."""
    program = build(plan, batch, prepared=prepared, optimizer=sgd)
    program.train_step(batch)
    found = {"out": program.eval_step(batch)["out"], **program.state_dict()}
    if plan.stores or "pp" in plan.mesh.names:  # `program.module` is refused
        return found
    program.module.eval()
    with torch.no_grad():
        return found | {"plain": program.module(**batch)["out"]}


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(
    "rows, mesh",
    [
        (f"{{at}}.{PAIR}", "tp=2"),
        ("{at}.linear1  shard(col, output=R, over=tp)", "tp=2"),
        ("{at}.norm1  replace_kernel(layer_norm)", ""),
        ("{at}  offload(parameters)", ""),
        ("{at}  checkpoint()", ""),
        ("zero(stage=3, over=dp)", "dp=2"),
        ('{list}  pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)', "pp=2"),
    ],
)
def test_an_encoder_evaluates_as_the_original(
    threads: Threads, stacked: bool, rows: str, mesh: str
) -> None:
    """Under each row the trained program gives what the original with its parameters gives.

    Also in padding, where torch's encoder gives zeros.
    """
    torch.manual_seed(0)
    model = Encoder(stacked)
    batch: Batch = {"x": torch.randn(4, 8, 8, dtype=torch.float64)}
    if stacked:
        batch = {**batch, "gone": torch.arange(8) >= torch.tensor([8, 6, 7, 5])[:, None]}
    text = rows.format(at="trunk.layers.*", list="trunk.layers")
    plan, prepared = prepare_plan(make_plan(model, text, mesh), [batch])
    ranks = threads.run(_evaluated, plan.mesh.world, plan, batch, prepared)
    state = {name: value for name, value in ranks[0].items() if name not in ("out", "plain")}
    model.load_state_dict(state)
    with torch.no_grad():
        expected = model.eval()(**batch)["out"]
    for found in ranks:
        for name in {"out", "plain"} & found.keys():
            torch.testing.assert_close(found[name], expected, rtol=1e-9, atol=1e-9)
