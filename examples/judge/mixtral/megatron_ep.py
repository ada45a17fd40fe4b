"""Expert parallelism of Megatron-Core for Mixtral: each rank has rows, and half of the experts."""

import contextlib

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils
from torch.nn.functional import silu

import schedlang

torch.cuda.current_device = lambda: "cpu"  # it asks for the device of buffers
tensor_parallel.get_cuda_rng_tracker().fork = contextlib.nullcontext  # nothing drops here
moe_utils.te_general_gemm = None  # 0.16.1 asks for it without Transformer Engine, too

world = 2


def program(model):
    """Build `GPTModel` of this rank's experts and of all else, with the weights of `model`."""
    ranks, rank, hf_config = dist.get_world_size(), dist.get_rank(), model.config
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        1, expert_model_parallel_size=ranks, create_gloo_process_groups=False
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
        num_moe_experts=hf_config.num_local_experts,
        moe_router_topk=hf_config.num_experts_per_tok,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather",
        expert_model_parallel_size=ranks,
        params_dtype=model.lm_head.weight.dtype,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
    )
    layers = get_gpt_layer_local_spec(
        num_experts=hf_config.num_local_experts, normalization="RMSNorm"
    )
    gpt = GPTModel(
        config,
        layers,
        hf_config.vocab_size,
        hf_config.max_position_embeddings,
        position_embedding_type="rope",
    )
    gpt.to(model.lm_head.weight.dtype)  # norms are made in float32
    gpt.rotary_pos_emb.inv_freq = model.model.rotary_emb.inv_freq
    with torch.no_grad():
        for name, weight in weights(model):
            gpt.get_parameter(name).copy_(weight)
    shared = [p for name, p in gpt.named_parameters() if ".experts." not in name]

    def step(batch):
        local = {name: rows.chunk(ranks)[rank] for name, rows in batch.items()}
        ids, labels = local["input_ids"][:, :-1], local["labels"][:, 1:]
        later = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        losses = gpt(ids, None, later[None, None], labels=labels.clamp(min=0))
        loss = losses[labels != -100].sum() / (batch["labels"][:, 1:] != -100).sum()
        loss.backward()
        for p in shared:  # experts have the gradients of all rows
            dist.all_reduce(p.grad)
        return loss

    return schedlang.TrainingProgram(gpt, step, world_loss="sum")


def weights(model):
    """Yield Megatron's names and this rank's weights: three projections are one, group by group."""
    ranks, rank, hf_config = dist.get_world_size(), dist.get_rank(), model.config
    yield "embedding.word_embeddings.weight", model.model.embed_tokens.weight
    yield "output_layer.weight", model.lm_head.weight
    yield "decoder.final_layernorm.weight", model.model.norm.weight
    for index, layer in enumerate(model.model.layers):
        heads, prefix = layer.self_attn, f"decoder.layers.{index}"
        parts = (
            projection.weight.unflatten(0, (hf_config.num_key_value_heads, -1))
            for projection in (heads.q_proj, heads.k_proj, heads.v_proj)
        )
        fused = torch.cat([*parts], 1).flatten(0, 1)
        yield f"{prefix}.self_attention.linear_qkv.weight", fused
        yield f"{prefix}.self_attention.linear_proj.weight", heads.o_proj.weight
        yield f"{prefix}.input_layernorm.weight", layer.input_layernorm.weight
        yield f"{prefix}.pre_mlp_layernorm.weight", layer.post_attention_layernorm.weight
        yield f"{prefix}.mlp.router.weight", layer.mlp.gate.weight
        for fc, weight_name in (("fc1", "gate_up_proj"), ("fc2", "down_proj")):
            local_experts = getattr(layer.mlp.experts, weight_name).chunk(ranks)[rank]
            for expert, weight in enumerate(local_experts):
                yield f"{prefix}.mlp.experts.local_experts.{expert}.linear_{fc}.weight", weight
