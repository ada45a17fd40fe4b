"""The sample schedules of the language reference, by name."""

SAMPLES = {
    "bert_1gpu.sched": """\
schedule 1 for BertForMaskedLM

# BERT-large on one GPU: fuse, swap kernels, recompute.
knob ckpt: int = 12 in 0..24

pattern bias_gelu(x, b) { gelu(x + b) }
pattern add_norm(x, r, w, b) { layer_norm(dropout(x) + r, w, b) }

step "kernels" relax(rng) {
  at bert.encoder.layer.* {
    attention.self  replace_kernel(sdpa)
    intermediate    decompose(bias)
    intermediate    fuse(bias_gelu, with=triton)
    at attention.output, output { fuse(add_norm, with=triton, rng=philox) }
  }
  verify(forward, backward, mode=eval, rtol=1e-3)
}

step "recompute" {
  bert.encoder.layer[:ckpt]  checkpoint()
  verify(forward, backward, exact)
}

expect peak_memory < 16GiB on v100
expect time(step) < 180ms on v100
""",
    "gpt2_tp.sched": """\
schedule 1 for GPT2LMHeadModel

# One-dimensional tensor parallelism, placed as Megatron places it.
knob tp: int = 2 in [1, 2, 4]

mesh(tp=tp) on a100x8

require model.config.n_head % tp == 0

step "tensor parallel" {
  transformer.wte  pad(vocab, multiple=128)  # 50257 divides by nothing useful
  transformer.wte  shard(vocab, over=tp)
  at transformer.h.* {
    attn.c_attn  shard(col, blocks=3, over=tp)  # q, k and v live side by side in one weight
    attn.c_proj  shard(row, over=tp)
    mlp.c_fc     shard(col, over=tp)
    mlp.c_proj   shard(row, over=tp)
  }
  lm_head  shard(col, output=R, over=tp)  # tied to wte: both must name the same split
  verify(forward, backward)
}
""",
    "llama_3d.sched": """\
schedule 1 for LlamaForCausalLM

use "megatron.sched" as megatron

# Llama-3 8B on 64 H100s: data x pipeline x tensor, optimizer state split over data.
knob tp: int = 8 in [1, 2, 4, 8]
knob pp: int = 2 in [1, 2, 4]
knob micro: int = 16 in 4..64
knob recompute: choice = selective in [none, selective, full]

mesh(dp=_, pp=pp, tp=tp) on h100x64

require micro % pp == 0
require model.config.num_key_value_heads % tp == 0

step "kernels" {
  model.**:LlamaRMSNorm     replace_kernel(liger.rms_norm)
  model.layers.*.self_attn  replace_kernel(flash_attention, causal=true)
  verify(forward, backward, rtol=2e-2)
}

step "tensor parallel" {
  at model.layers.* { megatron.decoder_block(over=tp, seq=true) }
  model.embed_tokens  shard(vocab, output=S(seq), over=tp)
  lm_head             shard(col, output=R, over=tp)
  verify(forward, backward)
}

step "memory" {
  when recompute == full {
    model.layers.*  checkpoint()
  }
  when recompute == selective {
    model.layers.*  checkpoint(save=[linear, flash_attention])
  }
  verify(forward, backward)
}

step "pipeline" {
  model.layers  pipeline_split(over=pp, balance=time)
  pipeline(order="Interleaved1F1B", micro=micro, chunks=2)
  zero(stage=1, over=dp)
  verify(train, steps=3)
}

expect peak_memory < 70GiB on h100x64
expect comm_bytes(tp) < 2GiB
""",
    "long_context.sched": """\
schedule 1 for LlamaForCausalLM

# One million tokens: ring attention across nodes, Ulysses inside each.
knob ring: int = 4 in [1, 2, 4, 8]
knob ulysses: int = 8 in [1, 2, 4, 8]

mesh(dp=_, ring=ring, ulysses=ulysses) on h200x32

view cp of (ring, ulysses)

require model.config.num_attention_heads % ulysses == 0

step "split the sequence" {
  shard(input_ids=S(seq, layout=zigzag), labels=S(seq, layout=zigzag), over=cp)
  at model.layers.*.self_attn {
    context_parallel(ulysses, over=ulysses)
    context_parallel(ring, over=ring, layout=zigzag)
  }
  verify(forward, backward, rtol=1e-3)
}

step "memory" {
  model.layers.*     checkpoint(save=[flash_attention])
  model.layers[::2]  offload(activations, to=cpu, prefetch=1)
  zero(stage=3, over=(dp, cp))
  verify(train, steps=2)
}

expect peak_memory < 130GiB on h200x32
""",
    "megatron.sched": """\
schedule 1

# A library: definitions only, no steps.  Bring it in with `use`.

def attention(over: axis, out=R) {
  {q,k,v}_proj  shard(col, over=over)
  o_proj        shard(row, output=out, over=over)
}

def swiglu(over: axis, out=R) {
  {gate,up}_proj  shard(col, over=over)
  down_proj       shard(row, output=out, over=over)
}

def decoder_block(over: axis, seq: bool = false) {
  when seq {
    {input,post_attention}_layernorm  shard(input=S(seq), output=S(seq), over=over)
    at self_attn { attention(over=over, out=S(seq)) }
    at mlp { swiglu(over=over, out=S(seq)) }
  } else {
    at self_attn { attention(over=over) }
    at mlp { swiglu(over=over) }
  }
}
""",
    "moe_ep.sched": """\
schedule 1 for MixtralForCausalLM

use "megatron.sched" as megatron

# Mixtral 8x7B: experts spread over the data and tensor axes folded into one.
mesh(dp=4, tp=2) on h100x8

view ep of (dp, tp)

require model.config.num_local_experts % ep == 0

step "attention" {
  at model.layers.*.self_attn { megatron.attention(over=tp) }
  verify(forward, backward)
}

step "experts" relax(routing) {
  at model.layers.*.mlp {
    experts  expert_parallel(over=ep, dispatch=all_to_all, capacity=1.25)  # capacity drops tokens
    gate     shard(weight=R, over=ep)
  }
  verify(loss, within=0.01, steps=200)
}

step "overlap" {
  model.layers.*.mlp  overlap(all_to_all, with=attention)
  zero(stage=2, over=dp)
  verify(train, steps=3)
}
""",
    "vit_debug.sched": """\
schedule 1

# The same schedule on one machine, with a cheaper split and no pipeline order.
use "vit_zb.sched" (micro=4)

override step "stages" {
  vit.layers  pipeline_split(over=pp, balance=params)
}

drop step "zero bubble"
""",
    "vit_zb.sched": """\
schedule 1 for ViTForImageClassification

# ViT-g in a zero-bubble pipeline: backward is split into input and weight halves.
knob micro: int = 8 in [4, 8, 16, 32]

mesh(dp=2, pp=4) on a100x8

require micro >= 2 * pp

step "stages" {
  vit.layers[10, 20, 30]  pipeline_split(over=pp, side=before)
  verify(forward, backward)
}

step "zero bubble" {
  at **:Linear except classifier { split_backward() }
  pipeline(order="ZBVZeroBubble", micro=micro)
  zero(stage=1, over=dp)
  verify(train, steps=3)
}
""",
}
