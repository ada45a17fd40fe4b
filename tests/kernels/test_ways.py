"""Every kernel of the menu under each way to run a model: proven, or refused with its code."""

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
from tests.proofs import planned, proven

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
WAYS: Mapping[str, tuple[str, str]] = {
    "tensor parallel": ("tp=2", HEADS),
    "zero 3": ("dp=2", "zero(stage=3, over=dp)"),
    "checkpoint": ("", "model.layers.* checkpoint()"),
    "pipeline": ("pp=2", PIPELINE),
}
REFUSED: Mapping[tuple[str, str], str] = {}
# functions that others compute, which nothing counts inside of a graph
UNCOUNTED = ("sdpa", "flex_attention", "flash_attention", "liger.rms_norm", "liger.layer_norm")


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The packages that some kernels come from, with their published functions."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "fakes")
    yield
    for name in [n for n in sys.modules if n.partition(".")[0] in ("liger_kernel", "flash_attn")]:
        del sys.modules[name]


def model_for(kernel: str) -> nn.Module:
    """A model that has what the kernel replaces, with the names that Llama gives its parts."""
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


def rows_of(kernel: str, way: str) -> tuple[str, str]:
    """The rows of a kernel and of a way, and the mesh."""
    mesh, rows = WAYS[way]
    if way == "tensor parallel":
        rows %= EXPERTS if kernel == "grouped" else MLP
    return f"{SITES[kernel]} replace_kernel({kernel})\n{rows}", mesh


PAIRS = [(kernel, way) for kernel in KERNELS for way in WAYS]


@pytest.mark.deep
@pytest.mark.parametrize(("kernel", "way"), PAIRS)
def test_every_kernel_under_every_way(kernel: str, way: str, fakes: None, threads: Any) -> None:
    """The whole proof on ranks, in which the kernel's own operator ran; its plan is estimated."""
    batches = [models.tokens(rows=4, seed=seed) for seed in (1, 2)]
    rows, mesh = rows_of(kernel, way)
    try:
        plan = planned(model_for(kernel), rows, mesh)
        before = sum(backend_runs().values())
        proven(threads, plan, batches)
    except Refusal as refusal:
        assert refusal.diagnostics[0].code == REFUSED.get((kernel, way)), refusal.render()
        return
    assert (kernel, way) not in REFUSED
    assert kernel == "sdpa" or sum(backend_runs().values()) > before  # sdpa is torch's alone
    told = account(plan, batches[0], memory=True)
    assert told.memory is not None, told.notes


def part_of(kernel: str) -> tuple[nn.Module, dict[str, Any]]:
    """One module that the kernel replaces, in float32, and what it is given."""
    model = model_for(kernel).float()
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 16, generator=drawn).requires_grad_()
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
            "top_k_weights": torch.rand(10, 2, generator=drawn),
        }
    if "entropy" in kernel:
        return model.lm_head, {"input": x}
    given = {"hidden_states": x, "position_embeddings": tables, "attention_mask": None}
    return (layer if kernel == "add_norm" else layer.self_attn), given


def results(module: nn.Module, call: Any, given: Mapping[str, Any], loss: bool) -> list[Tensor]:
    """The output of a call, and the gradients of parameters and input."""
    leaves = [v for v in given.values() if isinstance(v, Tensor) and v.requires_grad]
    leaves += list(module.parameters())
    out = call(**given)
    out = out[0] if isinstance(out, tuple) else out
    total = out if loss else (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum()
    return [out.detach(), *torch.autograd.grad(total, leaves)]


@pytest.mark.deep
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_in_one_graph(kernel: str, fakes: None) -> None:
    """Under torch.compile(fullgraph=True) a module with the kernel gives the untouched module's
    output and gradients, by the kernel's own operator."""
    torch._dynamo.reset()
    module, given = part_of(kernel)
    loss = "entropy" in kernel
    labels = torch.arange(10) % models.VOCAB

    def called(**given: Any) -> Any:
        made = module(**given)
        return F.cross_entropy(made.flatten(0, 1), labels) if loss else made

    expected = results(module, called, given, loss)
    found = match(module, kernel)
    replace(module, found)  # type: ignore[arg-type]
    compiled = torch.compile(called, fullgraph=True, backend="aot_eager")
    before = sum(backend_runs().values())
    for a, b in zip(results(module, compiled, given, loss), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert kernel in UNCOUNTED or sum(backend_runs().values()) > before


def test_the_menu_is_whole() -> None:
    """Each kernel that can be asked for stands here."""
    assert set(SITES) == set(KERNELS)
