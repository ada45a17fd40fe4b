"""Tests of verification on a reduced model: what is kept of the whole, and what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from typer.testing import CliRunner

import schedlang
from examples.custom.model import Watcher
from examples.custom.model import batch as series
from schedlang.cli import app
from schedlang.diagnostic import Refusal
from schedlang.passes.compare import compare  # noqa: F401  (imported before ranks start)
from schedlang.passes.depth import neighbours
from schedlang.passes.minimise import Rules, Search, Split
from schedlang.passes.prove import prove
from schedlang.passes.quantities import Key, counted, learned
from schedlang.passes.recipe import Recipe, recipes, special_ids
from schedlang.passes.shrink import Shrunk, shrink
from schedlang.passes.sides import Case
from schedlang.passes.small_batch import Cutting, small
from schedlang.passes.small_mesh import small_meshes
from schedlang.passes.state import Settings
from schedlang.runtime.launch import Pool
from schedlang.source import Source
from schedlang.syntax import parse
from tests.mutants import Mutated, enter_without_all_reduce

BLOCK = """  model.embed_tokens  shard(vocab, over=tp)
  at model.layers.* {
    self_attn.{q,k,v}_proj  shard(col, over=tp)
    self_attn.o_proj        shard(row, over=tp)
    mlp.{gate,up}_proj      shard(col, over=tp)
    mlp.down_proj           shard(row, over=tp)
  }
  lm_head  shard(vocab, over=tp)
"""
PIPELINE = """  model.layers  pipeline_split(over=pp)
  zero(stage=1, over=dp)
  pipeline(order="1F1B", micro=4)
"""


def llama70b(**changes: Any) -> nn.Module:
    """Llama 3 70B in shape, on the meta device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
        num_attention_heads=64, num_key_value_heads=8, max_position_embeddings=8192,
        use_cache=False, bos_token_id=128000, eos_token_id=128001,
    )  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**(sizes | changes)))


def tokens(vocabulary: int, rows: int = 64, length: int = 96) -> Callable[[int], dict[str, Tensor]]:
    """Ragged rows of ids, some of which are the last of the vocabulary."""

    def batch(seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(
            vocabulary // 2, vocabulary, (rows + seed % 2, length), generator=generator
        )
        lengths = torch.randint(length // 2, length + 1, (len(ids),), generator=generator)
        padding = torch.arange(length) >= lengths[:, None]
        return {
            "input_ids": ids.masked_fill(padding, 0),
            "attention_mask": (~padding).long(),
            "labels": ids.masked_fill(padding, -100),
        }

    return batch


def shrunken(
    model: nn.Module, text: str, batch: Callable[[int], Mapping[str, Any]] | None = None,
    **options: Any,
) -> Shrunk:  # fmt: skip
    """The reduction of a model under a schedule without a header."""
    tree = parse(Source("big.sched", f"schedule 1\n\n{text}"))
    made = batch or tokens(128256)
    settings = options.pop("settings", Settings())
    return shrink(tree, settings, model, [made(seed) for seed in range(3)], **options)


def step(rows: str, mesh: str) -> str:
    """A mesh and one step."""
    return f'mesh({mesh})\n\nstep "all" {{\n{rows}}}\n'


# -- what is kept --------------------------------------------------------------------------------


def test_llama_70b() -> None:
    """Ratios of heads, divisibility with two parts a rank, order of widths, two layers a stage and
    all rows at all their kinds of sites are kept; everything else is small."""
    found = shrunken(llama70b(), step(BLOCK + PIPELINE, "dp=16, pp=8, tp=8"))
    config = found.plan.model.model.config
    assert dict(found.plan.mesh.axes) == {"dp": 2, "pp": 2, "tp": 2}
    assert config.num_attention_heads == 8 * config.num_key_value_heads
    assert config.num_key_value_heads == 2 and config.num_hidden_layers == 4
    assert config.head_dim % 2 == 0 and config.head_dim >= 4
    assert config.hidden_size == config.num_attention_heads * config.head_dim
    assert config.hidden_size < config.intermediate_size < config.vocab_size < 100
    assert config.vocab_size % 2 == 0 and config.intermediate_size % 2 == 0
    assert [a.name for a in found.plan.actions].count("shard") == 6
    assert not any(p.is_meta for p in found.plan.model.model.parameters())
    assert "num_hidden_layers 80 -> 4" in found.said and "dp=16, pp=8, tp=8 -> dp=2" in found.said
    assert any("ranks along `dp`" in gap.condition for gap in found.gaps)


def test_special_ids_and_padding() -> None:
    """Ids stay below the reduced vocabulary, ignored labels and padding stay, labels stay beside
    their tokens, and special ids of the config are still different ones."""
    found = shrunken(llama70b(), step(BLOCK + PIPELINE, "dp=16, pp=8, tp=8"))
    config = found.plan.model.model.config
    assert len({0, config.bos_token_id, config.eos_token_id}) == 3
    assert config.eos_token_id < config.vocab_size
    for batch in found.batches:
        ids, labels, mask = (batch[key] for key in ("input_ids", "labels", "attention_mask"))
        assert 0 <= ids.min() and ids.max() < config.vocab_size and ids.shape == labels.shape
        assert torch.equal(labels != -100, mask == 1) and (mask == 0).any()
        assert torch.equal(ids[mask == 1], labels[mask == 1])
    assert len({len(batch["input_ids"]) for batch in found.batches}) > 1


def test_selectors_keep_their_meaning() -> None:
    """A slice that takes some layers still takes some and leaves some; the last is the last."""
    rows = "  model.layers[:5]  checkpoint()\n  model.layers[-1]  offload(activations, to=cpu)\n"
    found = shrunken(llama70b(), step(BLOCK + rows, "tp=16").replace("tp=16", "tp=8"))
    kept, last = found.plan.actions[-2:]
    layers = len(found.plan.model.children("model.layers"))
    assert len(kept.sites) == 5 and last.sites == (f"model.layers.{layers - 1}",)
    assert layers == 8  # five, two that neither row names, and the last


def test_kinds_of_layers() -> None:
    """Layers of two kinds: each stage keeps both, as each has them in the whole model."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    with torch.device("meta"):
        model = Gemma2ForCausalLM(Gemma2Config(use_cache=False, num_hidden_layers=24))
    rows = "  model.layers  pipeline_split(over=pp)\n  pipeline(order=GPipe, micro=2)\n"
    found = shrunken(model, step(rows.replace("GPipe", '"GPipe"'), "pp=12"), tokens(256000))
    config = found.plan.model.model.config
    assert config.num_hidden_layers == len(config.layer_types) == 4
    assert found.plan.mesh.sizes == {"pp": 2}


def test_oddness_and_padding() -> None:
    """A vocabulary that does not divide still does not, and the padded one still does, with a real
    row on the last rank."""
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_embd=1600, n_layer=48, n_head=25, use_cache=False))
    rows = """  transformer.wte  pad(vocab, multiple=64)
  transformer.wte  shard(vocab, over=tp)
  at transformer.h.* {
    mlp.c_fc    shard(col, over=tp)
    mlp.c_proj  shard(row, over=tp)
  }
  lm_head  shard(vocab, over=tp)
"""
    found = shrunken(model, step(rows, "tp=16").replace("16", "16"), tokens(50257))
    config, layout = found.plan.model.model.config, found.plan.layout("transformer.wte.weight")
    assert config.vocab_size % 2 == 1 and layout.padded[0] % 64 == 0
    assert config.vocab_size > layout.padded[0] // 2
    assert config.n_head % 2 == 1 and config.n_embd % config.n_head == 0


def test_experts() -> None:
    """There stay more experts than are chosen, and as many are chosen."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(use_cache=False, experts_implementation="batched_mm")
    with torch.device("meta"):
        model = MixtralForCausalLM(config)
    rows = "  lm_head  shard(vocab, over=tp)\n"
    reduced = shrunken(model, step(rows, "tp=16"), tokens(32000)).plan.model.model.config
    assert reduced.num_experts_per_tok == 2 < reduced.num_local_experts < 8


def test_what_is_frozen_stays_frozen() -> None:
    """Frozen layers at both ends of the model are frozen in the reduced one, and no others."""
    model = llama70b()
    for name, tensor in model.named_parameters():
        tensor.requires_grad_(not name.startswith(("model.layers.0.", "model.layers.79.")))
    made = shrunken(model, step(BLOCK, "tp=16").replace("16", "8")).plan.model.model
    last = len(made.model.layers) - 1
    assert last >= 3
    frozen = {n.split(".")[2] for n, p in made.named_parameters() if not p.requires_grad}
    assert frozen == {"0", str(last)}


# -- what is refused -----------------------------------------------------------------------------


def refusal(*args: Any, **options: Any) -> str:
    """The message of a reduction that is refused."""
    with pytest.raises(Refusal) as caught:
        shrunken(*args, **options)
    return caught.value.render()


def test_divisibility_of_the_whole_model() -> None:
    """Eight key/value heads split sixteen ways: wrong at full size only, and refused there."""
    said = refusal(llama70b(), step(BLOCK, "tp=16"))
    assert "S403" in said and "num_key_value" not in said and "big.sched:" in said, said


def test_more_stages_than_layers() -> None:
    """What only the number of stages at full size makes wrong is refused."""
    said = refusal(llama70b(), step(BLOCK + PIPELINE, "dp=2, pp=96, tp=8"))
    assert "S613" in said and "80 units" in said, said


def test_a_changed_model() -> None:
    """A model that is not what its class makes would be verified as another: refused."""
    model = llama70b()
    model.model.layers[3].mlp = nn.Identity()
    assert "S751" in refusal(model, step(BLOCK.replace("mlp", "self_attn"), "tp=2"))
    model = llama70b()
    model.model.layers[3].self_attn.attention_dropout = 0.5
    assert "S751" in refusal(model, step(BLOCK, "tp=2"))


def test_absolute_sizes() -> None:
    """Cut points fix the number of stages: where no small mesh has as many, that is said."""
    names = ", ".join(str(k) for k in range(8, 80, 8))
    rows = f'  model.layers[{names}]  pipeline_split(over=pp)\n  pipeline(order="1F1B", micro=10)\n'
    assert "S609" in refusal(llama70b(), step(rows, "pp=10"))


def test_a_number_of_unknown_meaning() -> None:
    """A number for each row that may be the length of a row that was cut is refused."""
    batch = {
        "input_ids": torch.ones(4, 50, dtype=torch.long),
        "lengths": torch.tensor([50, 4, 9, 1]),
    }
    with pytest.raises(Refusal, match="S753"):
        small(batch, Cutting({}, {}, (), (1, 1)))


def test_a_model_of_unknown_sizes() -> None:
    """A module of no config and no function of sizes is refused, with what to offer."""
    said = refusal(Watcher(), step("  blocks.*  checkpoint()\n", "tp=1"), series)
    assert "S751" in said and "`small()`" in said and "width: int" in said
