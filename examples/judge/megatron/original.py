"""GPT of Megatron-Core, tiny, on one rank, with the parts of it that run without a GPU."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer import TransformerConfig

torch.cuda.current_device = lambda: "cpu"  # where Megatron-Core puts its buffers
initialize_rng_tracker(inference_rng_tracker=True)  # the other one seeds CUDA


def build(ranks: int) -> GPTModel:
    """Two blocks, four query heads on two key/value heads, split over so many ranks."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=48,
        gated_linear_unit=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=ranks,
        use_cpu_initialization=True,
        params_dtype=torch.get_default_dtype(),
    )
    return GPTModel(config, get_gpt_layer_local_spec(), vocab_size=64, max_sequence_length=16)


def model() -> GPTModel:
    """The whole model on one rank."""
    return build(1)


def batch(seed: int) -> dict[str, torch.Tensor]:
    """Four rows of ten tokens, where each attends to what came before."""
    tokens = torch.randint(64, (4, 11), generator=torch.Generator().manual_seed(seed))
    return {
        "input_ids": tokens[:, :-1],
        "position_ids": torch.arange(10).expand(4, 10),
        "attention_mask": torch.ones(4, 1, 10, 10, dtype=torch.bool).triu(1),
        "labels": tokens[:, 1:],
    }


def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean of the losses of all tokens, which is what the model returns."""
    return output.mean()
