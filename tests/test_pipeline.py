"""The executor: gradients, losses and outputs of a pipeline equal those of the whole model."""

from __future__ import annotations

import torch

from schedlang.orders import order
from schedlang.runtime.graph import cut
from schedlang.runtime.pipeline import Pipeline
from schedlang.runtime.record import record
from schedlang.runtime.stage import Stage, Stub
from schedlang.runtime.units import Switch, skeleton, units_of
from tests.models import Float64, gpt2, tokens
from tests.ranks import run_ranks


def test_gpt2():
    """GPT-2 with tied weights over two ranks under 1F1B has the whole model's gradients."""

    def work(rank):
        model = gpt2()
        batch = tokens()
        with Float64():
            graph = record(model, units_of(model, batch), batch)
            n = len(graph.units)
            made = cut(graph, [k * 2 // n for k in range(n)])
            stage = Stage(model, made, rank)
            pipe = Pipeline({rank: stage}, order("1f1b", 2, 4), {0: 0, 1: 1})
            parts = [{k: v[i : i + 1] for k, v in batch.items()} for i in range(4)]
            out = pipe.run(parts, [0.25] * 4)
        return out, {n: p.grad for n, p in model.named_parameters()}

    model, batch = gpt2(), tokens()
    with Float64():
        model(**batch).loss.backward()
    results = run_ranks(2, work)
    for name, p in model.named_parameters():
        total = sum(g[name] for _, g in results if g[name] is not None)
        err = float((total - p.grad).norm() / p.grad.norm())
        print(name, err)
        assert err < 1e-12
