"""Kernels under torch.compile(fullgraph=True): models stay one graph, with equal results."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import schedlang
from schedlang.kernels.kernel_device import backend_runs
from schedlang.kernels.probe import Mismatch
from schedlang.runtime.kernel_injection.kernel import match, replace
from schedlang.runtime.lazy_logits.lazy import LazyLogits
from tests import models

VOCAB_SIZE = 17
HEADS = ("linear_cross_entropy", "cross_entropy")


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """Reset the compiler, so that each test counts its own graphs."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Layer(nn.Module):
    """Two norms, one of them after a sum; a branch by a flag; dropout between."""

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(6, eps=eps), nn.LayerNorm(6, eps=eps)
        self.mid, self.down = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, pair: Any = None, twice: bool = False, **more: Any) -> Tensor:
        """`pair`: a factor and a shift."""
        inner = self.mid(self.first(x))
        if pair is not None:
            inner = inner * pair[0] + pair[1]
        x = x + (inner * 2 if twice else inner)
        return x + self.down(F.dropout(self.second(x), 0.0, self.training))


class Model(nn.Module):
    """An embedding, layers and a loss, computed as transformers' models do."""

    def __init__(self, layers: int = 2, again: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.again = again
        self.embed = nn.Embedding(VOCAB_SIZE, 6)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(6, VOCAB_SIZE, bias=False)

    def forward(self, words: Tensor, labels: Tensor) -> dict[str, Any]:
        """Return the loss and the logits."""
        x = self.embed(words)
        pair = (x.new_full((x.shape[1], 1), 0.5), x.new_ones(()))
        for layer in self.layers:
            x = (
                checkpoint(layer, x, pair, True, use_reentrant=False)
                if self.again
                else layer(x, pair=pair, twice=True)
            )
        logits = self.head(x)
        shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
        loss = F.cross_entropy(logits.to(x.dtype).view(-1, VOCAB_SIZE), shifted.view(-1))
        return {"loss": loss, "logits": logits}


def replace_modules(model: nn.Module, kernel: str, *names: str) -> None:
    """Replace modules, which must match, by the kernel."""
    for name in names:
        kernel_form = match(model.get_submodule(name), kernel)
        assert not isinstance(kernel_form, Mismatch), kernel_form
        replace(model.get_submodule(name), kernel_form)


def with_kernels(model: Model, head: str) -> Model:
    """Return a copy with `add_norm` in each layer and a head that computes logits lazily."""
    model = copy.deepcopy(model)
    replace_modules(model, "add_norm", *(f"layers.{k}" for k in range(len(model.layers))))
    replace_modules(model, head, "head")
    return model


def make_batch(rows: int, length: int) -> dict[str, Tensor]:
    """Return a batch in which some labels are ignored."""
    generator = torch.Generator().manual_seed(rows * 100 + length)
    ids = torch.randint(VOCAB_SIZE, (rows, length), generator=generator)
    return {"words": ids, "labels": ids.masked_fill(ids % 5 == 0, -100)}


def run_backward(
    model: nn.Module, call: Callable[..., Any], batch: Mapping[str, Any]
) -> list[Tensor]:
    """Return the loss, the logits and every gradient."""
    out = call(**batch)
    loss, logits = out["loss"], out["logits"]
    grads = torch.autograd.grad(loss, list(model.parameters()), retain_graph=False)
    full_logits = logits.full() if isinstance(logits, LazyLogits) else logits
    return [loss.detach(), full_logits.detach(), *grads]


def assert_close(actual: list[Tensor], expected: list[Tensor], rtol: float = 1e-12) -> None:
    """Assert that tensors are equal within a relative error."""
    for value, reference in zip(actual, expected, strict=True):
        assert value.dtype == reference.dtype
        assert (value - reference).norm() <= rtol * reference.norm() + 1e-15


def compile_model(model: nn.Module) -> Callable[..., Any]:
    """Compile a model as one graph, or raise."""
    call: Callable[..., Any] = torch.compile(model, fullgraph=True, backend="aot_eager")
    return call


SIZES = ((2, 5), (2, 7), (3, 8), (4, 6))


@pytest.mark.deep
@pytest.mark.parametrize(("head", "again"), list(zip(HEADS, (True, False))))
def test_a_model_is_one_graph_for_all_sizes(head: str, again: bool) -> None:
    """Loss, logits and gradients of the original model, in as many graphs as it needs for batches
    of several sizes, by the kernels' operators; with recomputed layers too."""
    model = Model(again=again).double()
    expected = [run_backward(model, model, make_batch(*size)) for size in SIZES]
    replaced = with_kernels(model, head)
    counts = []
    for variant in (model, replaced):
        torch._dynamo.reset()
        counters.clear()
        call = compile_model(variant)
        before = sum(backend_runs().values())
        for size, reference in zip(SIZES, expected):
            assert_close(run_backward(variant, call, make_batch(*size)), reference)
        counts.append((counters["stats"]["unique_graphs"], sum(backend_runs().values()) - before))
    (graphs, plain_runs), (kernel_graphs, kernel_runs) = counts
    assert kernel_graphs == graphs and plain_runs == 0
    layers = len(model.layers) * (3 if again else 2)
    assert kernel_runs == len(SIZES) * (layers + (1 if head == HEADS[0] else 2))


@pytest.mark.deep
def test_equal_layers_are_one_graph() -> None:
    """Layers compiled one by one share a graph, as without kernels; a layer with another number, or
    a hook on its norm, has its own."""
    torch.manual_seed(0)
    layers = nn.ModuleList(Layer(1e-2 if k == 2 else 1e-5) for k in range(12)).double()
    first_input = torch.randn(2, 5, 6, dtype=torch.float64)

    def run() -> list[Tensor]:
        x = first_input.clone().requires_grad_()
        y = x
        for layer in layers:
            y = layer(y, twice=True)
        leaves = [x, *layers.parameters()]
        return [y.detach(), *torch.autograd.grad(y.square().sum(), leaves)]

    expected, hook_calls = run(), []
    replace_modules(layers, "add_norm", *map(str, range(12)))
    layers[5].second.register_forward_hook(lambda *_: hook_calls.append(1))
    for layer in layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    runs_before = sum(backend_runs().values())
    assert_close(run(), expected, 1e-11)
    assert sum(backend_runs().values()) - runs_before == 11 * 2
    assert counters["stats"]["unique_graphs"] <= 3


def test_what_a_flow_was_made_for() -> None:
    """A longer list, a flag, or eval mode takes another data flow, compiled or not."""
    layer = Layer().double()
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    pairs = [torch.randn(5, 1, dtype=torch.float64) for _ in range(3)]
    calls: list[dict[str, Any]] = [
        {},
        {"twice": True},
        {"pair": pairs[:2]},
        {"pair": tuple(pairs)},
        {"pair": pairs[1:]},
    ]
    expected = [layer(x, **call) for call in calls]
    replace_modules(layer, "add_norm", "")
    compiled_layer = torch.compile(layer, fullgraph=True, backend="eager")
    for run, kinds in ((layer, 5), (compiled_layer, 1), (layer.eval(), 5)):
        for call, reference in list(zip(calls, expected))[-kinds:]:
            torch.testing.assert_close(run(x, **call), reference, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("head", HEADS)
def test_logits_come_out_of_a_graph(head: str) -> None:
    """Logits are still lazy outside the graph, and are computed when read."""
    torch.manual_seed(0)
    layer = nn.Linear(6, VOCAB_SIZE).double()
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([3, -100, 16, 0])
    leaves = [x, *layer.parameters()]

    def run(call: Callable[..., Any]) -> list[Tensor]:
        z = call(x)
        loss = F.cross_entropy(2 * torch.tanh(z.to(torch.float64) / 4), labels)
        return [loss.detach(), z[1:3] + 0.0, *torch.autograd.grad(loss, leaves)]

    expected = run(layer)
    replace_modules(layer, head, "")
    call = torch.compile(layer, fullgraph=True, backend="aot_eager")
    logits = call(x)
    assert (
        isinstance(logits, LazyLogits)
        and logits.computed is None
        and logits.shape == (4, VOCAB_SIZE)
    )
    assert_close(run(call), expected)


@pytest.mark.deep
def test_masks_that_hide_all_are_seen_when_a_graph_runs() -> None:
    """sdpa with a mask is one graph, which also handles rows that see no key (left padding): two
    masks of one shape, without recompilation."""
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaAttention

    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=16, num_attention_heads=2, attn_implementation="eager")
    attention = LlamaAttention(config, 0)
    x = torch.randn(2, 5, 16, requires_grad=True)
    angles = torch.randn(2, 1, 5, 8)
    lowest = torch.finfo(torch.float32).min
    causal = torch.full((2, 1, 5, 5), lowest).triu(1)
    blind = causal.clone()
    blind[1, :, :2] = lowest
    blind[1, :, :, :2] = lowest

    def run(call: Callable[..., Any], mask: Tensor) -> list[Tensor]:
        inputs = {"position_embeddings": (angles[0].cos(), angles[1].sin()), "attention_mask": mask}
        out = call(x, **inputs)[0]
        total = (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum()
        return [out.detach(), *torch.autograd.grad(total, [x, *attention.parameters()])]

    expected = [run(attention, mask) for mask in (causal, blind)]
    replace_modules(attention, "sdpa", "")
    call = torch.compile(attention, fullgraph=True, backend="aot_eager")
    for mask, reference in zip((causal, blind), expected):
        assert_close(run(call, mask), reference, 1e-5)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("kernel", [*HEADS, ""])
def test_a_loss_that_is_a_module(kernel: str) -> None:
    """`nn.CrossEntropyLoss()`, created inside a graph, works with lazy logits."""
    torch.manual_seed(0)
    layer = nn.Linear(6, VOCAB_SIZE).double()
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([3, 5, 16, 0])

    def lost(z: Any) -> Tensor:
        once: Tensor = nn.CrossEntropyLoss(None, ignore_index=5, label_smoothing=0.1)(z, labels)
        return once + nn.CrossEntropyLoss(reduction="sum")(
            input=z.view(-1, VOCAB_SIZE), target=labels
        )

    def run(call: Callable[..., Any]) -> list[Tensor]:
        loss = call(x)
        return [loss.detach(), *torch.autograd.grad(loss, [x, *layer.parameters()])]

    def whole(x: Tensor) -> Tensor:
        return lost(layer(x))

    expected = run(whole)
    if kernel:
        replace_modules(layer, kernel, "")
    before = sum(backend_runs().values())
    assert_close(run(torch.compile(whole, fullgraph=True, backend="aot_eager")), expected)
    assert (sum(backend_runs().values()) > before) == bool(kernel)


SITES: Mapping[str, Mapping[str, str]] = {
    "gpt2": {
        "layer_norm": "transformer.**:LayerNorm",
        "add_norm": "transformer.h.*",
        "sdpa": "transformer.h.*.attn",
        "flex_attention": "transformer.h.*.attn",
        "cross_entropy": "lm_head",
        "linear_cross_entropy": "lm_head",
    },
    "llama": {
        "rms_norm": "model.**:LlamaRMSNorm",
        "add_norm": "model.layers.*",
        "gated": "model.layers.*.mlp",
        "rope": "model.layers.*.self_attn",
        "sdpa": "model.layers.*.self_attn",
        "flex_attention": "model.layers.*.self_attn",
        "cross_entropy": "lm_head",
        "linear_cross_entropy": "lm_head",
    },
    "bert": {
        "layer_norm": "**:LayerNorm",
        "add_norm": "bert.encoder.layer.*.output",
        "sdpa": "bert.encoder.layer.*.attention.self",
        "flex_attention": "bert.encoder.layer.*.attention.self",
        "cross_entropy": "cls.predictions.decoder",
        "linear_cross_entropy": "cls.predictions.decoder",
    },
    "t5": {
        "rms_norm": "**:T5LayerNorm",
        "gated": "**:T5DenseGatedActDense",
        "sdpa": "**:T5Attention",
        "flex_attention": "**:T5Attention",
        "cross_entropy": "lm_head",
        "linear_cross_entropy": "lm_head",
    },
}


def build_transformer(kind: str, kernel: str) -> nn.Module:
    """Return a tiny model of transformers in training mode."""
    makes = {
        "gpt2": lambda: models.gpt2(2),
        "llama": lambda: models.llama(2),
        "bert": models.bert,
        "t5": lambda: models.t5(d_kv=8, feed_forward_proj="gated-gelu"),
    }
    model: Any = makes[kind]()
    if kernel == "sdpa":
        model.config._attn_implementation = "eager"
    if kind == "gpt2":
        model.loss_type = "ForCausalLM"  # else its name is looked up, and a warning is logged
    return model.train()  # type: ignore[no-any-return]


def loss_and_grads(
    model: nn.Module, call: Callable[..., Any], batch: Mapping[str, Any]
) -> list[Tensor]:
    """Return the loss and every gradient."""
    loss = call(**batch).loss
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return [loss.detach(), *(g for g in grads if g is not None)]


@pytest.mark.deep
@pytest.mark.parametrize(("kind", "kernel"), [(m, k) for m, found in SITES.items() for k in found])
def test_whole_models_of_transformers(kind: str, kernel: str) -> None:
    """The module that `Schedule.build` returns for a kernel is one graph, with the original's loss
    and gradients."""
    pytest.importorskip("transformers")
    batch = models.tokens(rows=4)
    if kind == "t5":
        del batch["attention_mask"]
    model = build_transformer(kind, kernel)
    expected = loss_and_grads(model, model, batch)
    schedule = schedlang.create_schedule(model)
    schedule[SITES[kind][kernel]].replace_kernel(kernel)
    module = schedule.build(batch=batch).module
    actual = loss_and_grads(module, compile_model(module), batch)
    assert_close(actual, loss_and_grads(module, module, batch), 1e-10)
    assert_close(actual, expected, 1e-5)  # these models compute norms and losses in float32
    assert counters["stats"]["unique_graphs"] == 1
