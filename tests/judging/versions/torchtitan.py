"""Language models of torchtitan, tiny, and the functions by which it parallelizes each of them."""

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
    """Four rows of twelve words."""
    draw = torch.Generator().manual_seed(seed)
    return {"tokens": torch.randint(WORDS, (ROWS, LENGTH), generator=draw)}


def loss(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Each word is told by those before it."""
    return F.cross_entropy(output[:, :-1].flatten(0, 1), batch["tokens"][:, 1:].flatten())


# ---- Models: by torchtitan's own makers of layers.


@dataclass(frozen=True)
class Family:
    """A family of models: the name of its package, of what makes its layers, and their sizes."""

    name: str
    config: str
    layers: str
    rope: str = "ComplexRoPE"
    sizes: Mapping[str, Any] = field(default_factory=dict)
    tied: bool = False
    again: bool = True  # weights are tied once more after they are split
    rotary: int = 8

    @property
    def package(self) -> Any:
        """Its package."""
        return importlib.import_module(f"torchtitan.models.{self.name}")

    def model(self, sequence: bool = True, experts: bool = False, count: int = 2) -> nn.Module:
        """Build one with plain attention: others need a GPU or a compiler."""
        from torchtitan.models import common
        from torchtitan.models.common.attention import ScaledDotProductAttention

        package = self.package
        rope = getattr(common, self.rope).Config(dim=self.rotary, max_seq_len=64)
        sizes = {"n_layers": count, "dim": WIDE, "n_heads": 4, "attn_backend": "varlen"}
        layers = getattr(package, self.layers)(**{**sizes, "rope": rope, **self.sizes})
        for layer in layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
        norm = package.RMSNorm.Config(normalized_shape=WIDE, param_init={"weight": nn.init.ones_})
        rest = {"mtp_layers": []} if self.name == "deepseek_v3" else {}
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
            **rest,
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
class Way:
    """How many ranks each axis has, and by what a pipeline and the words are cut."""

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
        """The ranks of all axes; experts lie on those of others."""
        return self.tp * self.fsdp * self.replicas * self.cp * self.pp

    def settings(self, dtype: torch.dtype) -> dict[str, Any]:
        """The arguments that its functions take: what its trainer reads of a file."""
        from torchtitan import config
        from torchtitan.distributed import ParallelDims, parallel_dims, utils

        parallel_dims.device_type = "cpu"  # it takes CUDA where it finds nothing
        utils.set_spmd_backend(self.backend)
        word = str(dtype).removeprefix("torch.")
        config.TORCH_DTYPE_MAP[word] = dtype  # float64 is none of its words
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
        asked = config.ParallelismConfig(
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
            mixed_precision_param=word,
            mixed_precision_reduce=word,
            local_batch_size=ROWS // self.rows,
        )
        return {
            "parallel_dims": dims,
            "training": training,
            "parallelism": asked,
            "compile_config": config.CompileConfig(),
            "ac_config": None,
            "dump_folder": "",
        }

    @property
    def rows(self) -> int:
        """The number of parts of the batch."""
        return self.fsdp * self.replicas


def made(family: Family, way: Way) -> Callable[[Any], TrainingProgram]:
    """Return the program of a way: rows and words are cut, and sums divided by the whole count."""

    def program(model: Any) -> TrainingProgram:
        settings = way.settings(next(model.parameters()).dtype)
        dims = settings["parallel_dims"]
        parallel = importlib.import_module(f"{family.package.__name__}.parallelize")
        cut = getattr(parallel, FUNCTIONS[family.name])
        place = dims.get_mesh("batch").get_local_rank() if way.rows > 1 else 0

        def mine(batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            tokens = batch["tokens"].chunk(way.rows)[place]
            labels = F.pad(tokens[:, 1:], (0, 1), value=-100)
            words = torch.arange(tokens.shape[1]).expand_as(tokens).contiguous()
            given: Any = (tokens, labels, {"positions": words})
            if way.cp > 1:
                from torchtitan.distributed.context_parallel import prepare_context_parallel_input

                mesh, device = dims.get_mesh("cp"), torch.device("cpu")
                given = prepare_context_parallel_input(*given, mesh, device, way.balance)
            if way.backend == "full_dtensor":
                from torchtitan.distributed.full_dtensor import parallelize_inputs

                given = parallelize_inputs(dims, *given)
            return given  # type: ignore[no-any-return]

        if way.pp > 1:
            return _piped(model, settings, cut, mine)
        cut(model, **settings)
        if (
            family.tied and family.again
        ):  # as its trainer does, which gives weights their values after this
            model.tok_embeddings.weight = model.lm_head.weight

        def step(batch: Mapping[str, Tensor]) -> Tensor:
            tokens, labels, more = mine(batch)
            with all_counted(model):
                value, _ = of_words(model(tokens, **more), labels)
                value.backward()
            return value / way.tp

        return TrainingProgram(model, step, world_loss="sum")

    return program


@contextlib.contextmanager
def all_counted(model: nn.Module) -> Iterator[None]:
    """Let experts count the words of all ranks, as its trainer does before it balances them."""
    found = [b for name, b in model.named_buffers() if name.endswith("tokens_per_expert_E")]
    counts = [one.to_local() if isinstance(one, DTensor) else one for one in found]
    before = [one.clone() for one in counts]
    yield
    for one, was in zip(counts, before, strict=True):
        mine = one - was
        dist.all_reduce(mine)
        one.copy_(was + mine)


def of_words(scores: Any, labels: Tensor, *_: Any, **__: Any) -> tuple[Tensor, dict[str, Any]]:
    """A sum over words, divided by the count of all: as torchtitan's losses are."""
    whole, labels = (
        one.full_tensor() if isinstance(one, DTensor) else one for one in (scores, labels)
    )
    total = F.cross_entropy(whole.flatten(0, 1), labels.flatten(), reduction="sum")
    return total / (ROWS * (LENGTH - 1)), {}


def _piped(
    model: Any, settings: Mapping[str, Any], cut: Any, mine: Callable[..., Any]
) -> TrainingProgram:
    """Stages by its schedules: microbatches of one row, each with its own labels."""
    from torchtitan.distributed.pipeline_parallel import pipeline_llm

    schedule, parts, first, last = pipeline_llm(
        model,
        **settings,
        device=torch.device("cpu"),
        model_config=model.config,
        parallelize_fn=cut,
        loss_fn=of_words,
    )
    tp = settings["parallelism"].tensor_parallel_degree

    def step(batch: Mapping[str, Tensor]) -> Tensor | None:
        tokens, labels, more = mine(batch)
        losses: list[Tensor] | None = [] if last else None
        given = (tokens,) if first else ()
        schedule.step(*given, **more, target=labels if last else None, losses=losses)
        return sum(losses) / tp if losses else None

    return TrainingProgram(parts, step, world_loss="sum")
