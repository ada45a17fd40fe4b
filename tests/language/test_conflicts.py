"""The conflict table against what happens: every pair of verbs' examples in both orders."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache, partial
from itertools import combinations

import pytest
from torch import nn
from typer.testing import CliRunner

from schedlang.cli import app
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.plan import Plan
from schedlang.ir.primitive import SIGNS, registry, relation_of
from schedlang.passes.elaborate.legality import find_site_pairs
from tests import models
from tests.language.test_primitives import ABOVE, NAMES, _axes, _relax, _row, _toy
from tests.proofs import planned

ALONE = [name for name in NAMES if name not in ABOVE]
PAIRS = list(combinations(ALONE, 2))

# a row of GPT-2 for each verb that has something to do there, and what its step has to give up
GPT2 = {
    "adapt": ("transformer.h.*.mlp.c_fc  adapt(lora, rank=4)", "model"),
    "cast": ("transformer.h.*  cast(bf16)", "dtype"),
    "checkpoint": ("transformer.h.*  checkpoint()", ""),
    "complete": ("complete(over=tp)", ""),
    "context_parallel": ("transformer.h.*.attn  context_parallel(ring, over=cp)", ""),
    "decompose": ("transformer.h.*.mlp.c_fc  decompose(bias)", ""),
    "freeze": ("transformer.h.0  freeze()", "updates"),
    "fuse": ("transformer.h.*.mlp  fuse()", ""),
    "grid": ("transformer.h.*.mlp.c_fc  grid(summa, over=(r, c))", ""),
    "offload": ("transformer.h.*  offload(activations)", ""),
    "overlap": ("overlap(gradients)", ""),
    "pad": ("transformer.h.*.mlp.c_fc  pad(out, multiple=8)", ""),
    "pipeline": ('pipeline(order="1F1B", micro=2)', ""),
    "pipeline_split": ("transformer.h  pipeline_split(over=pp)", ""),
    "replace_kernel": ("transformer.h.*.ln_1  replace_kernel(layer_norm)", ""),
    "shard": ("transformer.h.*.mlp.c_fc  shard(col, over=tp)", ""),
    "split_backward": ("transformer.h.*  split_backward()", ""),
    "untie": ("lm_head  untie(weight)", "model"),
    "zero": ("zero(stage=1, over=dp)", ""),
}
# the same rows of other models, where their modules have other names
TIED = ("untie",)  # rows that Llama, whose head is its own, has nothing for
LLAMA = {name: row for name, row in GPT2.items() if name not in TIED} | {
    "adapt": ("model.layers.*.mlp.up_proj  adapt(lora, rank=4)", "model"),
    "cast": ("model.layers.*  cast(bf16)", "dtype"),
    "checkpoint": ("model.layers.*  checkpoint()", ""),
    "context_parallel": ("model.layers.*.self_attn  context_parallel(ring, over=cp)", ""),
    "decompose": ("model.layers.*.mlp.up_proj  decompose(bias)", ""),
    "freeze": ("model.layers.0  freeze()", "updates"),
    "fuse": ("model.layers.*.mlp  fuse()", ""),
    "grid": ("model.layers.*.mlp.up_proj  grid(summa, over=(r, c))", ""),
    "offload": ("model.layers.*  offload(activations)", ""),
    "pad": ("model.layers.*.mlp.up_proj  pad(out, multiple=16)", ""),
    "pipeline_split": ("model.layers  pipeline_split(over=pp)", ""),
    "replace_kernel": ("**:LlamaRMSNorm  replace_kernel(rms_norm)", ""),
    "shard": ("model.layers.*.mlp.up_proj  shard(col, over=tp)", ""),
    "split_backward": ("model.layers.*  split_backward()", ""),
}
BERT = GPT2 | {
    "adapt": ("bert.encoder.layer.*.intermediate.dense  adapt(lora, rank=4)", "model"),
    "cast": ("bert.encoder.layer.*  cast(bf16)", "dtype"),
    "checkpoint": ("bert.encoder.layer.*  checkpoint()", ""),
    "context_parallel": (
        "bert.encoder.layer.*.attention.self  context_parallel(ring, over=cp)",
        "",
    ),
    "decompose": ("bert.encoder.layer.*.intermediate.dense  decompose(bias)", ""),
    "freeze": ("bert.encoder.layer.0  freeze()", "updates"),
    "fuse": ("bert.encoder.layer.*.intermediate  fuse()", ""),
    "grid": ("bert.encoder.layer.*.intermediate.dense  grid(summa, over=(r, c))", ""),
    "offload": ("bert.encoder.layer.*  offload(activations)", ""),
    "pad": ("bert.encoder.layer.*.intermediate.dense  pad(out, multiple=16)", ""),
    "pipeline_split": ("bert.encoder.layer  pipeline_split(over=pp)", ""),
    "replace_kernel": ("bert.encoder.layer.*.attention.self  replace_kernel(sdpa)", ""),
    "shard": ("bert.encoder.layer.*.intermediate.dense  shard(col, over=tp)", ""),
    "split_backward": ("bert.encoder.layer.*  split_backward()", ""),
    "untie": ("cls.predictions.decoder  untie(weight)", "model"),
}
Make = Callable[..., Plan]
Rows = dict[str, tuple[str, str]]


def _planned(*names: str) -> Plan:
    """The plan of the examples, in this order, on a mesh with all their axes."""
    axes = dict.fromkeys((axis for name in names for axis in _axes(name)), 2)
    mesh = ", ".join(f"{axis}={size}" for axis, size in sorted(axes.items()))
    relaxed = ", ".join(sorted({_relax(name) for name in names} - {""}))
    return planned(_toy(), "\n".join(map(_row, names)), mesh, relaxed)


@cache
def _model(name: str) -> nn.Module:
    made: dict[str, Callable[[], nn.Module]] = {
        "gpt2": lambda: models.gpt2(2),
        "llama": lambda: models.llama(2, bias=True),
        "bert": models.bert,
    }
    return made[name]().float()


def _planned_on(model: str, table: Rows, *names: str) -> Plan:
    """The plan of rows of a table for a model of transformers, in this order."""
    rows = [table[name] for name in names]
    relaxed = ", ".join(sorted({relax for _, relax in rows} - {""}))
    mesh = "dp=2, pp=2, cp=2, tp=2, r=2, c=2"
    return planned(_model(model), "\n".join(row for row, _ in rows), mesh, relaxed)


_planned_gpt2 = partial(_planned_on, "gpt2", GPT2)


@cache
def _tried(make: Make, *names: str) -> Plan | str:
    """The plan, or the codes of its refusal."""
    try:
        return make(*names)
    except Refusal as refusal:
        return " ".join(d.code for d in refusal.diagnostics)


def _hold_in_both_orders(make: Make, one: str, other: str) -> None:
    """Where the table says clash the order is refused; where it says commute in both orders, no
    order is refused for it, and both give one plan."""
    known, alone = registry(), [_tried(make, name) for name in (one, other)]
    if not all(isinstance(plan, Plan) for plan in alone):
        return  # stands on rows above it, which tests of its own have
    sites = [plan.actions[-1].sites for plan in alone if isinstance(plan, Plan) and plan.actions]
    assert isinstance(alone[0], Plan)
    meet = len(sites) == 2 and any(find_site_pairs(alone[0], *sites))
    found = {(a, b): _tried(make, a, b) for a, b in ((one, other), (other, one))}
    told = {(a, b): relation_of(known[a], known[b]) for a, b in found}
    for pair, how in told.items():
        if how == "clash" and meet:
            assert isinstance(found[pair], str) and "S5" in found[pair], (pair, found[pair])
        if how in ("commute", "order"):
            assert "S503" not in str(found[pair] if isinstance(found[pair], str) else ""), pair
    plans = [plan for plan in found.values() if isinstance(plan, Plan)]
    if set(told.values()) == {"commute"} and len(plans) == 2:
        same = [replace(plan, actions=()) for plan in plans]
        different = [
            f.name
            for f in fields(Plan)
            if f.compare and getattr(same[0], f.name) != getattr(same[1], f.name)
        ]
        assert not different, (one, other, different)


@pytest.mark.parametrize("one, other", PAIRS, ids=[f"{a}-{b}" for a, b in PAIRS])
def test_both_orders(one: str, other: str) -> None:
    """The table holds for the examples of each two verbs, on a toy that has all that they name."""
    _hold_in_both_orders(_planned, one, other)


GPT2_PAIRS = list(combinations(GPT2, 2))


def _commute(one: str, other: str) -> bool:
    a, b = registry()[one], registry()[other]
    return {relation_of(a, b), relation_of(b, a)} == {"commute"}


def test_orders_on_gpt2() -> None:
    """The table holds on GPT-2 as transformers has it, for all rows whose order it is about."""
    for one, other in GPT2_PAIRS:
        assert isinstance(_tried(_planned_gpt2, one), Plan), _tried(_planned_gpt2, one)
        if not _commute(one, other):
            _hold_in_both_orders(_planned_gpt2, one, other)


@pytest.mark.deep
def test_rows_that_commute_on_gpt2() -> None:
    """The same of those that have nothing in common."""
    for one, other in GPT2_PAIRS:
        if _commute(one, other):
            _hold_in_both_orders(_planned_gpt2, one, other)


@pytest.mark.deep
@pytest.mark.parametrize("model, table", [("llama", LLAMA), ("bert", BERT)])
def test_orders_on_others(model: str, table: Rows) -> None:
    """The same for all pairs of rows of Llama and of BERT, each of which stands by itself."""
    make = partial(_planned_on, model, table)
    for name in table:
        assert isinstance(_tried(make, name), Plan), (name, _tried(make, name))
    for one, other in combinations(table, 2):
        _hold_in_both_orders(make, one, other)


def test_enough_pairs_are_tried() -> None:
    """Most examples stand by themselves, so that most pairs say something."""
    alone = [name for name in ALONE if not isinstance(_tried(_planned, name), str)]
    assert len(alone) >= 0.7 * len(NAMES), sorted({*NAMES} - {*alone})


def test_explain_shows_the_table() -> None:
    """As text a row for each verb and what the signs mean, for machines the words: the same."""
    shown = CliRunner().invoke(app, ["explain", "--conflicts"]).stdout
    assert "refused, swap the two rows" in shown
    told = json.loads(CliRunner().invoke(app, ["explain", "--conflicts", "--json"]).stdout)
    assert told["offload"]["checkpoint"] == "clash" and told["checkpoint"]["offload"] == "order"
    assert list(told) == NAMES and all(list(row) == NAMES for row in told.values())
    rows = {line.split()[1]: line.split()[2:] for line in shown.split("\n")[-len(told) - 1 : -1]}
    assert rows == {name: [SIGNS[how] for how in row.values()] for name, row in told.items()}
