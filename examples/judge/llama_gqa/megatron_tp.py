"""Tensor parallelism of Megatron-Core for Llama: grouped queries, rotary positions, gates."""

import contextlib

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from torch.nn.functional import silu

import schedlang

torch.cuda.current_device = lambda: "cpu"  # it asks for the device of buffers
tensor_parallel.get_cuda_rng_tracker().fork = contextlib.nullcontext  # nothing drops here

world = 2


def program(model):
    """Build `GPTModel` of this rank's part of all layers, with the weights of `model`."""
    hf_config, dtype = model.config, model.lm_head.weight.dtype
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        dist.get_world_size(), create_gloo_process_groups=False
    )
    config = TransformerConfig(
        num_layers=hf_config.num_hidden_layers,
        hidden_size=hf_config.hidden_size,
        ffn_hidden_size=hf_config.intermediate_size,
        num_attention_heads=hf_config.num_attention_heads,
        num_query_groups=hf_config.num_key_value_heads,
        normalization="RMSNorm",
        layernorm_epsilon=hf_config.rms_norm_eps,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=dist.get_world_size(),
        params_dtype=dtype,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
    )
    gpt = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        hf_config.vocab_size,
        hf_config.max_position_embeddings,
        position_embedding_type="rope",
    )
    gpt.to(dtype)  # norms are made in float32
    gpt.rotary_pos_emb.inv_freq = model.model.rotary_emb.inv_freq
    with torch.no_grad():
        for name, weight in weights(model):
            gpt.get_parameter(name).copy_(weight)

    def step(batch):
        ids, labels = batch["input_ids"][:, :-1], batch["labels"][:, 1:]
        later = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        losses = gpt(ids, None, later[None, None], labels=labels.clamp(min=0))
        loss = losses[labels != -100].mean()
        loss.backward()
        return loss

    return schedlang.TrainingProgram(gpt, step, world_loss="same")


def own(weight, dim=0):
    """Return this rank's part of a weight."""
    return weight.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def weights(model):
    """Yield Megatron's names and this rank's weights: three projections are one, group by group."""
    yield "embedding.word_embeddings.weight", own(model.model.embed_tokens.weight)
    yield "output_layer.weight", own(model.lm_head.weight)
    yield "decoder.final_layernorm.weight", model.model.norm.weight
    for index, layer in enumerate(model.model.layers):
        heads, mlp, prefix = layer.self_attn, layer.mlp, f"decoder.layers.{index}"
        parts = (
            projection.weight.unflatten(0, (model.config.num_key_value_heads, -1))
            for projection in (heads.q_proj, heads.k_proj, heads.v_proj)
        )
        fused = torch.cat([*parts], 1).flatten(0, 1)
        gated = torch.cat([own(mlp.gate_proj.weight), own(mlp.up_proj.weight)])
        yield f"{prefix}.self_attention.linear_qkv.weight", own(fused)
        yield f"{prefix}.self_attention.linear_proj.weight", own(heads.o_proj.weight, 1)
        yield f"{prefix}.mlp.linear_fc1.weight", gated
        yield f"{prefix}.mlp.linear_fc2.weight", own(mlp.down_proj.weight, 1)
        yield f"{prefix}.input_layernorm.weight", layer.input_layernorm.weight
        yield f"{prefix}.pre_mlp_layernorm.weight", layer.post_attention_layernorm.weight
