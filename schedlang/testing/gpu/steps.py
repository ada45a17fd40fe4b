"""Training of Llama-8B layers: untouched, compiled layer by layer, with our kernels, with Liger's.

As many layers as fit into the device's memory, between the embedding and the head of the full
model. Liger's patch changes classes for the whole process, so its cases come last.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.runtime.kernel_injection import kernel
from schedlang.testing.gpu.case import Case, Setup, Skipped, Told, Wrong
from schedlang.testing.gpu.contests import cleared, median, peak_flops, peak_of


@dataclass(frozen=True)
class Shape:
    """A Llama; `layers` are those that run here."""

    name: str
    hidden: int
    middle: int
    heads: int
    keys: int
    layers: int
    tied: bool
    classes: int = 128256
    rows: int = 2
    length: int = 4096


EIGHT = Shape("llama-3-8B", 4096, 14336, 32, 8, 32, False)
QUICK = (Shape("llama, quick", 1024, 2048, 8, 2, 2, True, 8000, 1, 1024),)
TINY = (
    Shape("llama, tiny", 32, 48, 4, 2, 2, True, 96, 2, 10),
    Shape("llama, tiny, untied", 32, 48, 4, 4, 1, False, 96, 1, 12),
)
_TOLERANCE = 1e-2  # allowed relative difference of losses, which are computed in bfloat16


def shapes_of(setup: Setup) -> tuple[Shape, ...]:
    """Return the shapes of a setup; the large one has as many layers as there is memory for."""
    if setup.size != "full":
        return setup.pick((), QUICK, TINY)  # type: ignore[no-any-return]
    layers = layers_for(EIGHT, torch.cuda.get_device_properties(0).total_memory)
    return (replace(EIGHT, name=f"{EIGHT.name}, {layers} layers", layers=layers),)


def layers_for(shape: Shape, memory: int) -> int:
    """Return the number of layers that the untouched model can train in `memory` bytes; at least 1.

    A parameter takes 8 bytes with its gradient and the state of AdamW, all in bfloat16; a token of
    a layer takes what autograd saves there; a token of the head its logits, in bfloat16 and twice
    in float32, with a gradient of each. A margin is left for memory that is freed too late to be
    reused.
    """
    tokens = shape.rows * shape.length
    per_head = shape.hidden // shape.heads
    matrices = shape.hidden * (2 * shape.heads + 2 * shape.keys) * per_head
    layer = 8 * (matrices + 3 * shape.hidden * shape.middle)
    layer += tokens * (52 * shape.hidden + 10 * shape.middle)
    ends = 8 * (1 if shape.tied else 2) * shape.classes * shape.hidden
    ends += tokens * shape.classes * 14
    return max(1, min(shape.layers, int((0.85 * memory - ends) // layer)))


def cases(setup: Setup) -> list[Case]:
    """Return a case for each implementation and shape, the untouched model first."""
    return [
        Case(f"{shape.name}, {way}", partial(_run_case, shape, way, setup))
        for way in WAYS
        for shape in shapes_of(setup)
    ]


def _run_case(shape: Shape, way: str, setup: Setup) -> Told:
    for package in ("transformers", *(("liger_kernel",) if way == "liger" else ())):
        if importlib.util.find_spec(package) is None:
            raise Skipped(f"`{package}` is not installed")
    if way == "liger" and not setup.timed:
        raise Skipped("its kernels run on GPUs")
    if "compile" in way and not (setup.timed or setup.device == "cpu"):
        raise Skipped("inductor does not compile for this device")
    cleared(setup.device)
    run = made(shape, way, setup.device, setup.pick("inductor", "inductor", "eager"))
    numbers: dict[str, Any] = {"shape": shape.name, "way": way}
    if setup.timed:
        numbers |= timed(run, setup.pick(10, 3, 1))
        note = (
            f"{numbers['tokens_per_second']:.0f} tokens/s, {numbers['peak_gib']:.1f} GiB"
            f" at the peak, loss {numbers['loss']:.4f}"
        )
    else:
        numbers["loss"] = [float(run.step()) for _ in range(3)][-1]
        note = f"loss {numbers['loss']:.4f}"
    loss = numbers["loss"]
    if way == "eager":
        _losses[shape.name] = loss
    eager_loss = _losses.get(shape.name, loss)
    if not (math.isfinite(loss) and abs(loss - eager_loss) <= _TOLERANCE * abs(eager_loss)):
        raise Wrong(f"the loss is {loss:.4f}, of the untouched model {eager_loss:.4f}")
    return Told(note, numbers)


_losses: dict[str, float] = {}  # of the untouched model, by shape


def llama(shape: Shape, device: str) -> nn.Module:
    """Return a Llama of a shape, with random weights, in bfloat16."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.middle,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.keys,
        num_hidden_layers=shape.layers,
        vocab_size=shape.classes,
        max_position_embeddings=2 * shape.length,
        rms_norm_eps=1e-5,
        tie_word_embeddings=shape.tied,
        use_cache=False,
        attn_implementation="sdpa",
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.train()  # type: ignore[no-any-return]


KERNELS = {"LlamaMLP": "gated", "LlamaAttention": "rope", "LlamaDecoderLayer": "add_norm"}


def with_kernels(model: Any, sums: bool = True) -> nn.Module:
    """Replace all modules for which we have a kernel; `sums`: with fused norms after sums."""
    matches: dict[tuple[str, str], Any] = {}
    for name, module in [*model.named_modules()]:
        kind = type(module).__name__
        kernel_name = KERNELS.get(kind) if sums or kind != "LlamaDecoderLayer" else None
        if kind == "LlamaRMSNorm" and not (sums and "post_attention" in name):
            kernel_name = "rms_norm"
        if module is model.lm_head:
            kernel_name = "linear_cross_entropy"
        if kernel_name is None:
            continue
        if (kind, kernel_name) not in matches:  # all modules of one class are equal here
            matches[kind, kernel_name] = kernel.match(module, kernel_name)
        matched = matches[kind, kernel_name]
        assert not hasattr(matched, "reason"), (name, matched)
        kernel.replace(module, matched)
    return model  # type: ignore[no-any-return]


def with_liger(model: nn.Module) -> nn.Module:
    """Patch the model by Liger; ImportError if Liger is not installed."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama(model=model)
    return model


def compiled(model: Any, backend: str) -> nn.Module:
    """Compile each layer of the model."""
    for layer in model.model.layers:
        layer.compile(backend=backend)
    return model  # type: ignore[no-any-return]


WAYS: Mapping[str, Callable[[nn.Module, str], nn.Module]] = {
    "eager": lambda model, _: model,
    "ours": lambda model, _: with_kernels(model),
    "ours, compiled": lambda model, backend: compiled(with_kernels(model, sums=False), backend),
    "compile": compiled,
    "liger": lambda model, _: with_liger(model),
}


@dataclass(frozen=True)
class Run:
    """A model to train and a batch."""

    shape: Shape
    model: nn.Module
    ids: Tensor
    optimizer: torch.optim.Optimizer

    def step(self) -> Tensor:
        """Run one training step; return its loss."""
        loss: Tensor = self.model(input_ids=self.ids, labels=self.ids).loss
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    @property
    def flops(self) -> float:
        """The operations of a step: products with weights, and causal attention."""
        shape, tokens = self.shape, self.ids.numel()
        count = sum(p.numel() for p in self.model.parameters())
        embedding = 0 if shape.tied else shape.classes * shape.hidden
        attended = 6 * shape.layers * shape.hidden * shape.length
        return float(tokens * (6 * (count - embedding) + attended))


def made(shape: Shape, way: str, device: str, backend: str) -> Run:
    """Make the model of an implementation, from equal weights, and the common batch."""
    model = WAYS[way](llama(shape, device), backend)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(shape.classes, (shape.rows, shape.length), generator=generator)
    fused = True if device == "cuda" else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=fused)
    return Run(shape, model, ids.to(device), optimizer)


def timed(run: Run, times: int) -> dict[str, float]:
    """Return seconds, tokens, share of the device's peak, bytes and the first loss."""
    first = float(run.step())
    seconds, peak = median(run.step, times), peak_flops()
    figures = {
        "seconds": seconds,
        "tokens_per_second": run.ids.numel() / seconds,
        "loss": first,
        "peak_gib": peak_of(run.step) / 2**30,
        "flops": run.flops / seconds,
    }
    return figures if peak is None else figures | {"mfu": figures["flops"] / peak}
