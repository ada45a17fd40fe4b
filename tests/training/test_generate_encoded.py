"""Tokens that decoders with an encoder generate under schedules are those of the original."""

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
from tests.training.test_generate import drawn, generated, of_text, prompts, scheduled

ENDS: dict[str, Any] = {"eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 3}
LENGTH = {"max_new_tokens": 9}


def t5() -> nn.Module:
    """Positions by a bias that the first layer makes for all."""
    return T5ForConditionalGeneration(
        T5Config(
            **ENDS | {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4},
            num_layers=2,
            tie_word_embeddings=False,
            initializer_factor=3.0,
        )
    )


SIZES: dict[str, Any] = {
    **ENDS | {"vocab_size": 96, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2},
    **{"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "init_std": 0.4},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4},
}


def bart() -> nn.Module:
    """Learned positions, counted by what the cache has seen."""
    return BartForConditionalGeneration(
        BartConfig(**SIZES, max_position_embeddings=64, forced_eos_token_id=None, bos_token_id=3)
    )


def whisper() -> nn.Module:
    """Sound in place of tokens; a loop of its own around transformers'."""
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
    """What a recording is to Whisper: sixteen spectra of five numbers."""
    draw = torch.Generator().manual_seed(3)
    return {"input_features": torch.randn(rows, 5, 16, generator=draw, dtype=torch.float64)}


def alone(make: Any, counts: tuple[int, ...], options: dict[str, Any]) -> list[Any]:
    """What the original generates for each number of prompts."""
    torch.manual_seed(0)
    model = make().double()
    return drawn(model.eval(), counts, LENGTH | options, asked(model))


def ours(
    threads: Threads, make: Any, text: str, counts: tuple[int, ...], options: dict[str, Any]
) -> list[list[Any]]:
    """What the program does on each rank."""
    torch.manual_seed(0)
    model, ids = make().double(), torch.ones(8, 8, dtype=torch.long)
    given = asked(model)
    batch = {"input_ids": ids} if given is prompts else sounds(8)
    batch = {**batch, "labels": ids}
    return generated(threads, of_text(model, text), batch, counts, LENGTH | options, given)


def asked(model: nn.Module) -> Any:
    """What makes the inputs of a model."""
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
    """Greedily, with padded prompts, and with fewer prompts than there are parts."""
    options = {"use_cache": cached, "min_new_tokens": 8, "no_repeat_ngram_size": 1}
    wanted = alone(make, (5, 1), options)
    assert all(len({*expected.flatten().tolist()}) > 4 for expected in wanted)
    found = ours(threads, make, text, (5, 1), options)
    assert len(found) == world
    for one in found:
        assert all(map(torch.equal, wanted, one)) and len(one) == len(wanted)


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
    """What transformers' loop knows to do, on ranks that are seeded alike."""
    text = f"mesh(pp=2)\n{T5_STAGES}"
    (expected,) = alone(t5, (4,), options)
    for (found,) in ours(threads, t5, text, (4,), options):
        assert torch.equal(expected, found)


def test_what_it_cannot_follow_is_refused(threads: Threads) -> None:
    """What an encoder gave elsewhere is no input of the program; beams move rows of a cache."""
    for name, value in {"encoder_outputs": torch.zeros(4, 6, 32), "num_beams": 2}.items():
        (code,) = threads.run(_refused, 1, {name: value})
        assert code == "S627"


def _refused(options: dict[str, Any]) -> str:
    ids = torch.ones(8, 8, dtype=torch.long)
    head = "schedule 1 for T5ForConditionalGeneration\n\nmesh(dp=1)\n"
    program = scheduled(t5(), head).build(batch={"input_ids": ids, "labels": ids})
    with pytest.raises(Refusal) as caught:
        program.generate(**prompts(4), use_cache=True, max_new_tokens=3, **options)
    return caught.value.diagnostic.code
