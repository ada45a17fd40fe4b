"""Kernels under torch.compile(fullgraph=True): a model stays one graph, and what it computes."""

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

WORDS = 17
HEADS = ("linear_cross_entropy", "cross_entropy")


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """Each test counts its own graphs."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Layer(nn.Module):
    """Two norms, one of them after a sum; what is asked for by a flag; dropout between."""

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(6, eps=eps), nn.LayerNorm(6, eps=eps)
        self.mid, self.down = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, pair: Any = None, twice: bool = False, **more: Any) -> Tensor:
        """`pair` are a factor and a shift."""
        inner = self.mid(self.first(x))
        if pair is not None:
            inner = inner * pair[0] + pair[1]
        x = x + (inner * 2 if twice else inner)
        return x + self.down(F.dropout(self.second(x), 0.0, self.training))


class Model(nn.Module):
    """Words, layers and a loss, as models of transformers compute theirs."""

    def __init__(self, layers: int = 2, again: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.again = again
        self.embed = nn.Embedding(WORDS, 6)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(6, WORDS, bias=False)

    def forward(self, words: Tensor, labels: Tensor) -> dict[str, Any]:
        """The loss, and the logits."""
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
        loss = F.cross_entropy(logits.to(x.dtype).view(-1, WORDS), shifted.view(-1))
        return {"loss": loss, "logits": logits}


def put(model: nn.Module, kernel: str, *names: str) -> None:
    """The kernel, into modules that it must fit."""
    for name in names:
        found = match(model.get_submodule(name), kernel)
        assert not isinstance(found, Mismatch), found
        replace(model.get_submodule(name), found)


def with_kernels(model: Model, head: str) -> Model:
    """A copy with sums and norms in each layer, and a head whose product waits."""
    model = copy.deepcopy(model)
    put(model, "add_norm", *(f"layers.{k}" for k in range(len(model.layers))))
    put(model, head, "head")
    return model


def words(rows: int, length: int) -> dict[str, Tensor]:
    """A batch; some labels do not count."""
    drawn = torch.Generator().manual_seed(rows * 100 + length)
    found = torch.randint(WORDS, (rows, length), generator=drawn)
    return {"words": found, "labels": found.masked_fill(found % 5 == 0, -100)}


def trained(model: nn.Module, call: Callable[..., Any], batch: Mapping[str, Any]) -> list[Tensor]:
    """The loss, the logits and every gradient."""
    out = call(**batch)
    loss, logits = out["loss"], out["logits"]
    grads = torch.autograd.grad(loss, list(model.parameters()), retain_graph=False)
    whole = logits.full() if isinstance(logits, LazyLogits) else logits
    return [loss.detach(), whole.detach(), *grads]


def close(found: list[Tensor], expected: list[Tensor], rtol: float = 1e-12) -> None:
    """Within rounding of each other, by the norm of each."""
    for ours, plain in zip(found, expected, strict=True):
        assert ours.dtype == plain.dtype
        assert (ours - plain).norm() <= rtol * plain.norm() + 1e-15


def compiled(model: nn.Module) -> Callable[..., Any]:
    """As one graph, or it raises."""
    call: Callable[..., Any] = torch.compile(model, fullgraph=True, backend="aot_eager")
    return call


SIZES = ((2, 5), (2, 7), (3, 8), (4, 6))


@pytest.mark.deep
@pytest.mark.parametrize(("head", "again"), list(zip(HEADS, (True, False))))
def test_a_model_is_one_graph_for_all_sizes(head: str, again: bool) -> None:
    """With sums, norms and a head that waits: loss, logits and gradients of the untouched model, in
    as many graphs as it takes for batches of several sizes, by the kernels' own operators; also
    where the model recomputes its layers."""
    model = Model(again=again).double()
    expected = [trained(model, model, words(*size)) for size in SIZES]
    ours = with_kernels(model, head)
    found = []
    for one in (model, ours):
        torch._dynamo.reset()
        counters.clear()
        call = compiled(one)
        before = sum(backend_runs().values())
        for size, plain in zip(SIZES, expected):
            close(trained(one, call, words(*size)), plain)
        found.append((counters["stats"]["unique_graphs"], sum(backend_runs().values()) - before))
    (graphs, none), (taken, ran) = found
    assert taken == graphs and none == 0
    layers = len(model.layers) * (3 if again else 2)
    assert ran == len(SIZES) * (layers + (1 if head == HEADS[0] else 2))


@pytest.mark.deep
def test_equal_layers_are_one_graph() -> None:
    """Layers that are compiled one by one share a graph, as untouched ones do; one that has other
    numbers, or a hook on its norm, still computes its own."""
    torch.manual_seed(0)
    layers = nn.ModuleList(Layer(1e-2 if k == 2 else 1e-5) for k in range(12)).double()
    given = torch.randn(2, 5, 6, dtype=torch.float64)

    def run() -> list[Tensor]:
        x = given.clone().requires_grad_()
        y = x
        for layer in layers:
            y = layer(y, twice=True)
        leaves = [x, *layers.parameters()]
        return [y.detach(), *torch.autograd.grad(y.square().sum(), leaves)]

    expected, seen = run(), []
    put(layers, "add_norm", *map(str, range(12)))
    layers[5].second.register_forward_hook(lambda *_: seen.append(1))
    for layer in layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    before = sum(backend_runs().values())
    close(run(), expected, 1e-11)
    assert sum(backend_runs().values()) - before == 11 * 2
    assert counters["stats"]["unique_graphs"] <= 3


def test_what_a_flow_was_made_for() -> None:
    """A list that is longer, a flag, or evaluation takes another flow, compiled and not."""
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
    put(layer, "add_norm", "")
    whole = torch.compile(layer, fullgraph=True, backend="eager")
    for run, kinds in ((layer, 5), (whole, 1), (layer.eval(), 5)):
        for call, plain in list(zip(calls, expected))[-kinds:]:
            torch.testing.assert_close(run(x, **call), plain, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("head", HEADS)
def test_logits_come_out_of_a_graph(head: str) -> None:
    """What a head gives is still not computed outside of its graph, and whoever asks gets it."""
    torch.manual_seed(0)
    layer = nn.Linear(6, WORDS).double()
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([3, -100, 16, 0])
    leaves = [x, *layer.parameters()]

    def run(call: Callable[..., Any]) -> list[Tensor]:
        z = call(x)
        loss = F.cross_entropy(2 * torch.tanh(z.to(torch.float64) / 4), labels)
        return [loss.detach(), z[1:3] + 0.0, *torch.autograd.grad(loss, leaves)]

    expected = run(layer)
    put(layer, head, "")
    call = torch.compile(layer, fullgraph=True, backend="aot_eager")
    made = call(x)
    assert isinstance(made, LazyLogits) and made.computed is None and made.shape == (4, WORDS)
    close(run(call), expected)


@pytest.mark.deep
def test_masks_that_hide_all_are_seen_when_a_graph_runs() -> None:
    """Torch's attention with a mask is one graph, which computes rows that see no key (padding on
    the left) as the module does: two masks of one shape, and neither compiles anew."""
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaAttention

    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=16, num_attention_heads=2, attn_implementation="eager")
    attention = LlamaAttention(config, 0)
    x = torch.randn(2, 5, 16, requires_grad=True)
    angles = torch.randn(2, 1, 5, 8)
    lowest = torch.finfo(torch.float32).min
    seen = torch.full((2, 1, 5, 5), lowest).triu(1)
    blind = seen.clone()
    blind[1, :, :2] = lowest
    blind[1, :, :, :2] = lowest

    def run(call: Callable[..., Any], mask: Tensor) -> list[Tensor]:
        given = {"position_embeddings": (angles[0].cos(), angles[1].sin()), "attention_mask": mask}
        made = call(x, **given)[0]
        total = (made * torch.linspace(-1, 1, made.numel()).view(made.shape)).sum()
        return [made.detach(), *torch.autograd.grad(total, [x, *attention.parameters()])]

    expected = [run(attention, mask) for mask in (seen, blind)]
    put(attention, "sdpa", "")
    call = torch.compile(attention, fullgraph=True, backend="aot_eager")
    for mask, plain in zip((seen, blind), expected):
        close(run(call, mask), plain, 1e-5)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("kernel", [*HEADS, ""])
def test_a_loss_that_is_a_module(kernel: str) -> None:
    """`nn.CrossEntropyLoss()`, made inside of a graph with whatever it takes, asks the logits."""
    torch.manual_seed(0)
    layer = nn.Linear(6, WORDS).double()
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([3, 5, 16, 0])

    def lost(z: Any) -> Tensor:
        once: Tensor = nn.CrossEntropyLoss(None, ignore_index=5, label_smoothing=0.1)(z, labels)
        return once + nn.CrossEntropyLoss(reduction="sum")(input=z.view(-1, WORDS), target=labels)

    def run(call: Callable[..., Any]) -> list[Tensor]:
        loss = call(x)
        return [loss.detach(), *torch.autograd.grad(loss, [x, *layer.parameters()])]

    def whole(x: Tensor) -> Tensor:
        return lost(layer(x))

    expected = run(whole)
    if kernel:
        put(layer, kernel, "")
    before = sum(backend_runs().values())
    close(run(torch.compile(whole, fullgraph=True, backend="aot_eager")), expected)
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


def transformer(kind: str, kernel: str) -> nn.Module:
    """A tiny model as transformers makes it, ready to train."""
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


def stepped(model: nn.Module, call: Callable[..., Any], batch: Mapping[str, Any]) -> list[Tensor]:
    """The loss and every gradient."""
    loss = call(**batch).loss
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return [loss.detach(), *(g for g in grads if g is not None)]


@pytest.mark.deep
@pytest.mark.parametrize(("kind", "kernel"), [(m, k) for m, found in SITES.items() for k in found])
def test_whole_models_of_transformers(kind: str, kernel: str) -> None:
    """What `Schedule.build` gives for a row of the menu is one graph where the untouched model is
    one, with its loss and gradients."""
    pytest.importorskip("transformers")
    batch = models.tokens(rows=4)
    if kind == "t5":
        del batch["attention_mask"]
    model = transformer(kind, kernel)
    expected = stepped(model, model, batch)
    schedule = schedlang.create_schedule(model)
    schedule[SITES[kind][kernel]].replace_kernel(kernel)
    module = schedule.build(batch=batch).module
    found = stepped(module, compiled(module), batch)
    close(found, stepped(module, module, batch), 1e-10)
    close(found, expected, 1e-5)  # these models compute norms and losses in float32
    assert counters["stats"]["unique_graphs"] == 1
