"""The language at scale: python -m tests.benchmarks.scale

Prints processor time and memory of: `check` as a command, start included; reading a file of 2,000
rows; expanding up to 1,000,000 actions, by ten rows about all layers
and by ten about each hundred; planning the same schedule for 8 and for 16,384 ranks.
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


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of this process's processor, and the result."""
    start = time.process_time()
    made = work()
    return time.process_time() - start, made


def command(*words: str) -> float:
    """Seconds of processor of a whole command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "schedlang", *words], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


class Layer(nn.Module):
    """The modules of a transformer's layer, as far as rows are about them."""

    def __init__(self) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=False, device="meta")
        self.norm1, self.norm2 = (nn.RMSNorm(64, device="meta") for _ in range(2))
        self.q, self.k, self.v, self.o = (linear(64, 64) for _ in range(4))
        self.gate, self.up, self.down = linear(64, 128), linear(64, 128), linear(128, 64)


class Deep(nn.Module):
    """Very many layers, on no device."""

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


def whole_model(layers: int) -> str:
    """Ten rows about all layers."""
    return HEAD + ROWS


def by_hundreds(layers: int) -> str:
    """The same ten rows for each hundred layers."""
    parts = range(0, layers, 100)
    steps = (ROWS.replace("layers.*", f"layers[{n}:{n + 100}]") for n in parts)
    return HEAD + "".join(s.replace("low precision", str(n)) for n, s in enumerate(steps))


def facts_of(model: Deep) -> ModelFacts:
    """The facts of a model, with all that is found out when it is first asked for."""
    facts = ModelFacts(model)
    assert facts.sites and facts.parameters and facts.ties is not None
    return facts


def actions(write: Callable[[int], str], facts: ModelFacts) -> tuple[int, int]:
    """Rows and actions of a plan, which are counted by the modules that rows act on."""
    layers = len(facts.sites["layers"].children)
    plan = expand(parse(Source("deep.sched", write(layers))), facts).plan
    assert plan is not None
    return len(plan.actions), sum(len(action.sites) for action in plan.actions)


def planned(ranks: int) -> None:
    """Plan the 70-billion model's schedule for some ranks, with all that is counted.

    Eight ranks hold a copy of the model; each copy more has rows of its own, so the batch grows.
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
        for write in (whole_model, by_hundreds):
            first, facts = timed(partial(facts_of, Deep(layers)))
            spent, (rows, count) = timed(partial(actions, write, facts))
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            said = f"{spent:.2f} s, facts of the model {first:.2f} s, {peak:.2f} GiB"
            print(f"{rows:5,} rows, {count:9,} actions     {said}")
    planned(8)  # what is imported and found out once
    for ranks in (8, 16_384):
        spent = min(timed(partial(planned, ranks))[0] for _ in range(2))
        print(f"plan for {ranks:6} ranks             {spent:.1f} s")


if __name__ == "__main__":
    main()
