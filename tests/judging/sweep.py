"""Other libraries over many models: each family of transformers, tiny, under each way to spread it.

    python -m tests.judging.sweep --ways tp,fsdp --families llama,olmo2 --out found.jsonl

`verify_program` judges each pair, with dropout on and ragged rows.  A verdict is a line of the
file, and what is there with the same versions is not run again: a sweep that was ended goes on.
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

LONGEST = 90.0  # seconds of one verdict
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


def built(family: str) -> Any:
    """The family's language model with random weights, in its smallest sizes."""
    import transformers

    kind = transformers.CONFIG_MAPPING[family]
    plain = kind()
    sizes = {name: size for name, size in SIZES.items() if hasattr(plain, name)}
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(plain, name, None) is not None:
            sizes[name] = 0
    config = kind(**sizes)
    config._experts_implementation = "batched_mm"  # grouped_mm knows no float64
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config)


def batch(seed: int) -> dict[str, torch.Tensor]:
    """Four rows of up to twelve tokens; their ends are padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 96, (4, 12), generator=generator)
    lengths = torch.randint(6, 13, (4, 1), generator=generator)
    padding = torch.arange(12) >= lengths
    return {
        "input_ids": ids.masked_fill(padding, 0),
        "attention_mask": (~padding).long(),
        "labels": ids.masked_fill(padding, -100),
    }


def split(model: Any, **sizes: int) -> Any:
    """Load the model anew by its own plans; rotary frequencies stay as they were in float32."""
    from transformers.distributed import DistributedConfig

    made = type(model).from_pretrained(
        None,
        config=model.config,
        state_dict=model.state_dict(),
        dtype=model.dtype,
        experts_implementation="batched_mm",
        distributed_config=DistributedConfig(**sizes),
    )
    for new, given in zip(made.buffers(), model.buffers(), strict=True):
        new.copy_(given)
    for name, given in model.named_parameters():  # loading, on one rank too, forgets what is frozen
        made.get_parameter(name).requires_grad_(given.requires_grad)
    return made


def whole_rows(model: Any) -> schedlang.TrainingProgram:
    """Each rank sees the whole batch: what is split are weights."""

    def step(batch: Any) -> torch.Tensor:
        loss = model(**batch).loss
        loss.backward()
        return loss

    return schedlang.TrainingProgram(model, step)


def own_rows(model: Any, replicas: int, replica: int) -> schedlang.TrainingProgram:
    """Each replica sees its rows, and gradients are averaged over them."""

    def step(batch: Any) -> torch.Tensor:
        tokens = (batch["labels"][:, 1:] != -100).sum()
        mine = {name: rows.chunk(replicas)[replica] for name, rows in batch.items()}
        loss = model(**mine, num_items_in_batch=tokens).loss * replicas
        loss.backward()
        return loss

    return schedlang.TrainingProgram(model, step)


def _place() -> tuple[int, int]:
    return torch.distributed.get_world_size(), torch.distributed.get_rank()


def tensor_parallel(model: Any) -> schedlang.TrainingProgram:
    """`tp_plan` over all ranks."""
    return whole_rows(split(model, tp_size=_place()[0]))


def tensor_and_expert(model: Any) -> schedlang.TrainingProgram:
    """`tp_plan` and `ep_plan` over the same ranks."""
    ranks, _ = _place()
    return whole_rows(split(model, tp_size=ranks, ep_size=ranks))


def fully_sharded(model: Any) -> schedlang.TrainingProgram:
    """FSDP2 by the family's plan."""
    ranks, rank = _place()
    return own_rows(split(model, fsdp_size=ranks), ranks, rank)


def experts_apart(model: Any) -> schedlang.TrainingProgram:
    """FSDP2, and experts over a half of the ranks."""
    ranks, rank = _place()
    return own_rows(split(model, fsdp_size=ranks, ep_size=ranks // 2), ranks, rank)


def three_ways(model: Any) -> schedlang.TrainingProgram:
    """FSDP2 over pairs of ranks that split tensors and experts."""
    ranks, rank = _place()
    made = split(model, fsdp_size=ranks // 2, tp_size=2, ep_size=2)
    return own_rows(made, ranks // 2, rank // 2)


def accelerated(model: Any, version: int) -> schedlang.TrainingProgram:
    """Accelerate: DistributedDataParallel, or FSDP in one of its versions."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    shards = None
    if version:
        shards = FullyShardedDataParallelPlugin(
            fsdp_version=version, auto_wrap_policy="transformer_based_wrap"
        )
    made = Accelerator(cpu=True, fsdp_plugin=shards).prepare(model)
    return own_rows(made, *_place())


def replicated(model: Any) -> schedlang.TrainingProgram:
    """Accelerate with DistributedDataParallel."""
    return accelerated(model, 0)


def accelerate_sharded(model: Any) -> schedlang.TrainingProgram:
    """Accelerate with FSDP2."""
    return accelerated(model, 2)


def flat(model: Any) -> schedlang.TrainingProgram:
    """Accelerate with FSDP1, whose parameters are flat."""
    return accelerated(model, 1)


def zero(model: Any, stage: int) -> schedlang.TrainingProgram:
    """ZeRO of DeepSpeed: parameters are set, and gradients read, by its own calls."""
    from tests.judging.deepspeed_engine import Engine

    made = Engine(model, stage)
    replicas, replica = _place()

    def step(batch: Any) -> torch.Tensor:
        made.write()
        tokens = (batch["labels"][:, 1:] != -100).sum()
        mine = {name: rows.chunk(replicas)[replica] for name, rows in batch.items()}
        loss = made.engine(**mine, num_items_in_batch=tokens).loss * replicas
        made.engine.backward(loss)
        made.read()
        made.engine.step()  # at rate 0: forgets the gradients
        return loss

    return schedlang.TrainingProgram(made.whole, step)


def zero1(model: Any) -> schedlang.TrainingProgram:
    """ZeRO 1."""
    return zero(model, 1)


def zero2(model: Any) -> schedlang.TrainingProgram:
    """ZeRO 2."""
    return zero(model, 2)


def zero3(model: Any) -> schedlang.TrainingProgram:
    """ZeRO 3."""
    return zero(model, 3)


def adapted(model: Any, wide: bool = False) -> Any:
    """Put adapters of PEFT at all linear layers, or at those that the family's plan splits wide.

    Those that a plan splits by rows are refused by PEFT 0.21.2.
    """
    from peft import LoraConfig, get_peft_model

    targets: Any = "all-linear"
    if wide:
        plan = {name.rpartition(".")[2]: way for name, way in model.tp_plan.items()}
        linear = {
            name.rpartition(".")[2]
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and module is not model.get_output_embeddings()
        }
        targets = sorted(name for name in linear if plan.get(name) == "colwise")
    experts = any(p.dim() > 2 for p in model.parameters())  # adapted ones take no dropout
    dropout = 0.0 if experts else 0.1
    return get_peft_model(model, LoraConfig(r=4, lora_dropout=dropout, target_modules=targets))


def peft_replicated(model: Any) -> schedlang.TrainingProgram:
    """Adapters of PEFT under DistributedDataParallel."""
    return own_rows(torch.nn.parallel.DistributedDataParallel(model), *_place())


def peft_sharded(model: Any) -> schedlang.TrainingProgram:
    """Adapters of PEFT under FSDP2, sharded with their blocks."""
    from torch.distributed.fsdp import fully_shard

    blocks = set(model.get_base_model()._no_split_modules)
    for module in list(model.modules()):
        if type(module).__name__ in blocks:
            fully_shard(module)
    fully_shard(model)
    return own_rows(model, *_place())


def peft_split(model: Any) -> schedlang.TrainingProgram:
    """Adapters of PEFT on a model that transformers has split by its plan."""
    from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    adapter, config = get_peft_model_state_dict(model), model.peft_config["default"]
    made = get_peft_model(split(model.unload(), tp_size=_place()[0]), config)
    set_peft_model_state_dict(made, adapter)
    return whole_rows(made.train())  # what is loaded is in eval mode, and adapters are not


def plain(model: Any) -> Any:
    """The family's model as it is."""
    return model


@dataclass(frozen=True)
class Way:
    """A program, over so many ranks, and what is made of the family's model before all."""

    program: Callable[[Any], schedlang.TrainingProgram]
    ranks: int = 2
    original: Callable[[Any], Any] = plain
    pooled: bool = True  # a library that keeps its groups for good has new processes each time


WAYS = {
    "tp": Way(tensor_parallel),
    "tp4": Way(tensor_parallel, 4),
    "tp+ep": Way(tensor_and_expert),
    "fsdp": Way(fully_sharded),
    "fsdp+ep": Way(experts_apart, 4),
    "fsdp+tp+ep": Way(three_ways, 4),
    "accelerate ddp": Way(replicated),
    "accelerate fsdp1": Way(flat),
    "accelerate fsdp2": Way(accelerate_sharded),
    "deepspeed zero1": Way(zero1, pooled=False),
    "deepspeed zero2": Way(zero2, pooled=False),
    "deepspeed zero3": Way(zero3, pooled=False),
    "peft ddp": Way(peft_replicated, original=adapted),
    "peft fsdp2": Way(peft_sharded, original=adapted),
    "peft tp": Way(peft_split, original=partial(adapted, wide=True)),
}


def families() -> Iterator[str]:
    """Language models of transformers that have a plan of tensor parallelism."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    for family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if family in CONFIG_MAPPING and CONFIG_MAPPING[family].base_model_tp_plan:
            yield family


def judged(family: str, way: Way, seed: int, pool: Pool) -> dict[str, Any]:
    """The verdict on a family under a way: `ok`, and what the report says of a difference."""
    try:
        model = way.original(built(family))
    except Exception as error:
        return {"ok": None, "said": f"not built: {type(error).__name__}: {error}"}
    try:
        with nullcontext(pool) if way.pooled else Pool() as ranks:
            report = schedlang.verify_program(
                way.program,
                model=model,
                batch=batch,
                ranks=way.ranks,
                seed=seed,
                timeout=LONGEST,
                pool=ranks,
            )
    except (Refusal, RankDied, Hang) as error:
        return {"ok": None, "said": str(error)}
    gaps = [str(gap.condition) for gap in report.gaps]
    _, _, said = str(report).partition("first difference")
    return {"ok": report.ok, "said": said, "gaps": gaps}


def main() -> None:
    """Judge what is asked for, and is not in the file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--families", default="", help="names with commas; default: all with a plan"
    )
    parser.add_argument("--ways", default="tp", help=f"of {', '.join(WAYS)}")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    today = {name: version(name) for name in ("torch", "transformers", "accelerate")}
    lines = asked.out.read_text().splitlines() if asked.out.exists() else ()
    done = [json.loads(line) for line in lines]
    wanted = asked.families.split(",") if asked.families else list(families())
    with Pool() as pool:
        for way in asked.ways.split(","):
            for family in wanted:
                for seed in range(asked.seeds):
                    key = {"family": family, "way": way, "seed": seed, **today}
                    if any(key.items() <= one.items() for one in done):
                        continue
                    began = time.monotonic()
                    line = key | judged(family, WAYS[way], seed, pool)
                    line["seconds"] = round(time.monotonic() - began, 1)
                    with asked.out.open("a") as out:
                        print(json.dumps(line), file=out)
                    verdict = {True: "equal", False: "DIFFERS", None: "did not run"}[line["ok"]]
                    print(f"{way} {family} {seed}: {verdict} in {line['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
