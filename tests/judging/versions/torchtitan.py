"""Tiny language models of torchtitan, and programs with its own parallelize functions."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from schedlang import TrainingProgram

PACKAGE = "torchtitan"
WORDS, WIDE, ROWS, LENGTH = 64, 32, 4, 12


def batch(seed: int) -> dict[str, Tensor]:
    """Four rows of twelve tokens."""
    draw = torch.Generator().manual_seed(seed)
    return {"tokens": torch.randint(WORDS, (ROWS, LENGTH), generator=draw)}


def loss(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the cross-entropy of the next tokens."""
    return F.cross_entropy(output[:, :-1].flatten(0, 1), batch["tokens"][:, 1:].flatten())


# ---- Models: by torchtitan's own makers of layers.


@dataclass(frozen=True)
class Family:
    """A family of models: its package, config class, layer builder, and sizes."""

    name: str
    config: str
    layers: str
    rope: str = "ComplexRoPE"
    sizes: Mapping[str, Any] = field(default_factory=dict)
    tied: bool = False
    again: bool = True  # weights are tied again after they are split
    rotary: int = 8

    @property
    def package(self) -> Any:
        """Its package."""
        return importlib.import_module(f"torchtitan.models.{self.name}")

    def model(self, sequence: bool = True, experts: bool = False, count: int = 2) -> nn.Module:
        """Build a model with plain attention: other kernels need a GPU or a compiler."""
        from torchtitan.models import common
        from torchtitan.models.common.attention import ScaledDotProductAttention

        package = self.package
        rope = getattr(common, self.rope).Config(dim=self.rotary, max_seq_len=64)
        sizes = {"n_layers": count, "dim": WIDE, "n_heads": 4, "attn_backend": "varlen"}
        layers = getattr(package, self.layers)(**{**sizes, "rope": rope, **self.sizes})
        for layer in layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
        norm = package.RMSNorm.Config(normalized_shape=WIDE, param_init={"weight": nn.init.ones_})
        extra = {"mtp_layers": []} if self.name == "deepseek_v3" else {}
        config = getattr(package, self.config).Config(
            dim=WIDE,
            vocab_size=WORDS,
            tok_embeddings=package.Embedding.Config(
                num_embeddings=WORDS, embedding_dim=WIDE, param_init={"weight": nn.init.normal_}
            ),
            norm=norm,
            lm_head=package.Linear.Config(
                in_features=WIDE, out_features=WORDS, param_init={"weight": nn.init.normal_}
            ),
            layers=layers,
            enable_weight_tying=self.tied,
            **extra,
        )
        sharding = importlib.import_module(f"torchtitan.models.{self.name}.sharding")
        cut = getattr(sharding, f"set_{self.name}_sharding_config")
        cut(config, enable_sp=sequence, **({} if self.name == "llama3" else {"enable_ep": experts}))
        model: Any = config.build()
        model.init_states()
        return model  # type: ignore[no-any-return]


_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "mscale": 0.7,
    "dense_hidden_dim": 48,
    "moe_hidden_dim": 16,
    "num_experts": 4,
    "num_shared_experts": 1,
    "router_top_k": 2,
    "router_score_func": "softmax",
    "moe_comm_backend": "standard",
    "non_blocking_capacity_factor": None,
}
_HEADS = {"n_kv_heads": 2, "head_dim": 8}
FAMILIES = {
    "llama3": Family(
        "llama3",
        "Llama3Model",
        "_build_llama3_layers",
        sizes={"n_kv_heads": 2, "hidden_dim": 48, "fuse_qkv": True},
    ),
    "qwen3": Family(
        "qwen3",
        "Qwen3Model",
        "_build_qwen3_layers",
        "CosSinRoPE",
        {**_HEADS, "hidden_dim": 48, "fuse_qkv": False},
    ),
    "qwen3_tied": Family(
        "qwen3",
        "Qwen3Model",
        "_build_qwen3_layers",
        "CosSinRoPE",
        {**_HEADS, "hidden_dim": 48, "fuse_qkv": True},
        tied=True,
    ),
    "qwen3_moe": Family(
        "qwen3",
        "Qwen3Model",
        "_build_qwen3_moe_layers",
        "CosSinRoPE",
        {**_HEADS, "moe_hidden_dim": 16, "num_experts": 4, "top_k": 2}
        | {"moe_comm_backend": "standard"},
    ),
    "deepseek_v3": Family(
        "deepseek_v3",
        "DeepSeekV3Model",
        "_build_dsv3_layers",
        sizes={**_LATENT, "n_dense_layers": 8},
    ),
    "deepseek_v3_moe": Family(
        "deepseek_v3",
        "DeepSeekV3Model",
        "_build_dsv3_layers",
        sizes={**_LATENT, "n_dense_layers": 1},
    ),
}


# ---- Programs: by torchtitan's own functions.

FUNCTIONS = {
    "llama3": "parallelize_llama",
    "qwen3": "parallelize_qwen3",
    "deepseek_v3": "parallelize_deepseekv3",
}


@dataclass(frozen=True)
class Layout:
    """The ranks of each axis, the pipeline schedule, and the context parallel balancer."""

    tp: int = 1
    fsdp: int = 1
    replicas: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    schedule: str = "1F1B"
    backend: str = "partial_dtensor"
    balance: str | None = "headtail"

    @property
    def ranks(self) -> int:
        """The total number of ranks; experts share the ranks of other axes."""
        return self.tp * self.fsdp * self.replicas * self.cp * self.pp

    def settings(self, dtype: torch.dtype) -> dict[str, Any]:
        """Return the arguments of torchtitan's parallelize functions."""
        from torchtitan import config
        from torchtitan.distributed import ParallelDims, parallel_dims, utils

        parallel_dims.device_type = "cpu"  # otherwise it takes CUDA
        utils.set_spmd_backend(self.backend)
        dtype_name = str(dtype).removeprefix("torch.")
        config.TORCH_DTYPE_MAP[dtype_name] = dtype  # float64 is none of its words
        dims = ParallelDims(
            dp_replicate=self.replicas,
            dp_shard=self.fsdp,
            cp=self.cp,
            tp=self.tp,
            pp=self.pp,
            ep=self.ep,
            world_size=self.ranks,
            spmd_backend=self.backend,
        )
        dims.build_mesh()
        parallelism = config.ParallelismConfig(
            data_parallel_replicate_degree=self.replicas,
            data_parallel_shard_degree=self.fsdp,
            tensor_parallel_degree=self.tp,
            context_parallel_degree=self.cp,
            pipeline_parallel_degree=self.pp,
            expert_parallel_degree=self.ep,
            pipeline_parallel_schedule=self.schedule,
            spmd_backend=self.backend,
            context_parallel_load_balancer=self.balance,
        )
        training = config.TrainingConfig(
            mixed_precision_param=dtype_name,
            mixed_precision_reduce=dtype_name,
            local_batch_size=ROWS // self.rows,
        )
        return {
            "parallel_dims": dims,
            "training": training,
            "parallelism": parallelism,
            "compile_config": config.CompileConfig(),
            "ac_config": None,
            "dump_folder": "",
        }

    @property
    def rows(self) -> int:
        """The number of parts that the batch is split into."""
        return self.fsdp * self.replicas


def build_program(family: Family, layout: Layout) -> Callable[[Any], TrainingProgram]:
    """Return the program of a layout: it splits rows and tokens, and divides by the full count."""

    def program(model: Any) -> TrainingProgram:
        settings = layout.settings(next(model.parameters()).dtype)
        dims = settings["parallel_dims"]
        parallel = importlib.import_module(f"{family.package.__name__}.parallelize")
        cut = getattr(parallel, FUNCTIONS[family.name])
        batch_rank = dims.get_mesh("batch").get_local_rank() if layout.rows > 1 else 0

        def mine(batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            tokens = batch["tokens"].chunk(layout.rows)[batch_rank]
            labels = F.pad(tokens[:, 1:], (0, 1), value=-100)
            positions = torch.arange(tokens.shape[1]).expand_as(tokens).contiguous()
            inputs: Any = (tokens, labels, {"positions": positions})
            if layout.cp > 1:
                from torchtitan.distributed.context_parallel import prepare_context_parallel_input

                mesh, device = dims.get_mesh("cp"), torch.device("cpu")
                inputs = prepare_context_parallel_input(*inputs, mesh, device, layout.balance)
            if layout.backend == "full_dtensor":
                from torchtitan.distributed.full_dtensor import parallelize_inputs

                inputs = parallelize_inputs(dims, *inputs)
            return inputs  # type: ignore[no-any-return]

        if layout.pp > 1:
            return _pipeline_program(model, settings, cut, mine)
        cut(model, **settings)
        if (
            family.tied and family.again
        ):  # as torchtitan's trainer does before it initializes weights
            model.tok_embeddings.weight = model.lm_head.weight

        def step(batch: Mapping[str, Tensor]) -> Tensor:
            tokens, labels, extra = mine(batch)
            with count_all_tokens(model):
                value, _ = token_loss(model(tokens, **extra), labels)
                value.backward()
            return value / layout.tp

        return TrainingProgram(model, step, world_loss="sum")

    return program


@contextlib.contextmanager
def count_all_tokens(model: nn.Module) -> Iterator[None]:
    """Sum the experts' token counts over ranks, as torchtitan's trainer does before balancing."""
    buffers = [b for name, b in model.named_buffers() if name.endswith("tokens_per_expert_E")]
    counts = [count.to_local() if isinstance(count, DTensor) else count for count in buffers]
    initial = [count.clone() for count in counts]
    yield
    for count, old in zip(counts, initial, strict=True):
        added = count - old
        dist.all_reduce(added)
        count.copy_(old + added)


def token_loss(scores: Any, labels: Tensor, *_: Any, **__: Any) -> tuple[Tensor, dict[str, Any]]:
    """Return the summed loss divided by the count of all tokens, as in torchtitan."""
    full_scores, labels = (
        tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for tensor in (scores, labels)
    )
    total = F.cross_entropy(full_scores.flatten(0, 1), labels.flatten(), reduction="sum")
    return total / (ROWS * (LENGTH - 1)), {}


def _pipeline_program(
    model: Any, settings: Mapping[str, Any], cut: Any, local_inputs: Callable[..., Any]
) -> TrainingProgram:
    """Return a pipeline program with torchtitan's schedules and microbatches of one row."""
    from torchtitan.distributed.pipeline_parallel import pipeline_llm

    schedule, parts, is_first, is_last = pipeline_llm(
        model,
        **settings,
        device=torch.device("cpu"),
        model_config=model.config,
        parallelize_fn=cut,
        loss_fn=token_loss,
    )
    tp = settings["parallelism"].tensor_parallel_degree

    def step(batch: Mapping[str, Tensor]) -> Tensor | None:
        tokens, labels, extra = local_inputs(batch)
        losses: list[Tensor] | None = [] if is_last else None
        inputs = (tokens,) if is_first else ()
        schedule.step(*inputs, **extra, target=labels if is_last else None, losses=losses)
        return sum(losses) / tp if losses else None

    return TrainingProgram(parts, step, world_loss="sum")
