"""The language at scale: python -m tests.benchmarks.scale

Prints CPU time and memory of: `check` as a command, with startup; reading a file of 2,000 rows;
expanding up to 1,000,000 actions, by ten rows for all layers and by ten rows for each hundred;
planning the same schedule for 8 and for 16,384 ranks.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from schedlang.diagnostics.source import Source
from schedlang.ir.model import ModelFacts
from schedlang.language.syntax import parse
from schedlang.passes.elaborate.expand import expand

HEAD = "schedule 1\n\nmesh(dp=2, tp=2)\n\n"
EXAMPLE = "examples/llama/3d.sched"


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    """Return CPU seconds of a call, and its result."""
    start = time.process_time()
    result = action()
    return time.process_time() - start, result


def command(*arguments: str) -> float:
    """Return CPU seconds of a schedlang command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "schedlang", *arguments], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


class Layer(nn.Module):
    """The modules of a transformer layer that rows refer to."""

    def __init__(self) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=False, device="meta")
        self.norm1, self.norm2 = (nn.RMSNorm(64, device="meta") for _ in range(2))
        self.q, self.k, self.v, self.o = (linear(64, 64) for _ in range(4))
        self.gate, self.up, self.down = linear(64, 128), linear(64, 128), linear(128, 64)


class Deep(nn.Module):
    """Very many layers, on the meta device."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))


ROWS = """
step "low precision" relax(dtype) {
  layers.*.{norm1,norm2,q,k,v,o,gate,up,down}  cast(bf16)
}
layers.*.{q,k,v,gate,up}  shard(col, over=tp)
layers.*.{o,down}         shard(row, over=tp)
layers.*.{q,k,v,gate,up}  shard(col, over=dp)
layers.*.{o,down}         shard(row, over=dp)
layers.*                  checkpoint()
layers.*.{q,k,v,o,gate,up,down}  offload(activations)
layers.*.{q,k,v,o,gate,up,down}  offload(parameters)
layers.*.{q,k,v,o,gate,up,down}  offload(gradients)
layers.*.{q,k,v,o,gate,up,down}  offload(optimizer)
"""  # 52 actions at each layer


def all_layers_text(layers: int) -> str:
    """Return a schedule with ten rows for all layers."""
    return HEAD + ROWS


def hundreds_text(layers: int) -> str:
    """Return a schedule with the same ten rows for each hundred layers."""
    parts = range(0, layers, 100)
    steps = (ROWS.replace("layers.*", f"layers[{n}:{n + 100}]") for n in parts)
    return HEAD + "".join(s.replace("low precision", str(n)) for n, s in enumerate(steps))


def load_facts(model: Deep) -> ModelFacts:
    """Return the facts of a model, with its lazy parts computed."""
    model_facts = ModelFacts(model)
    assert model_facts.sites and model_facts.parameters and model_facts.ties is not None
    return model_facts


def count_actions(write: Callable[[int], str], model_facts: ModelFacts) -> tuple[int, int]:
    """Return the numbers of rows and actions of a plan."""
    layers = len(model_facts.sites["layers"].children)
    plan = expand(parse(Source("deep.sched", write(layers))), model_facts).plan
    assert plan is not None
    return len(plan.actions), sum(len(action.sites) for action in plan.actions)


def plan_large(ranks: int) -> None:
    """Plan the schedule of the 70-billion model, with its costs.

    Eight ranks hold a replica; each further replica has its own rows, so the batch grows.
    """
    from schedlang.verbs.inputs import account_costs
    from schedlang.verbs.inputs import plan_schedule as of
    from tests.benchmarks.plan_scale import MODEL, SCHEDULE

    with TemporaryDirectory() as folder:
        file = Path(folder) / "llama70b.sched"
        file.write_text((SCHEDULE % (ranks // 8)).replace("pp=8, tp=8", "pp=2, tp=4"))
        rows = f"(1, 8192, dtype=torch.long).expand({4 * ranks}, -1)"
        file.with_name("model.py").write_text(MODEL.replace("(1024, 8192, dtype=torch.long)", rows))
        account_costs(of(file, None, None, None))


def main() -> None:
    """Measure, and print."""
    fastest = min(command("check", EXAMPLE) for _ in range(3))
    print(f"check, a command, warm cache      {fastest:.2f} s")
    text = HEAD + "".join(f"a.{n}.b  checkpoint()\n" for n in range(2000))
    spent, tree = min(
        (timed(lambda: parse(Source("rows.sched", text))) for _ in range(3)), key=lambda p: p[0]
    )
    print(f"read 2,000 rows                   {spent:.2f} s")
    print(f"and check them                    {timed(lambda: expand(tree, None))[0]:.2f} s")
    for layers in (192, 1_923, 19_231):
        for write in (all_layers_text, hundreds_text):
            facts_time, model_facts = timed(partial(load_facts, Deep(layers)))
            spent, (rows, count) = timed(partial(count_actions, write, model_facts))
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            summary = f"{spent:.2f} s, facts of the model {facts_time:.2f} s, {peak:.2f} GiB"
            print(f"{rows:5,} rows, {count:9,} actions     {summary}")
    plan_large(8)  # imports and caches
    for ranks in (8, 16_384):
        spent = min(timed(partial(plan_large, ranks))[0] for _ in range(2))
        print(f"plan for {ranks:6} ranks             {spent:.1f} s")


if __name__ == "__main__":
    main()
