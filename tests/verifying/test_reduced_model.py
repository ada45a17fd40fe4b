"""Verification on a reduced model: what is kept of the full model, and what is refused."""

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
from schedlang.passes.reduce_model.shrink import (
    ReducedModel,
    reduce_to_given,
    shrink,
    small_meshes,
)
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


def llama_70b(**changes: Any) -> nn.Module:
    """Return a model with the sizes of Llama 3 70B on the meta device."""
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
    """Return a function of a seed: ragged batches of ids, up to the end of the vocabulary."""

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


def reduce_model(
    model: nn.Module,
    text: str,
    batch: Callable[[int], Mapping[str, Any]] | None = None,
    **options: Any,
) -> ReducedModel:
    """Reduce a model under a schedule without a header."""
    tree = parse(Source("big.sched", f"schedule 1\n\n{text}"))
    make_batch = batch or tokens(128256)
    settings = options.pop("settings", Settings())
    return shrink(tree, settings, model, [make_batch(seed) for seed in range(3)], **options)


def step_text(rows: str, mesh: str) -> str:
    """Return the text of a mesh and one step."""
    return f'mesh({mesh})\n\nstep "all" {{\n{rows}}}\n'


# -- what is kept --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reduced_70b() -> ReducedModel:
    """Return the reduction of the model of 80 layers under three axes, which tests only read."""
    return reduce_model(llama_70b(), step_text(BLOCK + PIPELINE, "dp=16, pp=8, tp=8"))


def test_llama_70b(reduced_70b: ReducedModel) -> None:
    """The reduction keeps ratios of heads, divisibility, order of widths, two layers per stage and
    all rows at all kinds of sites; everything else becomes small."""
    reduced = reduced_70b
    config = reduced.plan.model.model.config
    assert dict(reduced.plan.mesh.axes) == {"dp": 2, "pp": 2, "tp": 2}
    assert config.num_attention_heads == 8 * config.num_key_value_heads
    assert config.num_key_value_heads == 2 and config.num_hidden_layers == 4
    assert config.head_dim % 2 == 0 and config.head_dim >= 4
    assert config.hidden_size == config.num_attention_heads * config.head_dim
    assert config.hidden_size < config.intermediate_size < config.vocab_size < 100
    assert config.vocab_size % 2 == 0 and config.intermediate_size % 2 == 0
    assert [a.name for a in reduced.plan.actions].count("shard") == 6
    assert not any(p.is_meta for p in reduced.plan.model.model.parameters())
    assert (
        "num_hidden_layers 80 -> 4" in reduced.description
        and "dp=16, pp=8, tp=8 -> dp=2" in reduced.description
    )
    assert any("ranks along `dp`" in gap.condition for gap in reduced.gaps)


def test_special_ids_and_padding(reduced_70b: ReducedModel) -> None:
    """Ids fit the reduced vocabulary; ignored labels and padding are kept, labels still match their
    tokens, and special ids stay different."""
    reduced, config = reduced_70b, reduced_70b.plan.model.model.config
    assert len({0, config.bos_token_id, config.eos_token_id}) == 3
    assert config.eos_token_id < config.vocab_size
    for batch in reduced.batches:
        ids, labels, mask = (batch[key] for key in ("input_ids", "labels", "attention_mask"))
        assert ids.min() >= 0 and ids.max() < config.vocab_size and ids.shape == labels.shape
        assert torch.equal(labels != -100, mask == 1) and (mask == 0).any()
        assert torch.equal(ids[mask == 1], labels[mask == 1])
    assert len({len(batch["input_ids"]) for batch in reduced.batches}) > 1


def test_selectors_keep_their_meaning() -> None:
    """A slice of layers still selects some and not all; the last layer stays the last."""
    rows = "  model.layers[:5]  checkpoint()\n  model.layers[-1]  offload(activations, to=cpu)\n"
    reduced = reduce_model(llama_70b(), step_text(BLOCK + rows, "tp=16").replace("tp=16", "tp=8"))
    first_rule, last_rule = reduced.plan.actions[-2:]
    layers = len(reduced.plan.model.children("model.layers"))
    assert len(first_rule.sites) == 5 and last_rule.sites == (f"model.layers.{layers - 1}",)
    assert layers == 8  # five, two that neither row names, and the last


def test_kinds_of_layers() -> None:
    """With layers of two kinds each stage keeps both, as in the full model."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    with torch.device("meta"):
        model = Gemma2ForCausalLM(Gemma2Config(use_cache=False, num_hidden_layers=24))
    rows = "  model.layers  pipeline_split(over=pp)\n  pipeline(order=GPipe, micro=2)\n"
    reduced = reduce_model(
        model, step_text(rows.replace("GPipe", '"GPipe"'), "pp=12"), tokens(256000)
    )
    config = reduced.plan.model.model.config
    assert config.num_hidden_layers == len(config.layer_types) == 4
    assert reduced.plan.mesh.sizes == {"pp": 2}


class WindowLayer(nn.Module):
    """A layer whose computation depends on an attribute."""

    def __init__(self, width: int, index: int, window: object) -> None:
        super().__init__()
        self.up, self.place, self.window = nn.Linear(width, width), index, window

    def forward(self, x: Tensor) -> Tensor:
        """Apply softmax if `window` is set."""
        x = self.up(x)
        return x.softmax(-1) if self.window else x


@pytest.mark.parametrize("window", [True, 4, 0.5, "w8", (2, 0.5)])
def test_a_layer_that_is_told_otherwise(window: object) -> None:
    """One layer of twelve differs only by an attribute: it is kept; equal layers are removed,
    although each stores its index."""

    def model(layers: int = 12, width: int = 64) -> nn.Module:
        windows = [window if index == 4 else type(window)() for index in range(layers)]
        layered = nn.Sequential(
            *(WindowLayer(width, index, layer_window) for index, layer_window in enumerate(windows))
        )
        return nn.Sequential(layered)

    def loss(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return output.square().mean()

    batch = lambda seed: {"input": torch.zeros(8, 64)}  # noqa: E731
    reduced = reduce_model(
        model(), step_text("  zero(stage=1, over=dp)\n", "dp=2"), batch, make=model, loss=loss
    )
    layers = list(reduced.plan.model.model.get_submodule("0"))
    assert len(layers) < 12 and any(getattr(layer, "window", False) for layer in layers)


def test_oddness_and_padding() -> None:
    """An indivisible vocabulary stays indivisible, the padded one divides, with a real row on the
    last rank."""
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
    reduced = reduce_model(model, step_text(rows, "tp=16").replace("16", "16"), tokens(50257))
    config, layout = reduced.plan.model.model.config, reduced.plan.layout("transformer.wte.weight")
    assert config.vocab_size % 2 == 1 and layout.padded[0] % 64 == 0
    assert config.vocab_size > layout.padded[0] // 2
    assert config.n_head % 2 == 1 and config.n_embd % config.n_head == 0


def test_experts() -> None:
    """There are still more experts than are selected, and equally many are selected."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(use_cache=False, experts_implementation="batched_mm")
    with torch.device("meta"):
        model = MixtralForCausalLM(config)
    rows = "  lm_head  shard(vocab, over=tp)\n"
    reduced = reduce_model(model, step_text(rows, "tp=16"), tokens(32000)).plan.model.model.config
    assert reduced.num_experts_per_tok == 2 < reduced.num_local_experts < 8


def test_what_is_frozen_stays_frozen() -> None:
    """Frozen layers at both ends stay frozen in the reduced model, and no others."""
    model = llama_70b()
    for name, tensor in model.named_parameters():
        tensor.requires_grad_(not name.startswith(("model.layers.0.", "model.layers.79.")))
    reduced_module = reduce_model(
        model, step_text(BLOCK, "tp=16").replace("16", "8")
    ).plan.model.model
    last = len(reduced_module.model.layers) - 1
    assert last >= 3
    frozen = {n.split(".")[2] for n, p in reduced_module.named_parameters() if not p.requires_grad}
    assert frozen == {"0", str(last)}


# -- what is refused -----------------------------------------------------------------------------


def refusal_text(*args: Any, **options: Any) -> str:
    """Return the message of a refused reduction."""
    with pytest.raises(Refusal) as caught:
        reduce_model(*args, **options)
    return caught.value.render()


def test_divisibility_of_the_whole_model() -> None:
    """Eight key-value heads on sixteen ranks: wrong only at full size, and refused."""
    message = refusal_text(llama_70b(), step_text(BLOCK, "tp=16"))
    assert "S403" in message and "num_key_value" not in message and "big.sched:" in message, message


def test_more_stages_than_layers() -> None:
    """Too many stages at full size are refused."""
    message = refusal_text(llama_70b(), step_text(BLOCK + PIPELINE, "dp=2, pp=96, tp=8"))
    assert "S613" in message and "80 modules cannot be cut into 96 stages" in message, message


def test_a_changed_model() -> None:
    """A model that was changed after construction is refused."""
    model = llama_70b()
    model.model.layers[3].mlp = nn.Identity()
    norms = "  model.layers.*.input_layernorm  checkpoint()\n"
    assert "S751" in refusal_text(model, step_text(norms, ""))
    model = llama_70b()
    model.model.layers[3].self_attn.attention_dropout = 0.5
    assert "S751" in refusal_text(model, step_text(norms, ""))


@pytest.mark.deep
def test_absolute_sizes() -> None:
    """Cut points fix the number of stages: refused if no small mesh has as many."""
    names = ", ".join(str(k) for k in range(8, 80, 8))
    rows = f'  model.layers[{names}]  pipeline_split(over=pp)\n  pipeline(order="1F1B", micro=10)\n'
    assert "S609" in refusal_text(llama_70b(), step_text(rows, "pp=10"))


def test_a_number_of_unknown_meaning() -> None:
    """A number per row that could be a row length is refused."""
    batch = {
        "input_ids": torch.ones(4, 50, dtype=torch.long),
        "lengths": torch.tensor([50, 4, 9, 1]),
    }
    with pytest.raises(Refusal, match="S753"):
        reduce_batch(batch, BatchReduction({}, {}, (), (1, 1)))


def test_a_model_of_unknown_sizes() -> None:
    """A model without config and without a function of sizes is refused with a suggestion."""
    message = refusal_text(Watcher(), step_text("  blocks.*  checkpoint()\n", "tp=1"), series)
    assert "S751" in message and "`small()`" in message and "width: int" in message


# -- other sources of small models ---------------------------------------------------------------


def test_a_function_of_sizes() -> None:
    """Default arguments of `model()` are reduced like sizes of a config."""

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
        full_model = model()

    def loss(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return output.square().mean()

    text = step_text(rows, "pp=12, tp=12")
    reduced = reduce_model(full_model, text, series, make=model, loss=loss)
    small_one = reduced.plan.model.model
    assert isinstance(small_one, Watcher) and len(small_one.blocks) == 4
    eyes, width = small_one.blocks[0].gaze.eyes, small_one.blocks[0].gaze.span
    assert reduced.plan.mesh.sizes == {"pp": 2, "tp": 3}
    assert eyes % 3 == 0 and eyes >= 2 * 3 and width % eyes == 0 and width < 100


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_a_small_model_without_dropout_is_a_gap(rate: float) -> None:
    """Where `small()` drops nothing and the full model does, the report says so."""
    full_model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1))
    smaller = nn.Sequential(nn.Linear(4, 4), nn.Dropout(rate))
    text = step_text("  0  shard(col, output=R, over=tp)\n", "tp=2")
    tree = parse(Source("big.sched", f"schedule 1\n\n{text}"))
    batches = [{"input": torch.ones(2, 4)}]
    reduced = reduce_to_given(tree, Settings(), full_model, smaller, batches)
    assert any("Dropout.p" in gap.condition for gap in reduced.gaps) == (rate == 0)


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


def run_command(*arguments: object) -> Any:
    """Run a command in this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.deep
def test_verify_of_70b_on_meta(tmp_path: Path) -> None:
    """A model on the meta device is automatically verified on a reduced one, and the report says
    what was reduced."""
    (tmp_path / "model.py").write_text(MODEL)
    file = tmp_path / "big.sched"
    file.write_text(f"schedule 1 for LlamaForCausalLM\n\n{step_text(BLOCK, 'tp=8')}")
    result = run_command("verify", file, "--mesh", "tp=2", "--dtype", "none", "--verbose")
    assert result.exit_code == 0, result.output
    output = " ".join(result.output.split())
    assert "num_hidden_layers 80 -> 2" in output and "mesh tp=8 -> tp=2" in output
    assert "not exercised: the sizes of the whole model" in output


def test_small_of_the_model_file(tmp_path: Path) -> None:
    """`small()` and `small_batch(seed)` of the model file define the small model."""
    (tmp_path / "model.py").write_text(
        "import torch\nfrom examples.custom.model import Watcher, batch, loss\n"
        "def model():\n    return Watcher(width=960, blocks=24)\n"
        "def small():\n    return Watcher(width=24, eyes=2, blocks=2)\n"
        "def small_batch(seed):\n    return {k: v[:4] for k, v in batch(seed).items()}\n"
    )
    rows = "  blocks.*.gaze.look  shard(col, blocks=3, over=tp)\n"
    rows += "  blocks.*.gaze.blend  shard(row, over=tp)\n"
    file = tmp_path / "big.sched"
    file.write_text(f"schedule 1 for Watcher\n\n{step_text(rows, 'tp=2')}")
    result = run_command("verify", file, "--shrink", "--dtype", "none")
    output = " ".join(result.output.split())
    assert result.exit_code == 0 and "to the model of `small()`" in output, result.output


def test_a_bug_is_still_found(pool: Pool) -> None:
    """A missing sum of input gradients is found on the reduced model, in backward only."""
    reduced = reduce_model(
        llama_70b(), step_text(BLOCK, "tp=16").replace("16", "8"), settings=Settings(mesh={"tp": 2})
    )
    case = Case(reduced.plan, reduced.batches, dtype="none")
    report = prove(case, pool=Mutated(pool, enter_without_all_reduce))  # type: ignore[arg-type]
    assert report.exit_code == 1 and report.first is not None
    assert report.first.kind == "gradients", report.first


def test_a_require_that_bounds_the_mesh() -> None:
    """A `require` that holds only at full size is left out and reported as a gap; one that fails at
    full size is refused."""
    text = "mesh(tp=8)\n\nrequire model.config.hidden_size >= 1024\n\n"
    rows = step_text(BLOCK, "").partition("\n\n")[2]
    reduced = reduce_model(llama_70b(), text + rows, settings=Settings(mesh={"tp": 2}))
    assert any("require" in gap.condition for gap in reduced.gaps)
    assert "S104" in refusal_text(llama_70b(), text.replace("1024", "9999") + rows)


# -- components ----------------------------------------------------------------------------------


@given(st.dictionaries(st.sampled_from("abcd"), st.integers(1, 64), min_size=1))
def test_small_meshes(axes: dict[str, int]) -> None:
    """Every offered mesh has at most eight ranks and no larger axis than the full mesh; a small
    mesh is offered unchanged."""
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
    """Special ids stay different and fit the vocabulary; those that fit are mostly unchanged."""
    new_ids = special_ids(tuple(ids), size)
    assert set(new_ids) == ids and len(set(new_ids.values())) == len(ids)
    assert all(0 <= v < size for v in new_ids.values())
    assert all(new_ids[v] == v for v in ids if v < size - len(ids))


class SizedModel(nn.Module):
    """A model whose sizes are combined in all known forms, and in one unknown form."""

    def __init__(self, width: int = 96, heads: int = 12, places: int = 40) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(width)
        self.head_dim = width // heads
        self.fused = nn.Linear(width, 3 * width)
        self.table = nn.Embedding(places + 2, width)
        self.odd = nn.Linear(width, width // 3 * 2 + heads)


def test_forms() -> None:
    """Products, ratios and linear forms of sizes are recognised; others are not."""
    (recipe,) = find_recipes(SizedModel(), SizedModel)
    forms = {q.key: q.formula for q in learn_quantities(recipe, {})}
    other_sizes = {"width": 120, "heads": 10, "places": 30}
    quantities = read_quantities(SizedModel(**other_sizes))
    for key, formula in forms.items():
        if key[:2] in (("odd", "weight"), ("odd", "bias"), ("odd", "out_features")) and key.dim < 1:
            assert formula is None
        else:
            assert formula is not None and (
                key not in quantities or formula.evaluate(other_sizes) == quantities[key]
            ), key


def test_the_search_is_sound() -> None:
    """Found sizes keep divisibility, ratios and order, and the first ones are small."""
    (recipe,) = find_recipes(SizedModel(), SizedModel)
    quantities = learn_quantities(recipe, {})
    rules = SizeRules((AxisRanks(6, 3),), (), frozenset({QuantityPlace("table", "weight", 0)}))
    sizes = next(iter(SizeSearch(recipe.sizes, quantities, rules)))
    assert sizes["width"] % 3 == 0 and sizes["heads"] % 3 == 0 and sizes["width"] < 96
    assert sizes["width"] % sizes["heads"] == 0 and sizes["places"] + 2 >= 16
    assert sizes["width"] // sizes["heads"] == 8  # a ratio of sizes, and small: kept


@given(st.lists(st.sampled_from("AB"), min_size=1))
def test_neighbours(layers: list[str]) -> None:
    """Longer runs of equal layers change nothing beyond two; a new kind or neighbour does."""
    runs = [x for x in layers for _ in range(2)]
    longer = [x for x in layers for _ in range(3)]
    assert adjacent_kinds(runs) == adjacent_kinds(longer)
    assert adjacent_kinds(runs) != adjacent_kinds([*runs, "C"])


def test_a_recipe_of_nested_configs() -> None:
    """Numbers in nested configs are sizes, too; lists of layers are shortened with them."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    with torch.device("meta"):
        model = Gemma2ForCausalLM(Gemma2Config(num_hidden_layers=6))
    recipe: ModelRecipe = next(iter(find_recipes(model)))
    small_model = recipe.make_on_meta({"num_hidden_layers": 4})
    assert small_model is not None and len(small_model.config.layer_types) == 4
    assert model.config.num_hidden_layers == len(model.config.layer_types) == 6


def test_verify_from_python() -> None:
    """`shrink=False` refuses a model without values, `shrink=True` reduces one that has them."""
    with torch.device("meta"):
        sch = schedlang.create_schedule(Watcher())
    with pytest.raises(Refusal, match="meta device"):
        schedlang.verify(sch, batch=series, shrink=False)
    with pytest.raises(Refusal, match="meta device"):
        schedlang.verify(sch, batch=series)
