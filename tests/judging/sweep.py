"""Sweep over libraries: tiny transformers models of each family, judged under each variant.

    python -m tests.judging.sweep --ways tp,fsdp --families llama,olmo2 --out found.jsonl

`verify_program` judges each pair, with dropout and padded rows.  Each verdict is a line of the
file; pairs with the same versions are not run again, so an interrupted sweep can be resumed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import schedlang
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime.launch.pool import Pool
from schedlang.runtime.launch.rank_job import Hang, RankDied

TIMEOUT = 90.0  # seconds of one verdict
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "attention_head_dim": 8,
    "query_pre_attn_scalar": 8,
    "max_position_embeddings": 64,
    "sliding_window": 4,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 8,
    "attention_dropout": 0.1,
    "use_cache": False,
}


def build_model(family: str) -> Any:
    """Return the family's language model with random weights, in tiny sizes."""
    import transformers

    config_class = transformers.CONFIG_MAPPING[family]
    defaults = config_class()
    sizes = {name: size for name, size in SIZES.items() if hasattr(defaults, name)}
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(defaults, name, None) is not None:
            sizes[name] = 0
    config = config_class(**sizes)
    config._experts_implementation = "batched_mm"  # grouped_mm does not support float64
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config)


def ragged_batch(seed: int) -> dict[str, torch.Tensor]:
    """Return four rows of 6 to 12 tokens, padded at the end."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 96, (4, 12), generator=generator)
    lengths = torch.randint(6, 13, (4, 1), generator=generator)
    padding = torch.arange(12) >= lengths
    return {
        "input_ids": ids.masked_fill(padding, 0),
        "attention_mask": (~padding).long(),
        "labels": ids.masked_fill(padding, -100),
    }


def load_split(model: Any, **sizes: int) -> Any:
    """Reload the model with its own parallel plans; rotary frequencies stay as in float32."""
    from transformers.distributed import DistributedConfig

    loaded = type(model).from_pretrained(
        None,
        config=model.config,
        state_dict=model.state_dict(),
        dtype=model.dtype,
        experts_implementation="batched_mm",
        distributed_config=DistributedConfig(**sizes),
    )
    for buffer, original in zip(loaded.buffers(), model.buffers(), strict=True):
        buffer.copy_(original)
    for (
        name,
        original,
    ) in model.named_parameters():  # loading forgets what is frozen, on one rank too
        loaded.get_parameter(name).requires_grad_(original.requires_grad)
    return loaded


def full_batch(model: Any) -> schedlang.TrainingProgram:
    """Return a program in which each rank sees the full batch: weights are split."""

    def step(batch: Any) -> torch.Tensor:
        loss = model(**batch).loss
        loss.backward()
        return loss

    return schedlang.TrainingProgram(model, step)


def data_parallel(model: Any, replicas: int, replica: int) -> schedlang.TrainingProgram:
    """Return a program in which each replica sees its own rows, and gradients are averaged."""

    def step(batch: Any) -> torch.Tensor:
        tokens = (batch["labels"][:, 1:] != -100).sum()
        local = {name: rows.chunk(replicas)[replica] for name, rows in batch.items()}
        loss = model(**local, num_items_in_batch=tokens).loss * replicas
        loss.backward()
        return loss

    return schedlang.TrainingProgram(model, step)


def _world_and_rank() -> tuple[int, int]:
    return torch.distributed.get_world_size(), torch.distributed.get_rank()


def tensor_parallel(model: Any) -> schedlang.TrainingProgram:
    """Tensor parallelism by `tp_plan` over all ranks."""
    return full_batch(load_split(model, tp_size=_world_and_rank()[0]))


def tensor_and_expert(model: Any) -> schedlang.TrainingProgram:
    """Tensor and expert parallelism over the same ranks."""
    ranks, _ = _world_and_rank()
    return full_batch(load_split(model, tp_size=ranks, ep_size=ranks))


def fully_sharded(model: Any) -> schedlang.TrainingProgram:
    """FSDP2 by the family's plan."""
    ranks, rank = _world_and_rank()
    return data_parallel(load_split(model, fsdp_size=ranks), ranks, rank)


def expert_parallel(model: Any) -> schedlang.TrainingProgram:
    """FSDP2, and experts over half of the ranks."""
    ranks, rank = _world_and_rank()
    return data_parallel(load_split(model, fsdp_size=ranks, ep_size=ranks // 2), ranks, rank)


def fsdp_tp_ep(model: Any) -> schedlang.TrainingProgram:
    """FSDP2 over pairs of ranks with tensor and expert parallelism."""
    ranks, rank = _world_and_rank()
    model_split = load_split(model, fsdp_size=ranks // 2, tp_size=2, ep_size=2)
    return data_parallel(model_split, ranks // 2, rank // 2)


def accelerated(model: Any, version: int) -> schedlang.TrainingProgram:
    """Accelerate: DistributedDataParallel, or FSDP in one of its versions."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    shards = None
    if version:
        shards = FullyShardedDataParallelPlugin(
            fsdp_version=version, auto_wrap_policy="transformer_based_wrap"
        )
    wrapped = Accelerator(cpu=True, fsdp_plugin=shards).prepare(model)
    return data_parallel(wrapped, *_world_and_rank())


def replicated(model: Any) -> schedlang.TrainingProgram:
    """Accelerate with DistributedDataParallel."""
    return accelerated(model, 0)


def accelerate_sharded(model: Any) -> schedlang.TrainingProgram:
    """Accelerate with FSDP2."""
    return accelerated(model, 2)


def fsdp1(model: Any) -> schedlang.TrainingProgram:
    """Accelerate with FSDP1, whose parameters are flat."""
    return accelerated(model, 1)


def zero(model: Any, stage: int) -> schedlang.TrainingProgram:
    """DeepSpeed ZeRO: parameters are set, and gradients read, by its own calls."""
    from tests.judging.deepspeed_engine import Engine

    engine = Engine(model, stage)
    replicas, replica = _world_and_rank()

    def step(batch: Any) -> torch.Tensor:
        engine.write()
        tokens = (batch["labels"][:, 1:] != -100).sum()
        local = {name: rows.chunk(replicas)[replica] for name, rows in batch.items()}
        loss = engine.engine(**local, num_items_in_batch=tokens).loss * replicas
        engine.engine.backward(loss)
        engine.read()
        engine.engine.step()  # learning rate 0: only clears the gradients
        return loss

    return schedlang.TrainingProgram(engine.whole, step)


def zero1(model: Any) -> schedlang.TrainingProgram:
    """ZeRO 1."""
    return zero(model, 1)


def zero2(model: Any) -> schedlang.TrainingProgram:
    """ZeRO 2."""
    return zero(model, 2)


def zero3(model: Any) -> schedlang.TrainingProgram:
    """ZeRO 3."""
    return zero(model, 3)


def add_adapters(model: Any, wide: bool = False) -> Any:
    """Add PEFT adapters to all linear layers, or only to column-parallel ones of the plan.

    PEFT 0.21.2 refuses layers that a plan splits by rows.
    """
    from peft import LoraConfig, get_peft_model

    targets: Any = "all-linear"
    if wide:
        plan = {name.rpartition(".")[2]: style for name, style in model.tp_plan.items()}
        linear = {
            name.rpartition(".")[2]
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and module is not model.get_output_embeddings()
        }
        targets = sorted(name for name in linear if plan.get(name) == "colwise")
    experts = any(p.dim() > 2 for p in model.parameters())  # adapters of experts support no dropout
    dropout = 0.0 if experts else 0.1
    return get_peft_model(model, LoraConfig(r=4, lora_dropout=dropout, target_modules=targets))


def peft_replicated(model: Any) -> schedlang.TrainingProgram:
    """Adapters of PEFT under DistributedDataParallel."""
    return data_parallel(torch.nn.parallel.DistributedDataParallel(model), *_world_and_rank())


def peft_sharded(model: Any) -> schedlang.TrainingProgram:
    """Adapters of PEFT under FSDP2, sharded with their blocks."""
    from torch.distributed.fsdp import fully_shard

    blocks = set(model.get_base_model()._no_split_modules)
    for module in list(model.modules()):
        if type(module).__name__ in blocks:
            fully_shard(module)
    fully_shard(model)
    return data_parallel(model, *_world_and_rank())


def peft_split(model: Any) -> schedlang.TrainingProgram:
    """Adapters of PEFT on a model that transformers has split by its plan."""
    from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    adapter, config = get_peft_model_state_dict(model), model.peft_config["default"]
    split_model = get_peft_model(load_split(model.unload(), tp_size=_world_and_rank()[0]), config)
    set_peft_model_state_dict(split_model, adapter)
    return full_batch(split_model.train())  # the loaded model is in eval mode, and adapters are not


def unchanged(model: Any) -> Any:
    """Return the family's model unchanged."""
    return model


@dataclass(frozen=True)
class Variant:
    """A program, its number of ranks, and how the family's model is prepared before."""

    program: Callable[[Any], schedlang.TrainingProgram]
    ranks: int = 2
    original: Callable[[Any], Any] = unchanged
    pooled: bool = True  # a library that never releases its groups needs new processes each time


VARIANTS = {
    "tp": Variant(tensor_parallel),
    "tp4": Variant(tensor_parallel, 4),
    "tp+ep": Variant(tensor_and_expert),
    "fsdp": Variant(fully_sharded),
    "fsdp+ep": Variant(expert_parallel, 4),
    "fsdp+tp+ep": Variant(fsdp_tp_ep, 4),
    "accelerate ddp": Variant(replicated),
    "accelerate fsdp1": Variant(fsdp1),
    "accelerate fsdp2": Variant(accelerate_sharded),
    "deepspeed zero1": Variant(zero1, pooled=False),
    "deepspeed zero2": Variant(zero2, pooled=False),
    "deepspeed zero3": Variant(zero3, pooled=False),
    "peft ddp": Variant(peft_replicated, original=add_adapters),
    "peft fsdp2": Variant(peft_sharded, original=add_adapters),
    "peft tp": Variant(peft_split, original=partial(add_adapters, wide=True)),
}


def families() -> Iterator[str]:
    """Yield the language models of transformers that have a tensor parallel plan."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    for family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if family in CONFIG_MAPPING and CONFIG_MAPPING[family].base_model_tp_plan:
            yield family


def verdict_of(family: str, variant: Variant, seed: int, pool: Pool) -> dict[str, Any]:
    """Return the verdict on a family under a variant: `ok`, and the first difference."""
    try:
        model = variant.original(build_model(family))
    except Exception as error:
        return {"ok": None, "said": f"not built: {type(error).__name__}: {error}"}
    try:
        with nullcontext(pool) if variant.pooled else Pool() as ranks:
            report = schedlang.verify_program(
                variant.program,
                model=model,
                batch=ragged_batch,
                ranks=variant.ranks,
                seed=seed,
                timeout=TIMEOUT,
                pool=ranks,
            )
    except (Refusal, RankDied, Hang) as error:
        return {"ok": None, "said": str(error)}
    gaps = [str(gap.condition) for gap in report.gaps]
    _, _, difference = str(report).partition("first difference")
    return {"ok": report.ok, "said": difference, "gaps": gaps}


def main() -> None:
    """Judge the requested pairs that are not yet in the file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--families", default="", help="names with commas; default: all with a plan"
    )
    parser.add_argument("--ways", default="tp", help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    versions = {name: version(name) for name in ("torch", "transformers", "accelerate")}
    lines = arguments.out.read_text().splitlines() if arguments.out.exists() else ()
    verdicts = [json.loads(line) for line in lines]
    chosen_families = arguments.families.split(",") if arguments.families else list(families())
    with Pool() as pool:
        for variant in arguments.ways.split(","):
            for family in chosen_families:
                for seed in range(arguments.seeds):
                    key = {"family": family, "way": variant, "seed": seed, **versions}
                    if any(key.items() <= done_line.items() for done_line in verdicts):
                        continue
                    began = time.monotonic()
                    line = key | verdict_of(family, VARIANTS[variant], seed, pool)
                    line["seconds"] = round(time.monotonic() - began, 1)
                    with arguments.out.open("a") as out:
                        print(json.dumps(line), file=out)
                    verdict = {True: "equal", False: "DIFFERS", None: "did not run"}[line["ok"]]
                    print(
                        f"{variant} {family} {seed}: {verdict} in {line['seconds']} s", flush=True
                    )


if __name__ == "__main__":
    main()
