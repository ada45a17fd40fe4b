"""The conflict table: both orders of every two primitives' examples give what it says."""

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
from tests.language.test_primitive_examples import (
    NAMES,
    ROWS_ABOVE,
    _build_toy,
    _example_axes,
    _example_row,
    _relax_words,
)
from tests.proofs import make_plan

STANDALONE = [name for name in NAMES if name not in ROWS_ABOVE]
PAIRS = list(combinations(STANDALONE, 2))

# a row for GPT-2 for each primitive that applies to it, and what its step must relax
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
# the same rows for other models, whose modules have other names
TIED = ("untie",)  # rows that do not apply to Llama, whose head is not tied
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
PlanFunction = Callable[..., Plan]
RowTable = dict[str, tuple[str, str]]


def _plan_examples(*names: str) -> Plan:
    """The plan of these examples, in this order, on a mesh that has all their axes."""
    axes = dict.fromkeys((axis for name in names for axis in _example_axes(name)), 2)
    mesh = ", ".join(f"{axis}={size}" for axis, size in sorted(axes.items()))
    relaxed = ", ".join(sorted({_relax_words(name) for name in names} - {""}))
    return make_plan(_build_toy(), "\n".join(map(_example_row, names)), mesh, relaxed)


@cache
def _model(name: str) -> nn.Module:
    """The small model of a name."""
    builders: dict[str, Callable[[], nn.Module]] = {
        "gpt2": lambda: models.gpt2(2),
        "llama": lambda: models.llama(2, bias=True),
        "bert": models.bert,
    }
    return builders[name]().float()


def _plan_rows(model: str, table: RowTable, *names: str) -> Plan:
    """The plan of these rows of a table on a small model of transformers, in this order."""
    rows = [table[name] for name in names]
    relaxed = ", ".join(sorted({relax for _, relax in rows} - {""}))
    mesh = "dp=2, pp=2, cp=2, tp=2, r=2, c=2"
    return make_plan(_model(model), "\n".join(row for row, _ in rows), mesh, relaxed)


_plan_gpt2 = partial(_plan_rows, "gpt2", GPT2)


@cache
def _plan_or_codes(make: PlanFunction, *names: str) -> Plan | str:
    """The plan, or the codes of the refusal."""
    try:
        return make(*names)
    except Refusal as refusal:
        return " ".join(d.code for d in refusal.diagnostics)


def _check_both_orders(make: PlanFunction, first: str, second: str) -> None:
    """Check both orders of two rows: "clash" is refused; "commute" gives the same plan both
    ways."""
    known, plans_alone = registry(), [_plan_or_codes(make, name) for name in (first, second)]
    if not all(isinstance(plan, Plan) for plan in plans_alone):
        return  # needs rows above it; other tests cover it
    sites = [
        plan.actions[-1].sites for plan in plans_alone if isinstance(plan, Plan) and plan.actions
    ]
    assert isinstance(plans_alone[0], Plan)
    meet = len(sites) == 2 and any(find_site_pairs(plans_alone[0], *sites))
    results = {(a, b): _plan_or_codes(make, a, b) for a, b in ((first, second), (second, first))}
    relations = {(a, b): relation_of(known[a], known[b]) for a, b in results}
    for pair, relation in relations.items():
        if relation == "clash" and meet:
            assert isinstance(results[pair], str) and "S5" in results[pair], (pair, results[pair])
        if relation in ("commute", "order"):
            assert "S503" not in str(results[pair] if isinstance(results[pair], str) else ""), pair
    plans = [plan for plan in results.values() if isinstance(plan, Plan)]
    if set(relations.values()) == {"commute"} and len(plans) == 2:
        left = [replace(plan, actions=()) for plan in plans]
        different = [
            f.name
            for f in fields(Plan)
            if f.compare and getattr(left[0], f.name) != getattr(left[1], f.name)
        ]
        assert not different, (first, second, different)


@pytest.mark.parametrize("one, other", PAIRS, ids=[f"{a}-{b}" for a, b in PAIRS])
def test_both_orders(one: str, other: str) -> None:
    """The table is right for the examples of every two primitives, on a toy model with all their
    modules."""
    _check_both_orders(_plan_examples, one, other)


GPT2_PAIRS = list(combinations(GPT2, 2))


def _commute(first: str, second: str) -> bool:
    """Whether the table says that two primitives commute."""
    a, b = registry()[first], registry()[second]
    return {relation_of(a, b), relation_of(b, a)} == {"commute"}


def test_orders_on_gpt2() -> None:
    """The table is right on transformers' GPT-2, for all pairs whose order matters."""
    for first, second in GPT2_PAIRS:
        assert isinstance(_plan_or_codes(_plan_gpt2, first), Plan), _plan_or_codes(
            _plan_gpt2, first
        )
        if not _commute(first, second):
            _check_both_orders(_plan_gpt2, first, second)


@pytest.mark.deep
def test_rows_that_commute_on_gpt2() -> None:
    """The table is right on GPT-2 for pairs that commute."""
    for first, second in GPT2_PAIRS:
        if _commute(first, second):
            _check_both_orders(_plan_gpt2, first, second)


@pytest.mark.deep
@pytest.mark.parametrize("model, table", [("llama", LLAMA), ("bert", BERT)])
def test_orders_on_others(model: str, table: RowTable) -> None:
    """The table is right for all pairs of rows on Llama and BERT; each row is legal by itself."""
    make = partial(_plan_rows, model, table)
    for name in table:
        assert isinstance(_plan_or_codes(make, name), Plan), (name, _plan_or_codes(make, name))
    for first, second in combinations(table, 2):
        _check_both_orders(make, first, second)


def test_enough_pairs_are_tried() -> None:
    """At least 70 % of the examples are legal alone, so that most pairs are really compared."""
    standalone = [
        name for name in STANDALONE if not isinstance(_plan_or_codes(_plan_examples, name), str)
    ]
    assert len(standalone) >= 0.7 * len(NAMES), sorted({*NAMES} - {*standalone})


def test_explain_shows_the_table() -> None:
    """`explain --conflicts` prints a row for each primitive and the signs; `--json` says the
    same."""
    output = CliRunner().invoke(app, ["explain", "--conflicts"]).stdout
    assert "refused, swap the two rows" in output
    table = json.loads(CliRunner().invoke(app, ["explain", "--conflicts", "--json"]).stdout)
    assert table["offload"]["checkpoint"] == "clash" and table["checkpoint"]["offload"] == "order"
    assert list(table) == NAMES and all(list(row) == NAMES for row in table.values())
    rows = {line.split()[1]: line.split()[2:] for line in output.split("\n")[-len(table) - 1 : -1]}
    assert rows == {
        name: [SIGNS[relation] for relation in row.values()] for name, row in table.items()
    }
