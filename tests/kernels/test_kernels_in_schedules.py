"""Every kernel with each parallelism and recomputation: proven, or refused with its code."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.kernels.kernel_device import backend_runs
from schedlang.passes.simulate.account import account
from schedlang.primitives.replace_kernel import replace_kernel
from schedlang.runtime.kernel_injection.kernel import match, replace
from tests import models
from tests.proofs import assert_proven, make_plan

pytest.importorskip("transformers")
KERNELS: tuple[str, ...] = get_args(get_type_hints(replace_kernel)["kernel"])
SITES = {
    "rms_norm": "model.**:LlamaRMSNorm",
    "liger.rms_norm": "model.**:LlamaRMSNorm",
    "layer_norm": "model.**:LayerNorm",
    "liger.layer_norm": "model.**:LayerNorm",
    "add_norm": "model.layers.*",
    "gated": "model.layers.*.mlp",
    "rope": "model.layers.*.self_attn",
    "sdpa": "model.layers.*.self_attn",
    "flex_attention": "model.layers.*.self_attn",
    "flash_attention": "model.layers.*.self_attn",
    "cross_entropy": "lm_head",
    "linear_cross_entropy": "lm_head",
    "grouped": "model.layers.*.mlp.experts",
}
HEADS = """at model.layers.* {
  self_attn.{q,k,v}_proj  shard(col, over=tp)
  self_attn.o_proj        shard(row, over=tp)
%s}
model.embed_tokens shard(vocab, over=tp)
lm_head            shard(vocab, over=tp)
"""
MLP = """  mlp.{gate,up}_proj  shard(col, over=tp)
  mlp.down_proj       shard(row, over=tp)
"""
EXPERTS = "  mlp.experts  expert_parallel(over=tp)\n"
PIPELINE = 'model.layers pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)'
TECHNIQUES: Mapping[str, tuple[str, str]] = {
    "tensor parallel": ("tp=2", HEADS),
    "zero 3": ("dp=2", "zero(stage=3, over=dp)"),
    "checkpoint": ("", "model.layers.* checkpoint()"),
    "pipeline": ("pp=2", PIPELINE),
}
EXPECTED_REFUSALS: Mapping[tuple[str, str], str] = {}
# functions of other libraries, whose runs are not counted inside a graph
UNCOUNTED = ("sdpa", "flex_attention", "flash_attention", "liger.rms_norm", "liger.layer_norm")


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Provide fakes of the packages that some kernels need."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "fakes")
    yield
    for name in [n for n in sys.modules if n.partition(".")[0] in ("liger_kernel", "flash_attn")]:
        del sys.modules[name]


def model_for(kernel: str) -> nn.Module:
    """Return a model with a module for the kernel, and Llama's names."""
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=24,
        max_position_embeddings=16,
        **models.SIZES | {"vocab_size": 64},
        attn_implementation="eager" if kernel == "sdpa" else "sdpa",
    )
    if kernel == "grouped":
        config: Any = transformers.MixtralConfig(num_local_experts=4, **sizes)
        return transformers.MixtralForCausalLM(config).double()
    if "layer_norm" in kernel:
        return transformers.StableLmForCausalLM(transformers.StableLmConfig(**sizes)).double()
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).double()


def schedule_of(kernel: str, technique: str) -> tuple[str, str]:
    """Return the rows of a kernel and of a technique, and the mesh."""
    mesh, rows = TECHNIQUES[technique]
    if technique == "tensor parallel":
        rows %= EXPERTS if kernel == "grouped" else MLP
    return f"{SITES[kernel]} replace_kernel({kernel})\n{rows}", mesh


PAIRS = [(kernel, way) for kernel in KERNELS for way in TECHNIQUES]


@pytest.mark.deep
@pytest.mark.parametrize(("kernel", "way"), PAIRS)
def test_every_kernel_under_every_way(kernel: str, way: str, fakes: None, threads: Any) -> None:
    """The full proof on ranks, with the kernel's operator in use; its memory is estimated."""
    batches = [models.tokens(rows=4, seed=seed) for seed in (1, 2)]
    rows, mesh = schedule_of(kernel, way)
    try:
        plan = make_plan(model_for(kernel), rows, mesh)
        runs_before = sum(backend_runs().values())
        assert_proven(threads, plan, batches)
    except Refusal as refusal:
        assert refusal.diagnostics[0].code == EXPECTED_REFUSALS.get((kernel, way)), refusal.render()
        return
    assert (kernel, way) not in EXPECTED_REFUSALS
    assert kernel == "sdpa" or sum(backend_runs().values()) > runs_before  # sdpa is torch's alone
    report = account(plan, batches[0], memory=True)
    assert report.memory is not None, report.notes


def module_and_inputs(kernel: str) -> tuple[nn.Module, dict[str, Any]]:
    """Return one module that the kernel replaces, in float32, and its inputs."""
    model = model_for(kernel).float()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 16, generator=generator).requires_grad_()
    layer = model.get_submodule("model.layers.0")
    tables = (torch.randn(1, 5, 4), torch.randn(1, 5, 4))
    if "norm" in kernel and kernel != "add_norm":
        return layer.input_layernorm, {"hidden_states" if "rms" in kernel else "input": x}
    if kernel == "gated":
        return layer.mlp, {"x": x}
    if kernel == "grouped":
        index = torch.arange(20).view(10, 2) % 4
        return layer.mlp.experts, {
            "hidden_states": x.detach().view(10, 16).requires_grad_(),
            "top_k_index": index,
            "top_k_weights": torch.rand(10, 2, generator=generator),
        }
    if "entropy" in kernel:
        return model.lm_head, {"input": x}
    inputs = {"hidden_states": x, "position_embeddings": tables, "attention_mask": None}
    return (layer if kernel == "add_norm" else layer.self_attn), inputs


def output_and_grads(
    module: nn.Module, call: Any, inputs: Mapping[str, Any], loss: bool
) -> list[Tensor]:
    """Return the output of a call, and the gradients of parameters and input."""
    leaves = [v for v in inputs.values() if isinstance(v, Tensor) and v.requires_grad]
    leaves += list(module.parameters())
    out = call(**inputs)
    out = out[0] if isinstance(out, tuple) else out
    total = out if loss else (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum()
    return [out.detach(), *torch.autograd.grad(total, leaves)]


@pytest.mark.deep
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_in_one_graph(kernel: str, fakes: None) -> None:
    """Under torch.compile(fullgraph=True) a module with the kernel gives the original's output and
    gradients, by the kernel's operator."""
    torch._dynamo.reset()
    module, inputs = module_and_inputs(kernel)
    loss = "entropy" in kernel
    labels = torch.arange(10) % models.VOCAB

    def called(**inputs: Any) -> Any:
        out = module(**inputs)
        return F.cross_entropy(out.flatten(0, 1), labels) if loss else out

    expected = output_and_grads(module, called, inputs, loss)
    kernel_match = match(module, kernel)
    replace(module, kernel_match)  # type: ignore[arg-type]
    compiled = torch.compile(called, fullgraph=True, backend="aot_eager")
    runs_before = sum(backend_runs().values())
    for a, b in zip(output_and_grads(module, compiled, inputs, loss), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert kernel in UNCOUNTED or sum(backend_runs().values()) > runs_before


def test_the_menu_is_whole() -> None:
    """Every kernel has an entry in SITES."""
    assert set(SITES) == set(KERNELS)
