"""Megatron-Core's GPTModel under its own schedules, DDP and finalization of gradients, on CPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from schedlang import TrainingProgram
from tests.judging.versions.megatron import load_example

ROWS, WORDS, PARTS = 8, 9, 4  # of a batch, and micro-batches


class OnCpu(TorchFunctionMode):
    """Redirect tensors that Megatron creates on a GPU to the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.cuda:
            return args[0]
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def model(tied: bool = False) -> nn.Module:
    """Return the decoder of the examples."""
    decoder: nn.Module = load_example("original").model()
    if tied:
        decoder.head.weight = decoder.embed.weight
    return decoder


def batch(seed: int) -> dict[str, Tensor]:
    """Return rows of tokens."""
    draw = torch.Generator().manual_seed(seed)
    return {"ids": torch.randint(64, (ROWS, WORDS), generator=draw)}


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the cross-entropy of the next tokens."""
    return F.cross_entropy(output[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten())


@dataclass(frozen=True)
class Way:
    """How the model is split, and which mistake is made.

    chunks       of the model on each stage of a pipeline
    sequence     sequence parallelism
    distributed  gradients are reduce-scattered, for the distributed optimizer
    wrong        "norms": they are not marked; "finalized": gradients are not; "local": each rank
                 takes the loss of its part of the vocabulary; "batched": two stages send each
                 other activations and gradients in one batch, where their order is all that
                 tells them apart (its trainer refuses that, and its schedule does not)
    """

    ranks: int = 2
    tp: int = 1
    pp: int = 1
    chunks: int = 1
    sequence: bool = False
    distributed: bool = False
    tied: bool = False
    wrong: str = ""

    @property
    def rows(self) -> int:
        """The number of ranks that have rows of their own."""
        return self.ranks // self.tp // self.pp

    def program(self, model: Any) -> TrainingProgram:
        """Return the program of this rank's chunks under Megatron's schedule."""
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        config = self._config(model)
        chunks = [self._chunk(model, config, k) for k in range(self.chunks)]
        wrapped = [self._wrapped(config, chunk) for chunk in chunks]
        run_schedule = get_forward_backward_func()
        data_rank = _rank("data") if self.rows > 1 else 0

        def step(batch: Any) -> Tensor | None:
            for chunk in wrapped:
                chunk.zero_grad_buffer()
            rows = batch["ids"].chunk(self.rows)[data_rank].chunk(PARTS // self.rows)
            with OnCpu():
                losses = run_schedule(
                    forward_step_func=self._forward,
                    data_iterator=[iter(rows) for _ in chunks],
                    model=wrapped,
                    num_microbatches=len(rows),
                    seq_length=WORDS - 1,
                    micro_batch_size=len(rows[0]),
                    forward_only=False,
                )
            for chunk in wrapped:
                self._gather(chunk)
                for p in chunk.parameters():
                    p.grad = p.main_grad.clone()
            return torch.stack(losses).mean() if losses else None

        return TrainingProgram(chunks, step)

    def _forward(self, rows: Iterator[Tensor], chunk: Any) -> tuple[Tensor, Callable[..., Any]]:
        from megatron.core.utils import get_model_config

        ids = next(rows)
        later = torch.ones(WORDS - 1, WORDS - 1, dtype=torch.bool).triu(1)[None, None]
        labels = None if self.wrong == "local" else ids[:, 1:]
        result = chunk(ids[:, :-1], None, later, labels=labels)
        assert get_model_config(chunk).tensor_model_parallel_size == self.tp
        if labels is None:  # a plain loss over a part of the vocabulary
            targets = (ids[:, 1:] - _rank("tensor") * result.shape[-1]).clamp(
                0, result.shape[-1] - 1
            )
            result = F.cross_entropy(result.mT, targets, reduction="none")
        return result, lambda output: (output.mean(), output.detach().mean())

    def _config(self, model: Any) -> Any:
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.transformer import TransformerConfig

        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
        torch.cuda.synchronize = lambda device=None: None  # type: ignore[assignment]
        tensor_parallel.get_cuda_rng_tracker().fork = contextlib.nullcontext
        virtual = self.chunks if self.chunks > 1 else None
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            self.tp, self.pp, virtual, create_gloo_process_groups=False
        )
        dtype = model.head.weight.dtype
        return TransformerConfig(
            num_layers=len(model.blocks),
            hidden_size=model.embed.embedding_dim,
            num_attention_heads=4,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            tensor_model_parallel_size=self.tp,
            pipeline_model_parallel_size=self.pp,
            virtual_pipeline_model_parallel_size=virtual,
            sequence_parallel=self.sequence,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            batch_p2p_comm=self.wrong == "batched",
            overlap_p2p_comm=self.chunks > 1 and self.wrong != "batched",
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            finalize_model_grads_func=None if self.wrong == "finalized" else finalize_model_grads,
        )

    def _chunk(self, model: Any, config: Any, chunk_index: int) -> Any:
        from megatron.core import parallel_state
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer import transformer_block

        layers = get_gpt_layer_local_spec()
        if self.sequence:  # Megatron's torch norms refuse sequence parallelism
            norm = _norm(marked=self.wrong != "norms")
            layers.submodules.input_layernorm = layers.submodules.pre_mlp_layernorm = norm
            transformer_block.LayerNormImpl = norm
        stage = {"vp_stage": chunk_index if self.chunks > 1 else None}
        is_first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, **stage)
        is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, **stage)
        with OnCpu():
            gpt = GPTModel(
                config,
                layers,
                model.embed.num_embeddings,
                64,
                pre_process=is_first,
                post_process=is_last,
                position_embedding_type="none",
                share_embeddings_and_output_weights=self.tied,
                **stage,
            )
        gpt.to(config.params_dtype)
        layer_index = {layer.layer_number - 1: k for k, layer in enumerate(gpt.decoder.layers)}
        parameters = dict(gpt.named_parameters())
        with torch.no_grad():
            for name, weight, dim in load_example("megatron_tp").weights(model):
                path = name.split(".")
                if path[:2] == ["decoder", "layers"]:
                    path[2] = str(layer_index.get(int(path[2]), -1))
                part = weight if dim is None else weight.chunk(self.tp, dim)[_rank("tensor")]
                if (p := parameters.get(".".join(path))) is not None:
                    p.copy_(part)
        return gpt

    def _wrapped(self, config: Any, chunk: Any) -> Any:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=self.distributed)
        with OnCpu():
            return DistributedDataParallel(config, ddp_config, chunk)

    def _gather(self, wrapped: Any) -> None:
        """All-gather the gradients that the distributed optimizer has scattered."""
        for bucket in (b for buffer in wrapped.buffers for b in buffer.buckets):
            if self.distributed and self.rows > 1:
                local_part = bucket.grad_data.chunk(self.rows)[_rank("data")].clone()
                dist.all_gather_into_tensor(bucket.grad_data, local_part, group=_group("data"))


def _norm(marked: bool) -> Any:
    class Norm(nn.LayerNorm):
        """A LayerNorm whose gradients are summed over sequence parallel ranks if marked."""

        def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
            super().__init__(hidden_size, eps=eps)
            for p in self.parameters():
                p.sequence_parallel = marked  # type: ignore[attr-defined]

    return Norm


def _group(axis: str) -> Any:
    from megatron.core import parallel_state

    name = "data_parallel" if axis == "data" else "tensor_model_parallel"
    return getattr(parallel_state, f"get_{name}_group")()


def _rank(axis: str) -> int:
    return dist.get_rank(_group(axis))


RIGHT: dict[str, Way] = {
    "rows": Way(),
    "vocabulary": Way(tp=2),
    "sequence parallel": Way(tp=2, sequence=True),
    "sequence parallel and rows": Way(ranks=4, tp=2, sequence=True),
    "gradients of a distributed optimizer": Way(distributed=True),
    "pipeline": Way(pp=2),
    "interleaved pipeline": Way(pp=2, chunks=2),
    "interleaved pipeline, tied": Way(pp=2, chunks=2, tied=True),
    "interleaved pipeline and a split vocabulary": Way(ranks=4, tp=2, pp=2, chunks=2),
}
WRONG: dict[str, tuple[Way, str]] = {
    "norms of split words": (Way(tp=2, sequence=True, wrong="norms"), "sum over ranks is missing"),
    "gradients that nobody averages": (Way(wrong="finalized"), "they are not averaged"),
    "gradients that nobody scatters": (
        Way(distributed=True, wrong="finalized"),
        "2 parts of the batch count 2, 0 times",
    ),
    "tied weights on two stages": (Way(pp=2, chunks=2, tied=True, wrong="finalized"), "a tie is"),
    "a loss of a part of the vocabulary": (Way(tp=2, wrong="local"), "module: the loss: "),
    "messages in one batch": (
        Way(pp=2, chunks=2, wrong="batched"),
        "the output of `blocks.1.before_attention`",
    ),
}
__all__: Sequence[str] = ("RIGHT", "WRONG", "Way", "batch", "loss", "model")
