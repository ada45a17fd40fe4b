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
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import Source
from schedlang.language.syntax import parse
from schedlang.passes.elaborate.state import Settings
from schedlang.passes.prove import prove
from schedlang.passes.reduce_model.blocks import adjacent_kinds
from schedlang.passes.reduce_model.shrink import ReducedModel, shrink, small_meshes
from schedlang.passes.reduce_model.sizes import (
    AxisRanks,
    ModelRecipe,
    QuantityPlace,
    SizeRules,
    SizeSearch,
    find_recipes,
    learn_quantities,
    read_quantities,
    special_ids,
)
from schedlang.passes.reduce_model.small_batch import BatchReduction, reduce_batch
from schedlang.passes.verify.proof_case import Case
from schedlang.runtime.launch.pool import Pool
from tests.zoo.pool import Mutated
from tests.zoo.tensor import enter_without_all_reduce

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
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        use_cache=False,
        bos_token_id=128000,
        eos_token_id=128001,
    )
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
    model: nn.Module,
    text: str,
    batch: Callable[[int], Mapping[str, Any]] | None = None,
    **options: Any,
) -> ReducedModel:
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
    assert (
        "num_hidden_layers 80 -> 4" in found.description
        and "dp=16, pp=8, tp=8 -> dp=2" in found.description
    )
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
        assert ids.min() >= 0 and ids.max() < config.vocab_size and ids.shape == labels.shape
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


class Told(nn.Module):
    """A layer that is told by an attribute to compute otherwise than its neighbours."""

    def __init__(self, width: int, place: int, window: object) -> None:
        super().__init__()
        self.up, self.place, self.window = nn.Linear(width, width), place, window

    def forward(self, x: Tensor) -> Tensor:
        """Softmax, or not."""
        x = self.up(x)
        return x.softmax(-1) if self.window else x


@pytest.mark.parametrize("window", [True, 4, 0.5, "w8", (2, 0.5)])
def test_a_layer_that_is_told_otherwise(window: object) -> None:
    """One layer of twelve has the parameters of all others and an attribute of its own: it is kept,
    and others are not, although each knows its place."""

    def model(layers: int = 12, width: int = 64) -> nn.Module:
        told = [window if place == 4 else type(window)() for place in range(layers)]
        layered = nn.Sequential(*(Told(width, place, one) for place, one in enumerate(told)))
        return nn.Sequential(layered)

    def loss(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return output.square().mean()

    batch = lambda seed: {"input": torch.zeros(8, 64)}  # noqa: E731
    found = shrunken(
        model(), step("  zero(stage=1, over=dp)\n", "dp=2"), batch, make=model, loss=loss
    )
    layers = list(found.plan.model.model.get_submodule("0"))
    assert len(layers) < 12 and any(getattr(one, "window", False) for one in layers)


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
    assert "S613" in said and "80 modules cannot be cut into 96 stages" in said, said


def test_a_changed_model() -> None:
    """A model that is not what its class makes would be verified as another: refused."""
    model = llama70b()
    model.model.layers[3].mlp = nn.Identity()
    norms = "  model.layers.*.input_layernorm  checkpoint()\n"
    assert "S751" in refusal(model, step(norms, ""))
    model = llama70b()
    model.model.layers[3].self_attn.attention_dropout = 0.5
    assert "S751" in refusal(model, step(norms, ""))


@pytest.mark.deep
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
        reduce_batch(batch, BatchReduction({}, {}, (), (1, 1)))


def test_a_model_of_unknown_sizes() -> None:
    """A module of no config and no function of sizes is refused, with what to offer."""
    said = refusal(Watcher(), step("  blocks.*  checkpoint()\n", "tp=1"), series)
    assert "S751" in said and "`small()`" in said and "width: int" in said


# -- other ways to say what is small -------------------------------------------------------------


def test_a_function_of_sizes() -> None:
    """Sizes that `model()` has as defaults are reduced as those of a config are."""

    def model(width: int = 768, eyes: int = 24, blocks: int = 48, classes: int = 1000) -> Watcher:
        return Watcher(width, eyes, blocks, classes)

    rows = """  at blocks.* {
    gaze.look   shard(col, blocks=3, over=tp)
    gaze.blend  shard(row, over=tp)
  }
  blocks  pipeline_split(over=pp)
  pipeline(order="GPipe", micro=4)
"""
    with torch.device("meta"):
        made = model()

    def loss(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return output.square().mean()

    text = step(rows, "pp=12, tp=12")
    found = shrunken(made, text, series, make=model, loss=loss)
    small_one = found.plan.model.model
    assert isinstance(small_one, Watcher) and len(small_one.blocks) == 4
    eyes, width = small_one.blocks[0].gaze.eyes, small_one.blocks[0].gaze.span
    assert found.plan.mesh.sizes == {"pp": 2, "tp": 3}
    assert eyes % 3 == 0 and eyes >= 2 * 3 and width % eyes == 0 and width < 100


MODEL = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

def model():
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(
            vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
            num_attention_heads=64, num_key_value_heads=8, use_cache=False))

def batch(seed):
    seeded = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 128256, (8 + seed % 2, 96), generator=seeded)
    return {"input_ids": ids, "labels": ids}
"""


def run(*words: object) -> Any:
    """A command line in this process."""
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.mark.deep
def test_verify_of_70b_on_meta(tmp_path: Path) -> None:
    """A model file whose model lies on the meta device is verified by itself on a reduced one, and
    the report says what was reduced; `--whole` refuses it."""
    (tmp_path / "model.py").write_text(MODEL)
    file = tmp_path / "big.sched"
    file.write_text(f"schedule 1 for LlamaForCausalLM\n\n{step(BLOCK, 'tp=8')}")
    found = run("verify", file, "--mesh", "tp=2", "--dtype", "none", "--verbose")
    assert found.exit_code == 0, found.output
    said = " ".join(found.output.split())
    assert "num_hidden_layers 80 -> 2" in said and "mesh tp=8 -> tp=2" in said
    assert "not exercised: the sizes of the whole model" in said


def test_small_of_the_model_file(tmp_path: Path) -> None:
    """`small()` and `small_batch(seed)` say themselves what is verified in place of the model."""
    (tmp_path / "model.py").write_text(
        "import torch\nfrom examples.custom.model import Watcher, batch, loss\n"
        "def model():\n    return Watcher(width=960, blocks=24)\n"
        "def small():\n    return Watcher(width=24, eyes=2, blocks=2)\n"
        "def small_batch(seed):\n    return {k: v[:4] for k, v in batch(seed).items()}\n"
    )
    rows = "  blocks.*.gaze.look  shard(col, blocks=3, over=tp)\n"
    rows += "  blocks.*.gaze.blend  shard(row, over=tp)\n"
    file = tmp_path / "big.sched"
    file.write_text(f"schedule 1 for Watcher\n\n{step(rows, 'tp=2')}")
    found = run("verify", file, "--shrink", "--dtype", "none")
    said = " ".join(found.output.split())
    assert found.exit_code == 0 and "to the model of `small()`" in said, found.output


def test_a_bug_is_still_found(pool: Pool) -> None:
    """A runtime that sums no input gradients fails the reduced model, in backward only."""
    found = shrunken(
        llama70b(), step(BLOCK, "tp=16").replace("16", "8"), settings=Settings(mesh={"tp": 2})
    )
    case = Case(found.plan, found.batches, dtype="none")
    report = prove(case, pool=Mutated(pool, enter_without_all_reduce))  # type: ignore[arg-type]
    assert report.exit_code == 1 and report.first is not None
    assert report.first.kind == "gradients", report.first


def test_a_require_that_bounds_the_mesh() -> None:
    """A `require` that holds at full size and on no small mesh is left out, and the report says so;
    one that does not hold at full size is refused."""
    text = "mesh(tp=8)\n\nrequire model.config.hidden_size >= 1024\n\n"
    rows = step(BLOCK, "").partition("\n\n")[2]
    found = shrunken(llama70b(), text + rows, settings=Settings(mesh={"tp": 2}))
    assert any("require" in gap.condition for gap in found.gaps)
    assert "S104" in refusal(llama70b(), text.replace("1024", "9999") + rows)


# -- the parts -----------------------------------------------------------------------------------


@given(st.dictionaries(st.sampled_from("abcd"), st.integers(1, 64), min_size=1))
def test_small_meshes(axes: dict[str, int]) -> None:
    """Every mesh offered runs on one machine, none has more ranks along an axis than the whole;
    one that is small enough is offered as it is."""
    offered = list(itertools.islice(small_meshes(axes), 50))
    world = torch.tensor(list(axes.values())).prod().item()
    assert offered and (world > 8 or offered == [axes])
    for mesh in offered:
        assert torch.tensor(list(mesh.values())).prod() <= 8
        assert all(1 <= mesh[name] <= size for name, size in axes.items())
    assert (
        all(size > 1 for size in offered[0].values())
        or len([s for s in axes.values() if s > 1]) != len(axes)
        or len(axes) > 3
    )


@given(st.sets(st.integers(0, 500), max_size=6), st.integers(8, 100))
def test_special_ids(ids: set[int], size: int) -> None:
    """Different special ids stay different and fit; those that fit already mostly stay."""
    new = special_ids(tuple(ids), size)
    assert set(new) == ids and len(set(new.values())) == len(ids)
    assert all(0 <= v < size for v in new.values())
    assert all(new[v] == v for v in ids if v < size - len(ids))


class Counting(nn.Module):
    """Sizes that come together in all ways that forms know, and in one that they do not."""

    def __init__(self, width: int = 96, heads: int = 12, places: int = 40) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(width)
        self.head_dim = width // heads
        self.fused = nn.Linear(width, 3 * width)
        self.table = nn.Embedding(places + 2, width)
        self.odd = nn.Linear(width, width // 3 * 2 + heads)


def test_forms() -> None:
    """Products, ratios and lines of sizes are recognised; what is none of these is no form."""
    (recipe,) = find_recipes(Counting(), Counting)
    forms = {q.key: q.formula for q in learn_quantities(recipe, {})}
    other = {"width": 120, "heads": 10, "places": 30}
    made = read_quantities(Counting(**other))
    for key, form in forms.items():
        if key[:2] in (("odd", "weight"), ("odd", "bias"), ("odd", "out_features")) and key.dim < 1:
            assert form is None
        else:
            assert form is not None and (key not in made or form.evaluate(other) == made[key]), key


def test_the_search_is_sound() -> None:
    """Whatever it gives keeps divisibility, ratios and order, and the first is small."""
    (recipe,) = find_recipes(Counting(), Counting)
    known = learn_quantities(recipe, {})
    rules = SizeRules((AxisRanks(6, 3),), (), frozenset({QuantityPlace("table", "weight", 0)}))
    found = next(iter(SizeSearch(recipe.sizes, known, rules)))
    assert found["width"] % 3 == 0 and found["heads"] % 3 == 0 and found["width"] < 96
    assert found["width"] % found["heads"] == 0 and found["places"] + 2 >= 16
    assert found["width"] // found["heads"] == 8  # a ratio of sizes, and small: kept


@given(st.lists(st.sampled_from("AB"), min_size=1))
def test_neighbours(layers: list[str]) -> None:
    """Doubling a run changes nothing once it has two layers; a new kind or seam changes it."""
    runs = [x for x in layers for _ in range(2)]
    longer = [x for x in layers for _ in range(3)]
    assert adjacent_kinds(runs) == adjacent_kinds(longer)
    assert adjacent_kinds(runs) != adjacent_kinds([*runs, "C"])


def test_a_recipe_of_nested_configs() -> None:
    """Numbers inside nested configs are sizes too, and lists of layers are cut with them."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    with torch.device("meta"):
        model = Gemma2ForCausalLM(Gemma2Config(num_hidden_layers=6))
    recipe: ModelRecipe = next(iter(find_recipes(model)))
    made = recipe.make_on_meta({"num_hidden_layers": 4})
    assert made is not None and len(made.config.layer_types) == 4
    assert model.config.num_hidden_layers == len(model.config.layer_types) == 6


def test_verify_from_python() -> None:
    """`shrink=False` refuses a model without values, `shrink=True` reduces one that has them."""
    with torch.device("meta"):
        sch = schedlang.create_schedule(Watcher())
    with pytest.raises(Refusal, match="meta device"):
        schedlang.verify(sch, batch=series, shrink=False)
    with pytest.raises(Refusal, match="meta device"):
        schedlang.verify(sch, batch=series)
