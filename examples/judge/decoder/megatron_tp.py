"""Tensor parallelism of Megatron-Core: its GPTModel, on the CPU, given the original's weights."""

import contextlib

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig

import schedlang

LAYERS = {  # the original's name, and the dim that ranks split
    "input_layernorm": ("before_attention", None),
    "self_attention.linear_proj": ("out", 1),
    "pre_mlp_layernorm": ("before_mlp", None),
    "mlp.linear_fc1": ("up", 0),
    "mlp.linear_fc2": ("down", 1),
}

torch.cuda.current_device = lambda: "cpu"  # it asks for the device of buffers
tensor_parallel.get_cuda_rng_tracker().fork = contextlib.nullcontext  # nothing drops here

world = 2


def program(model):
    """Build `GPTModel` of this rank's part of all layers, with the weights of `model`."""
    ranks, dtype = dist.get_world_size(), model.head.weight.dtype
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(ranks, create_gloo_process_groups=False)
    config = TransformerConfig(
        num_layers=len(model.blocks),
        hidden_size=model.embed.embedding_dim,
        num_attention_heads=model.embed.embedding_dim // model.blocks[0].head_width,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=ranks,
        params_dtype=dtype,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
    )
    size = model.embed.num_embeddings
    gpt = GPTModel(config, get_gpt_layer_local_spec(), size, 64, position_embedding_type="none")
    gpt.to(dtype)  # norms are made in float32
    with torch.no_grad():
        for name, weight, dim in weights(model):
            part = weight if dim is None else weight.chunk(ranks, dim)[dist.get_rank()]
            gpt.get_parameter(name).copy_(part)

    def step(batch):
        ids, labels = batch["ids"][:, :-1], batch["ids"][:, 1:]
        later = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        loss = gpt(ids, None, later[None, None], labels=labels).mean()
        loss.backward()
        return loss

    return schedlang.TrainingProgram(gpt, step, world_loss="same")


def weights(model):
    """Yield Megatron's names, weights, and the dim of a part: projections are one, head by head."""
    yield "embedding.word_embeddings.weight", model.embed.weight, 0
    yield "output_layer.weight", model.head.weight, 0
    for kind in ("weight", "bias"):
        yield f"decoder.final_layernorm.{kind}", getattr(model.norm, kind), None
        for index, block in enumerate(model.blocks):
            heads = (
                getattr(layer, kind).unflatten(0, (-1, block.head_width))
                for layer in (block.query, block.key, block.value)
            )
            fused = torch.stack([*heads], 1).flatten(0, 2)
            yield f"decoder.layers.{index}.self_attention.linear_qkv.{kind}", fused, 0
            for name, (original, dim) in LAYERS.items():
                split = dim if kind == "weight" or dim == 0 else None
                weight = getattr(getattr(block, original), kind)
                yield f"decoder.layers.{index}.{name}.{kind}", weight, split
