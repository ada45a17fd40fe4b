"""Generation: tokens of sharded programs equal those of the original, with a key-value cache."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MambaConfig,
    MambaForCausalLM,
    MiniMaxConfig,
    MiniMaxForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
)

import schedlang
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import Source
from schedlang.ir.plan import Plan
from schedlang.language.syntax import parse
from schedlang.passes.lower.build import build
from schedlang.passes.prove import Case
from schedlang.passes.verify.proof_case import prepare_case
from schedlang.schedule import Schedule, Settings
from tests.engine import Threads
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
SPLIT = """
model.layers.*.self_attn.q_proj, model.layers.*.self_attn.k_proj  shard(col, over=tp)
model.layers.*.self_attn.v_proj  shard(col, over=tp)
model.layers.*.self_attn.o_proj  shard(row, over=tp)
model.layers  pipeline_split(over=pp)
pipeline(order="1F1B", micro=2)
"""
STAGES = "".join(f"{line}\n" for line in SPLIT.splitlines()[-2:])
SEQUENCES = """
model.embed_tokens  shard(vocab, over=tp)
model.layers.*.self_attn.{q,k,v}_proj  shard(col, over=tp)
model.layers.*.self_attn.o_proj  shard(row, output=S(seq), over=tp)
model.layers.*.mlp.{gate,up}_proj  shard(col, over=tp)
model.layers.*.mlp.down_proj  shard(row, output=S(seq), over=tp)
model.layers.*.{input,post_attention}_layernorm  shard(input=S(seq), output=S(seq), over=tp)
model.norm  shard(input=S(seq), output=S(seq), over=tp)
lm_head  shard(vocab, over=tp)
"""
RING_BLOCKS = "transformer.h.*  context_parallel(ring, over=cp)\n"
RING = "model.layers.*.self_attn  context_parallel(ring, layout=zigzag, over=cp)\n"


def mistral() -> nn.Module:
    """Return a model whose layers attend to the last four tokens."""
    return MistralForCausalLM(MistralConfig(**SMALL | {"num_hidden_layers": 2}, sliding_window=4))


def gemma2() -> nn.Module:
    """Return a model whose every other layer attends to the last four tokens."""
    return Gemma2ForCausalLM(Gemma2Config(**SMALL, sliding_window=4))


def gpt2() -> nn.Module:
    """Return a model whose positions are looked up in a table."""
    config = GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    return GPT2LMHeadModel(config)


def llama4() -> nn.Module:
    """Return a model with a layer that attends to chunks of four tokens, counted after the
    padding."""
    two = SMALL | {"num_hidden_layers": 2, "num_local_experts": 2, "moe_layers": []}
    return Llama4ForCausalLM(
        Llama4TextConfig(**two, intermediate_size_mlp=48, attention_chunk_size=4)
    )


def bloom() -> nn.Module:
    """Return a model that computes attention scores itself."""
    return BloomForCausalLM(BloomConfig(vocab_size=96, hidden_size=32, n_layer=2, n_head=4))


def mamba() -> nn.Module:
    """Return a model with a state instead of keys and values."""
    return MambaForCausalLM(MambaConfig(vocab_size=96, hidden_size=16, num_hidden_layers=1))


def rwkv() -> nn.Module:
    """Return a model whose forward makes and returns its states, without a cache of
    transformers'."""
    return RwkvForCausalLM(RwkvConfig(vocab_size=96, hidden_size=16, num_hidden_layers=2))


def minimax() -> nn.Module:
    """Return a model whose forward makes a cache class of its own, of keys, values and sums."""
    return MiniMaxForCausalLM(
        MiniMaxConfig(
            **SMALL | {"num_hidden_layers": 2},
            layer_types=["linear_attention", "full_attention"],
            block_size=4,
            num_local_experts=2,
        )
    )


def example_model(family: str) -> nn.Module:
    """Return the model of an example."""
    model: nn.Module = importlib.import_module(f"examples.{family}.model").model()
    return model


def prompts(rows: int, tokens: int = 6) -> dict[str, Tensor]:
    """Return prompts of some tokens, some padded on the left."""
    ids = torch.randint(1, 90, (rows, tokens), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1::2, :2] = 0
    return {"inputs": ids, "attention_mask": mask}


def schedule_of(model: nn.Module, text: str) -> Schedule:
    """Return the schedule of a text."""
    return Schedule(model, parse(Source("generate.sched", text)), Settings())


IDS = torch.ones(8, 8, dtype=torch.long)
BATCH = {"input_ids": IDS, "labels": IDS}
MASKED = {**BATCH, "attention_mask": IDS, "position_ids": torch.arange(8).expand(8, 8)}


def example_rows(name: str, dp: int = 2) -> str:
    """Return the rows of an example's file, for so many replicas."""
    return (ROOT / name).read_text().replace("dp=_", f"dp={dp}")


def schedule_from(model: nn.Module, text: str) -> Schedule:
    """Return the schedule of some rows, or of an example's file."""
    if text.endswith(".sched"):
        return schedlang.create_schedule(model, text)
    if text.startswith("schedule"):
        return schedule_of(model, text)
    return schedule_of(model, f"schedule 1 for {type(model).__name__}\n\n{text}")


def build_program(model: nn.Module, text: str) -> Any:
    """Build the program of a text, prepared on each rank."""
    return schedule_from(model, text).build(batch=BATCH)


def seeded_model(model: Any) -> Any:
    """Return a model with the same values each time."""
    torch.manual_seed(0)
    result = model()
    if any("experts" in name for name, _ in result.named_modules()):
        return result  # torch multiplies groups in float32 and less
    return result.double()


def generate_original(
    model: Any, counts: Sequence[Any], options: dict[str, Any], inputs: Any = prompts
) -> list[Any]:
    """Return what the original generates for each number of prompts."""
    return generate_all(seeded_model(model).eval(), counts, options, inputs)


def generate_on_ranks(
    threads: Threads, schedule: Schedule, batch: Any, counts: Sequence[Any], *args: Any
) -> list[list[Any]]:
    """Return what each rank of the program generates; it is prepared once for all."""
    case = prepare_case(Case(schedule.plan(), (batch,)))
    all_args = case.plan, case.prepared, batch, counts, *args
    results: list[list[Any]] = threads.run(generate_on_rank, case.plan.mesh.world, *all_args)
    return results


def generate_on_rank(plan: Plan, ready: Any, batch: Any, *args: Any) -> list[Any]:
    return generate_all(build(plan, batch, prepared=ready), *args)


def generate_unprepared(model: Any, text: str, *args: Any) -> list[Any]:
    return generate_all(build_program(seeded_model(model), text), *args)


def generate_all(
    of: Any, counts: Sequence[Any], options: dict[str, Any], given: Any = prompts
) -> list[Any]:
    """Generate from inputs by a model or a program, each time from the same seed."""
    tokens = []
    for rows in counts:
        torch.manual_seed(7)
        tokens.append(of.generate(**given(rows) | {"use_cache": True} | options))
    return tokens


def model_maker(name: str) -> Any:
    """Return a function that makes the model of an example."""
    return lambda: example_model(name)


@pytest.mark.parametrize(
    ("model", "text", "world"),
    [
        (model_maker("gpt2"), example_rows("examples/gpt2/3d.sched"), 8),
        (model_maker("llama"), "examples/llama/3d.sched", 4),
        (model_maker("llama"), "examples/llama/v_half.sched", 2),
        (model_maker("mixtral"), "examples/mixtral/ep.sched", 4),
        (mistral, f"mesh(pp=2, tp=2)\n{SPLIT}", 4),
        (gemma2, f"mesh(pp=2, tp=2)\n{SPLIT}", 4),
    ],
    ids=["gpt2", "llama", "llama, two stages a rank", "mixtral", "mistral", "gemma2"],
)
def test_tokens_are_those_of_the_original(
    threads: Threads, model: Any, text: str, world: int
) -> None:
    """Greedy, with padded prompts, and with fewer prompts than there are parts."""
    args = (5, 1), {"max_new_tokens": 9}
    expected_all = generate_original(model, *args)
    if text.endswith(".sched"):  # its mesh takes what ranks there are, each of which prepares it
        ranks = threads.run(generate_unprepared, world, model, text, *args)
    else:
        ranks = generate_on_ranks(threads, schedule_from(seeded_model(model), text), BATCH, *args)
    assert len(ranks) == world
    for rank_tokens in ranks:
        for rows, expected, tokens in zip((5, 1), expected_all, rank_tokens, strict=True):
            assert torch.equal(expected, tokens)
            assert tokens.shape[0] == rows and tokens.shape[1] > 6


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "temperature": 1.5, "top_k": 20},
        {"num_beams": 3, "use_cache": False},
        {"use_cache": False},
        {"num_return_sequences": 2, "do_sample": True},
        {"repetition_penalty": 1.5, "eos_token_id": 11},
    ],
    ids=["sampled", "beams", "without a cache", "several for a prompt", "ended early"],
)
def test_settings_are_followed(threads: Threads, options: dict[str, Any]) -> None:
    """Settings by which transformers' loop changes scores, on ranks that are seeded equally."""
    text = f"mesh(pp=2)\n{SPLIT.splitlines()[-2]}\n{SPLIT.splitlines()[-1]}\n"
    args = (4,), options | {"max_new_tokens": 8}
    (expected,) = generate_original(model_maker("llama"), *args)
    for (tokens,) in generate_on_ranks(
        threads, schedule_from(seeded_model(model_maker("llama")), text), BATCH, *args
    ):
        assert torch.equal(expected, tokens)


@pytest.mark.parametrize(
    ("text", "world", "options"),
    [
        (f"mesh(tp=2)\n{SEQUENCES}", 2, {"use_cache": True}),
        (f"mesh(tp=2)\n{SEQUENCES}", 2, {"use_cache": True, "do_sample": True}),
        (f"mesh(tp=2)\n{SEQUENCES}", 2, {"use_cache": False}),
        (f"mesh(cp=2)\n{RING}", 2, {"use_cache": False}),
        (f"mesh(cp=2)\n{RING}", 2, {"use_cache": True}),
        (f"mesh(cp=2, tp=2)\n{RING}{SEQUENCES}", 4, {"use_cache": True}),
        (f"mesh(cp=2)\n{RING.replace('ring, layout=zigzag', 'ulysses')}", 2, {"use_cache": True}),
    ],
    ids=["tensor", "sampled", "without a cache", "ring alone", "ring", "ring, tensor", "ulysses"],
)
def test_sequences_that_rows_split(
    threads: Threads, text: str, world: int, options: dict[str, Any]
) -> None:
    """Prompts and single tokens that ranks cannot share evenly, padded, with and without a cache:
    the tokens of the original; padding behind them is not cached."""
    args: Any = ((4, 6), (3, 5), (1, 7)), {"max_new_tokens": 5} | options, long_prompts
    expected = generate_original(model_maker("llama"), *args)
    schedule = schedule_from(seeded_model(model_maker("llama")), text)
    assert schedule.plan().mesh.world == world
    for tokens in generate_on_ranks(threads, schedule, MASKED, *args):
        assert all(map(torch.equal, expected, tokens)) and len(tokens) == len(expected)


@pytest.mark.parametrize(
    ("model", "text", "world"),
    [
        (gpt2, f"mesh(cp=4)\n{RING_BLOCKS}", 4),
        (
            gpt2,
            f"mesh(pp=2, cp=2)\n{RING_BLOCKS}{STAGES.replace('model.layers', 'transformer.h')}",
            4,
        ),
        (mistral, f"mesh(pp=2, cp=2)\n{RING}{STAGES}", 4),
        (mistral, f"mesh(a=2, b=2)\n{RING.replace('ring', 'usp').replace('cp', '(a, b)')}", 4),
        (llama4, f"mesh(cp=4)\n{RING}", 4),
    ],
    ids=["gpt2", "gpt2, stages", "mistral, stages", "mistral, usp", "llama4"],
)
def test_keys_and_values_are_kept_by_tokens(
    threads: Threads, model: Any, text: str, world: int
) -> None:
    """Attention reads the cache of other ranks: windows, chunks, padding, one token."""
    args: Any = ((3, 7), (1, 1)), {"max_new_tokens": 9, "eos_token_id": None}, long_prompts
    expected = generate_original(model, *args)
    ranks = generate_on_ranks(threads, schedule_from(seeded_model(model), text), MASKED, *args)
    assert len(ranks) == world and all(all(map(torch.equal, expected, tokens)) for tokens in ranks)


def test_ranks_keep_as_many_tokens(threads: Threads) -> None:
    """Four ranks cache 17 tokens, 6 of them a prompt's: four each, and one a fifth.

    For the prompt alone no rank computes an additional row.
    """
    schedule = schedule_from(seeded_model(model_maker("llama")), f"mesh(cp=4)\n{RING}")
    case = prepare_case(Case(schedule.plan(), (MASKED,)))
    ranks = threads.run(kept_on_rank, 4, case.plan, case.prepared)
    positions = [position for positions_kept, _, _ in ranks for position in positions_kept]
    assert sorted(positions) == list(range(17))
    assert sorted(len(positions_kept) for positions_kept, _, _ in ranks) == [4, 4, 4, 5]
    for positions_kept, shapes, size in ranks:
        assert {(shape[0], shape[2]) for shape in shapes} == {(1, len(positions_kept))}
        assert abs(size / sum(nbytes for *_, nbytes in ranks) - 0.25) < 0.05


KEEP_OPTIONS = {"max_new_tokens": 12, "use_cache": True, "return_dict_in_generate": True}


def kept_on_rank(plan: Plan, ready: Any) -> tuple[list[int], list[tuple[int, ...]], int]:
    """Return the positions of the cached tokens of a rank, and shapes and bytes of their keys and
    values."""
    program = build(plan, MASKED, prepared=ready)
    output = program.generate(**prompts(1), **KEEP_OPTIONS)
    cache = output.get("cache", output.get("past_key_values"))
    tensors = [tensor for pair in cache.part(0)._held.values() for tensor in pair]
    size = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    return cache.turns.positions.tolist(), [tuple(tensor.shape) for tensor in tensors], size


def long_prompts(size: tuple[int, int]) -> dict[str, Tensor]:
    return prompts(*size)


def test_keys_and_values_are_kept_where_they_are_made(threads: Threads) -> None:
    """After the prompt a forward has one token; a rank caches its layers, heads and rows."""
    for rank, (lengths, shapes) in enumerate(threads.run(watch_cache, 4)):
        if rank < 2:
            assert lengths == [6, 6, 1, 1, 1, 1]  # two microbatches, three tokens
        layers = {0, 1} if rank < 2 else {2, 3}
        assert set(shapes) == layers
        assert set(shapes.values()) == {(2, 1, 8, 8)}  # rows, heads, tokens, width


def watch_cache() -> tuple[list[int], dict[int, tuple[int, ...]]]:
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**SMALL))
    program = build_program(model, f"mesh(pp=2, tp=2)\n{SPLIT}")
    lengths: list[int] = []
    embedding = program.assembly.module.model.embed_tokens
    embedding.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    output = program.generate(**prompts(4), max_new_tokens=3, return_dict_in_generate=True)
    cache = output.get("cache", output.get("past_key_values"))
    parts = [cache.part(k)._held for k in (0, 1)]
    assert [*parts[0]] == [*parts[1]]
    return lengths, {layer: tuple(keys.shape) for layer, (keys, _) in parts[0].items()}


def test_between_two_steps(threads: Threads) -> None:
    """Generation uses the trained weights, and does not change later training."""
    ids = torch.arange(48).reshape(8, 6)
    batch = {"input_ids": ids, "labels": ids}
    model, rows = (
        seeded_model(model_maker("llama")),
        f"mesh(dp=2, pp=2)\n{STAGES}zero(stage=3, over=dp)\n",
    )
    case = prepare_case(Case(schedule_from(model, rows).plan(), (batch,)))
    for tokens, state, losses in threads.run(train_on_rank, 4, case.plan, case.prepared, batch):
        model.load_state_dict(state)
        assert torch.equal(model.eval().generate(**prompts(3), max_new_tokens=6), tokens)
        assert losses[0] == losses[1]


def train_on_rank(plan: Plan, ready: Any, batch: Any) -> tuple[Tensor, Any, list[list[float]]]:
    losses: list[list[float]] = []
    for generates in (True, False):
        program = build(plan, batch, optimizer=lambda p: torch.optim.SGD(p, lr=0.5), prepared=ready)
        run_losses = [float(program.train_step(batch))]
        if generates:
            tokens = program.generate(**prompts(3), max_new_tokens=6)
            state = program.state_dict()
        run_losses += [float(program.train_step(batch)) for _ in range(2)]
        losses.append(run_losses)
    return tokens, state, losses


@pytest.mark.parametrize(
    ("model", "text", "options", "said"),
    [
        (model_maker("bert"), "mesh(dp=1)\n", {}, "`BertForMaskedLM` has no `generate`"),
        (model_maker("llama"), "mesh(dp=1)\n", {"max_time": 3.0}, "`max_time` is not supported"),
        (model_maker("llama"), "mesh(dp=1)\n", {"num_beams": 2}, "moves their rows"),
        (
            model_maker("llama"),
            "mesh(dp=1)\n",
            {"cache_implementation": "static"},
            "`StaticCache` is not supported",
        ),
        (mamba, "mesh(dp=1)\n", {}, "more than keys and values"),
        (rwkv, "mesh(dp=1)\n", {}, "more than keys and values"),
        (minimax, "mesh(dp=1)\n", {}, "more than keys and values"),
    ],
    ids=[
        *("no generate", "a clock", "beams", "a static cache", "a state"),
        *("states of its own", "a cache of its own"),
    ],
)
def test_what_it_cannot_follow_is_refused(
    threads: Threads, model: Any, text: str, options: dict[str, Any], said: str
) -> None:
    """The refusal says what is legal instead."""
    (refusal,) = threads.run(refusal_of, 1, model, text, options)
    assert refusal.code == "S627" and said in refusal.title and refusal.helps


def refusal_of(model: Any, text: str, options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    with pytest.raises(Refusal) as caught:
        inputs = {"use_cache": True, "max_new_tokens": 3, **options}
        build_program(model(), text).generate(**prompts(4) | inputs)
    return caught.value.diagnostic


@pytest.mark.parametrize(
    ("model", "text", "options", "said"),
    [
        (model_maker("llama"), RING, {}, "was not in the batch of `build`"),
        (bloom, RING_BLOCKS, {"attention_mask": None}, "by tokens"),
    ],
    ids=["a mask", "products of its own"],
)
def test_what_split_attention_cannot_follow(
    threads: Threads, model: Any, text: str, options: dict[str, Any], said: str
) -> None:
    """Masks that were not in the batch of `build`, and keys that no attention function receives."""
    for refusal in threads.run(refusal_of, 2, model, f"mesh(cp=2)\n{text}", options):
        assert refusal.code == "S627" and said in refusal.title and refusal.helps


def test_evaluation_takes_names_that_the_program_knows(threads: Threads) -> None:
    """A mask that no batch had before is refused: its split is unknown."""
    for diagnostic in threads.run(evaluate_masked, 2):
        assert diagnostic.code == "S619" and "attention_mask" in diagnostic.title


def evaluate_masked() -> Any:
    ids = torch.ones(8, 8, dtype=torch.long)
    with pytest.raises(Refusal) as caught:
        program = build_program(example_model("llama"), f"mesh(cp=2)\n{RING}")
        program.eval_step({"input_ids": ids, "attention_mask": ids})
    return caught.value.diagnostic


@pytest.mark.parametrize("model", [mamba, rwkv, minimax])
def test_what_is_offered_in_place_of_a_cache_gives_the_tokens(threads: Threads, model: Any) -> None:
    """Where states are refused, `use_cache=False` generates the tokens of the original."""
    args: Any = (4,), {"use_cache": False, "max_new_tokens": 4}
    text = "mesh(dp=2)\nzero(stage=3, over=dp)\n"
    (expected,) = generate_original(model, *args)
    for (tokens,) in generate_on_ranks(
        threads, schedule_from(seeded_model(model), text), BATCH, *args
    ):
        assert torch.equal(expected, tokens)


@pytest.mark.parametrize("odd", ["prompt", "setting", "generator"])
def test_ranks_are_given_the_same(odd: str) -> None:
    """Different prompts, settings or seeds on one rank are refused on all: the loop would hang."""
    for message in run_ranks(2, generate_unequal, odd):
        assert "S650" in message


def generate_unequal(rank: int, odd: str) -> str:
    program = build_program(example_model("llama"), "mesh(dp=2)\nzero(stage=0, over=dp)\n")
    torch.manual_seed(rank if odd == "generator" else 0)
    inputs = prompts(4)
    if odd == "prompt":
        inputs["inputs"][0, 0] += rank
    new_tokens = 3 + rank if odd == "setting" else 3
    with pytest.raises(Refusal) as caught:
        program.generate(**inputs, do_sample=True, max_new_tokens=new_tokens)
    return str(caught.value)
