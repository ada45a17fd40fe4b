"""Planning at scale: python -m tests.benchmarks.plan_scale [--ranks 1024]

Times `plan` (rows, tracing, bytes, collectives, timeline, text) of a Llama-3-70B-shaped model on
the meta device, apart from imports, and prints the greatest memory of the process.
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path
from tempfile import TemporaryDirectory

MODEL = '''
"""Llama 3 70B in shape."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def model():
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
        num_attention_heads=64, num_key_value_heads=8, max_position_embeddings=8192,
        rope_theta=500000.0, use_cache=False, tie_word_embeddings=False,
    ))


def batch(seed):
    ids = torch.zeros(1024, 8192, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}
'''

SCHEDULE = """schedule 1 for LlamaForCausalLM

mesh(dp=%d, pp=8, tp=8)

step "tensor parallel" {
  model.embed_tokens  shard(vocab, over=tp)
  at model.layers.* {
    self_attn.{q,k,v}_proj  shard(col, over=tp)
    self_attn.o_proj        shard(row, over=tp)
    mlp.{gate,up}_proj      shard(col, over=tp)
    mlp.down_proj           shard(row, over=tp)
  }
  lm_head  shard(vocab, over=tp)
}

step "pipeline" {
  model.layers.*  checkpoint()
  model.layers    pipeline_split(over=pp)
  zero(stage=1, over=dp)
  pipeline(order="1F1B", micro=32)
}
"""


def main() -> None:
    """Plan once, and print time and memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1024, help="a multiple of 64")
    ranks = parser.parse_args().ranks
    start = time.perf_counter()
    import torch  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    from schedlang.verbs.inputs import account_costs, plan_schedule
    from schedlang.viz.show import format_view, make_view

    imported, cpu_time = time.perf_counter(), time.process_time()
    with TemporaryDirectory() as folder:
        file = Path(folder) / "llama70b.sched"
        file.write_text(SCHEDULE % (ranks // 64))
        file.with_name("model.py").write_text(MODEL)
        inputs = plan_schedule(file, None, None, None)
        rows = time.perf_counter()
        view_text = format_view(
            make_view(inputs.plan, account_costs(inputs), file.name, each=False), each=False
        )
    end, cpu_time = time.perf_counter(), time.process_time() - cpu_time
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(view_text)
    print(
        f"\n{inputs.plan.mesh.world} ranks, {len(inputs.plan.model.unique_parameters)} parameters"
    )
    print(f"  imports            {imported - start:.1f} s")
    print(
        f"  plan               {end - imported:.1f} s   limit 10 s (rows {rows - imported:.1f} s)"
    )
    print(f"  of CPU time        {cpu_time:.1f} s")
    print(f"  greatest memory    {peak:.2f} GiB   limit 2 GiB")


if __name__ == "__main__":
    main()
