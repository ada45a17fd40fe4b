"""Tests of `adapt` against PEFT: the same adapters train alike, merge alike, and load there."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schedlang.ir.plan import Plan
from schedlang.passes.lower.build import build
from tests import models
from tests.engine import Threads
from tests.proofs import adamw, assert_near, planned, sequential, trained

peft = pytest.importorskip("peft", reason="PEFT: see tests/judging/requirements.txt")
pytestmark = pytest.mark.others

BATCHES = [models.tokens(rows=8, seed=seed) for seed in range(3)]
COL = [f"model.layers.*.self_attn.{name}_proj" for name in "qkv"]
ROW = ["model.layers.*.self_attn.o_proj", "model.layers.*.mlp.down_proj"]
SPLIT = f"{', '.join(COL)}  shard(col, over=tp)\n{', '.join(ROW[:1])}  shard(row, over=tp)\n"
HEADS = "transformer.h.*.attn.c_attn"
CASES = {
    "llama": (
        lambda: models.llama(2),
        f"{', '.join(COL + ROW)}  adapt({{kind}}, rank=4, alpha=6)\n",
        ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"],
        SPLIT,
    ),
    "gpt2": (
        lambda: models.gpt2(2),
        f"{HEADS}, transformer.h.*.attn.c_proj  adapt({{kind}}, rank=4, alpha=6)\n",
        ["c_attn", "attn.c_proj"],
        f"{HEADS}  shard(col, blocks=3, over=tp)\n"
        "transformer.h.*.attn.c_proj  shard(row, over=tp)\n",
    ),
}
NAMES = {
    "lora_A": "lora_A.default.weight",
    "lora_B": "lora_B.default.weight",
    "lora_magnitude": "lora_magnitude_vector.default.weight",
}


def begun(make: Any, rows: str, mesh: str) -> Plan:
    """A plan in float64 whose B is not zero."""
    plan = planned(make().double(), rows, mesh, "model")
    return replace(plan, model=plan.model.for_module(plan.model.base.model, True))


def of_peft(plan: Plan, kind: str, targets: list[str]) -> Any:
    """The untouched model, adapted by PEFT, with the values of the plan's adapters."""
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=targets, lora_dropout=0.0, use_dora=kind == "dora"
    )
    found = peft.get_peft_model(copy.deepcopy(plan.model.base.model), config)
    state = found.state_dict()
    for name, value in plan.model.model.state_dict().items():
        owner, _, local = name.rpartition(".")
        if local in NAMES:
            place = f"base_model.model.{owner}.{NAMES[local]}"
            assert state[place].shape == value.shape
            state[place].copy_(value)
    return found


def ours(name: str) -> str:
    """A name of PEFT's as it is here."""
    name = name.replace("base_model.model.", "").replace(".base_layer", "")
    for local, theirs in NAMES.items():
        name = name.replace(theirs, local)
    return name


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mesh", ["", "tp=2", "dp=2, tp=2"])
def test_it_trains_as_pefts_does(threads: Threads, name: str, kind: str, mesh: str) -> None:
    """Losses, all gradients, three steps of AdamW and its state, in float64."""
    make, rows, targets, split = CASES[name]
    rows = rows.format(kind=kind) + (split if mesh else "")
    rows += "zero(stage=2, over=dp)" if "dp" in mesh else ""
    plan = begun(make, rows, mesh)
    wanted = sequential(of_peft(plan, kind, targets), BATCHES, adamw)
    seen = trained(threads, plan, BATCHES, adamw)
    assert_near(seen, {ours(key): value for key, value in wanted.items()})
    assert sum("grad 0" in key for key in seen) >= 8


def exported(plan: Plan, folder: str, model: nn.Module) -> dict[str, Tensor]:
    """On this rank: a step, and adapters alone and merged."""
    program = build(plan, BATCHES[0], optimizer=adamw)
    program.train_step(BATCHES[0])
    program.export(f"{folder}/merged", model)
    program.export(f"{folder}/alone", model, adapter=True)
    return program.state_dict()


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("name", CASES)
def test_peft_loads_and_merges_it(threads: Threads, tmp_path: Path, name: str, kind: str) -> None:
    """What is exported alone is an adapter of PEFT's, which merges to what is exported merged."""
    make, rows, _, split = CASES[name]
    plan = begun(make, rows.format(kind=kind) + split, "tp=2")
    model = plan.model.base.model
    state = threads.run(exported, 2, plan, str(tmp_path), model)[0]
    found = peft.PeftModel.from_pretrained(
        copy.deepcopy(model), tmp_path / "alone", autocast_adapter_dtype=False
    ).double()
    held = {ours(key): value for key, value in found.state_dict().items()}
    assert held.keys() == state.keys()
    assert not [key for key, value in state.items() if not torch.equal(held[key], value)]
    merged = found.merge_and_unload().state_dict()
    own: Any = type(model).from_pretrained(tmp_path / "merged", dtype=torch.float64)
    for key, value in own.state_dict().items():
        assert torch.allclose(value, merged[key], rtol=1e-12, atol=1e-14), key


def test_heads_that_train_too_and_several_rows(threads: Threads, tmp_path: Path) -> None:
    """A module that `keep` names is written whole, and ranks and factors of rows each by theirs."""
    rows = (
        f'{COL[0]}  adapt(lora, rank=2, alpha=2, keep="lm_head.*")\n'
        f"{ROW[0]}  adapt(lora, rank=4, alpha=12)\n{SPLIT}"
    )
    plan = begun(lambda: models.llama(2), rows, "tp=2")
    model = plan.model.base.model
    state = threads.run(exported, 2, plan, str(tmp_path), model)[0]
    found = peft.PeftModel.from_pretrained(
        copy.deepcopy(model), tmp_path / "alone", autocast_adapter_dtype=False
    ).double()
    own = copy.deepcopy(plan.model.model)
    own.load_state_dict(state)
    with torch.no_grad():
        wanted, got = (one.eval()(**BATCHES[1]).logits for one in (own, found))
    assert torch.allclose(got, wanted, rtol=1e-9, atol=1e-11)
    assert not torch.equal(state["lm_head.weight"], model.lm_head.weight)
