"""Generation by encoder-decoder models under schedules equals that of the original."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from schedlang.diagnostics.diagnostic import Refusal
from tests.engine import Threads
from tests.training.test_generate import (
    generate_all,
    generate_on_ranks,
    prompts,
    schedule_from,
    schedule_of,
)

SPECIAL_TOKENS: dict[str, Any] = {"eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 3}
LENGTH = {"max_new_tokens": 9}


def t5() -> nn.Module:
    """Return a model whose first layer makes a position bias for all."""
    return T5ForConditionalGeneration(
        T5Config(
            **SPECIAL_TOKENS
            | {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4},
            num_layers=2,
            tie_word_embeddings=False,
            initializer_factor=3.0,
        )
    )


SIZES: dict[str, Any] = {
    **SPECIAL_TOKENS | {"vocab_size": 96, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2},
    **{"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "init_std": 0.4},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4},
}


def bart() -> nn.Module:
    """Return a model with learned positions, counted by the length of the cache."""
    return BartForConditionalGeneration(
        BartConfig(**SIZES, max_position_embeddings=64, forced_eos_token_id=None, bos_token_id=3)
    )


def whisper() -> nn.Module:
    """Return a model that reads sound, with its own loop around transformers'."""
    return WhisperForConditionalGeneration(
        WhisperConfig(
            **SIZES, max_source_positions=8, max_target_positions=24, num_mel_bins=5, bos_token_id=3
        )
    )


T5_TP = """
decoder.block.*.layer.2.DenseReluDense.wi  shard(col, over=tp)
decoder.block.*.layer.2.DenseReluDense.wo  shard(row, over=tp)
"""
BART_TP = """
model.decoder.layers.*.self_attn.{q_proj,k_proj,v_proj}  shard(col, over=tp)
model.decoder.layers.*.self_attn.out_proj  shard(row, over=tp)
model.decoder.layers.*.encoder_attn.{q_proj,k_proj,v_proj}  shard(col, over=tp)
model.decoder.layers.*.encoder_attn.out_proj  shard(row, over=tp)
"""
T5_STAGES = (
    'encoder.block, decoder.block  pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)\n'
)
BART_STAGES = (
    "model.encoder.layers, model.decoder.layers  pipeline_split(over=pp)\n"
    'pipeline(order="1F1B", micro=2)\n'
)


def sounds(rows: int) -> dict[str, Tensor]:
    """Return a recording as Whisper reads it: sixteen spectra of five numbers."""
    draw = torch.Generator().manual_seed(3)
    return {"input_features": torch.randn(rows, 5, 16, generator=draw, dtype=torch.float64)}


def generate_original(make: Any, counts: tuple[int, ...], options: dict[str, Any]) -> list[Any]:
    """Return what the original generates for each number of prompts."""
    torch.manual_seed(0)
    model = make().double()
    return generate_all(model.eval(), counts, LENGTH | options, input_maker(model))


def generate_scheduled(
    threads: Threads, make: Any, text: str, counts: tuple[int, ...], options: dict[str, Any]
) -> list[list[Any]]:
    """Return what each rank of the program generates."""
    torch.manual_seed(0)
    model, ids = make().double(), torch.ones(8, 8, dtype=torch.long)
    make_inputs = input_maker(model)
    batch = {"input_ids": ids} if make_inputs is prompts else sounds(8)
    batch = {**batch, "labels": ids}
    return generate_on_ranks(
        threads, schedule_from(model, text), batch, counts, LENGTH | options, make_inputs
    )


def input_maker(model: nn.Module) -> Any:
    """Return the function that makes the inputs of a model."""
    return sounds if isinstance(model, WhisperForConditionalGeneration) else prompts


@pytest.mark.parametrize(
    ("make", "text", "world"),
    [
        (t5, f"mesh(tp=2)\n{T5_TP}", 2),
        (t5, f"mesh(pp=2)\n{T5_STAGES}", 2),
        (t5, "mesh(dp=2)\nzero(stage=3, over=dp)\n", 2),
        (bart, f"mesh(tp=2)\n{BART_TP}", 2),
        (bart, f"mesh(pp=2, tp=2)\n{BART_TP}{BART_STAGES}", 4),
        (whisper, f"mesh(dp=2, pp=2)\n{BART_STAGES}zero(stage=1, over=dp)\n", 4),
    ],
    ids=["t5 tp", "t5 pp", "t5 zero", "bart tp", "bart pp tp", "whisper dp pp"],
)
@pytest.mark.parametrize("cached", [True, False], ids=["cached", "whole"])
def test_tokens_are_those_of_the_original(
    threads: Threads, make: Any, text: str, world: int, cached: bool
) -> None:
    """Greedy, with padded prompts, and with fewer prompts than there are parts."""
    options = {"use_cache": cached, "min_new_tokens": 8, "no_repeat_ngram_size": 1}
    expected_all = generate_original(make, (5, 1), options)
    assert all(len({*expected.flatten().tolist()}) > 4 for expected in expected_all)
    ranks = generate_scheduled(threads, make, text, (5, 1), options)
    assert len(ranks) == world
    for tokens in ranks:
        assert all(map(torch.equal, expected_all, tokens)) and len(tokens) == len(expected_all)


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "temperature": 1.5},
        {"num_return_sequences": 3, "do_sample": True},
        {"num_beams": 3, "use_cache": False},
        {"decoder_input_ids": torch.tensor([[3, 5, 8]]).repeat(4, 1)},
    ],
    ids=["sampled", "several for a prompt", "beams", "a beginning"],
)
def test_settings_are_followed(threads: Threads, options: dict[str, Any]) -> None:
    """Settings of transformers' loop, on ranks that are seeded equally."""
    text = f"mesh(pp=2)\n{T5_STAGES}"
    (expected,) = generate_original(t5, (4,), options)
    for (tokens,) in generate_scheduled(threads, t5, text, (4,), options):
        assert torch.equal(expected, tokens)


def test_what_it_cannot_follow_is_refused(threads: Threads) -> None:
    """Given encoder outputs are no input of the program; beam search would move rows of a cache."""
    for name, value in {"encoder_outputs": torch.zeros(4, 6, 32), "num_beams": 2}.items():
        (code,) = threads.run(refusal_of, 1, {name: value})
        assert code == "S627"


def refusal_of(options: dict[str, Any]) -> str:
    ids = torch.ones(8, 8, dtype=torch.long)
    head = "schedule 1 for T5ForConditionalGeneration\n\nmesh(dp=1)\n"
    program = schedule_of(t5(), head).build(batch={"input_ids": ids, "labels": ids})
    with pytest.raises(Refusal) as caught:
        program.generate(**prompts(4), use_cache=True, max_new_tokens=3, **options)
    return caught.value.diagnostic.code
