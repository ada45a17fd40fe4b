"""`replace_kernel` on norms and attention: the same results in models, or a refusal."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.kernels.kernel_device import backend_runs
from schedlang.kernels.norm_probes import NormForm
from schedlang.kernels.probe import Mismatch
from schedlang.runtime.activation_memory.recompute import checkpoint
from schedlang.runtime.float64 import Float64
from schedlang.runtime.kernel_injection.kernel import SdpaAttention, match, replace
from schedlang.runtime.modes import enter_modes
from schedlang.runtime.sequence_pipelining.carried_keys import cache_argument
from tests.kernels.kernels_in_use import kernels_of

transformers = pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 4,
}


def build_model(name="Llama", implementation="eager", **options):
    config = getattr(transformers, f"{name}Config")(**(SMALL | options))
    torch.manual_seed(0)
    auto = transformers.AutoModelForCausalLM
    return auto.from_config(config, attn_implementation=implementation).double()


def gradients(model, padded=False):
    ids = torch.arange(20).view(2, 10) % 32
    mask = torch.ones_like(ids)
    mask[1, : 3 * padded] = 0
    model.zero_grad()
    labels = ids.masked_fill(mask == 0, -100)
    with enter_modes(Float64):
        out = model(input_ids=ids, attention_mask=mask, labels=labels)
        out.loss.backward()
    return {"logits": out.logits.detach()} | {n: p.grad for n, p in model.named_parameters()}


def assert_close(actual, expected):
    largest = max(value.norm() for value in expected.values())
    for name, value in expected.items():
        assert (actual[name] - value).norm() <= 1e-12 * (value.norm() + 1e-3 * largest), name


@pytest.mark.parametrize("name", ["Llama", "Gemma"])
def test_norms_of_a_model(name):
    """Every norm of an unmodified model: equal in float64; names and hooks stay."""
    model = build_model(name)
    expected, state = gradients(model), list(model.state_dict())
    hook_calls = []
    norms = [m for n, m in model.named_modules() if n.endswith("norm")]
    assert len(norms) == 5
    norms[0].register_forward_hook(lambda *_: hook_calls.append(1))
    for norm in norms:
        norm_form = match(norm, "rms_norm")
        assert isinstance(norm_form, NormForm) and norm_form.form.rounding == {
            "Llama": "early"
        }.get(name, "late")
        replace(norm, norm_form)
        assert kernels_of(norm) == ("rms_norm",)
    before = backend_runs().get("reference", 0)
    assert_close(gradients(model), expected)
    assert backend_runs()["reference"] == before + 10 and hook_calls == [1]
    assert list(model.state_dict()) == state


def test_a_copy_uses_its_own_weight():
    """A deep copy of a replaced module uses its own parameters, also with a checkpoint."""
    norm = nn.RMSNorm(8, eps=1e-6).double()
    replace(norm, match(norm, "rms_norm"))
    checkpoint(norm)
    copied = copy.deepcopy(norm)
    with torch.no_grad():
        copied.weight.zero_()
    x = torch.randn(3, 8, dtype=torch.float64)
    assert copied(x).abs().max() == 0 and norm(x).abs().max() > 0


def test_norm_refuses_what_it_cannot_take():
    """More than one argument is refused in the call; other modules by the match."""
    norm = nn.RMSNorm(4, eps=1e-6)
    replace(norm, match(norm, "rms_norm"))
    with pytest.raises(Refusal, match="takes one"):
        norm.forward(torch.ones(4), torch.ones(4))
    assert "layer_norm" in match(nn.LayerNorm(4), "rms_norm").reason
    assert isinstance(match(nn.Linear(4, 4), "rms_norm"), Mismatch)


ATTENTIONS = ["Llama", "Gemma", "GPT2", "Phi3", "OPT", "GPTNeoX", "Phi"]  # Phi: half a head


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_of_one_layer(name):
    """One layer by sdpa, the other unchanged: equal in float64, with padding too."""
    config = {
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 4,
        "resid_pdrop": 0,
        "embd_pdrop": 0,
        "attn_pdrop": 0,
        "ffn_dim": 24,
        "word_embed_proj_dim": 16,
        "dropout": 0.0,
        "rotary_pct": 1.0,
    }
    model = build_model(name, **config)
    expected, expected_padded = gradients(model), gradients(model, padded=True)
    attentions = [m for m in model.modules() if type(m).__name__.endswith("Attention")]
    first, second = attentions
    kernel = match(first, "sdpa")
    assert isinstance(kernel, SdpaAttention) and not kernel.identity and kernel.error < 1e-12
    replace(first, kernel)
    assert kernels_of(first) == ("sdpa",) and not kernels_of(second)
    assert second.config._attn_implementation == "eager" == model.config._attn_implementation

    calls = count_sdpa(lambda: assert_close(gradients(model), expected))
    assert calls == 1
    # the last padding on the left predicts a token that counts: its gradient matters
    assert_close(gradients(model, padded=True), expected_padded)


def count_sdpa(run):
    """Return how often torch's fused attention is called."""
    from torch.overrides import TorchFunctionMode

    calls = []

    class Count(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch.nn.functional.scaled_dot_product_attention:
                calls.append(1)
            return func(*args, **(kwargs or {}))

    with Count():
        run()
    return len(calls)


def test_already_sdpa_is_the_identity():
    """A model that already uses sdpa stays unchanged."""
    model = build_model(implementation="sdpa")
    attention = model.model.layers[0].self_attn
    kernel = match(attention, "sdpa")
    config = attention.config
    assert isinstance(kernel, SdpaAttention) and kernel.identity
    replace(attention, kernel)
    assert attention.config is config


def test_attention_is_refused_with_the_reason():
    """Soft caps, other attention, modules without a config: each gives its reason."""
    capped = build_model("Gemma2").model.layers[0].self_attn
    assert "softcap" in match(capped, "sdpa").reason
    other = build_model().model.layers[0].self_attn
    other.config = copy.copy(other.config)
    other.config.__dict__["_attn_implementation_internal"] = "flash_attention_2"
    assert "flash_attention_2" in match(other, "sdpa").reason
    assert "has no attention" in match(nn.MultiheadAttention(4, 2), "sdpa").reason
    assert "does not call the attention function" in match(WithoutAttention(), "sdpa").reason
    assert "differs" in match(AddsSink(), "sdpa").reason


class WithoutAttention(nn.Module):
    """Has a config like the others, but no attention."""

    def __init__(self):
        super().__init__()
        self.config = copy.copy(build_model().config)
        self.proj = nn.Linear(16, 16)

    def forward(self, hidden_states):
        return self.proj(hidden_states), None


class MaskByName(WithoutAttention):
    """Attends as eager does, and passes the mask by name."""

    def forward(self, hidden_states, attention_mask=None):
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        def eager(module, q, k, v, attention_mask, **_):
            return ((q @ k.mT + attention_mask).softmax(-1) @ v).transpose(1, 2), None

        interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        x = self.proj(hidden_states).unsqueeze(1)
        out, _ = interface(self, x, x, x, attention_mask=attention_mask, scaling=1.0)
        return out[:, :, 0], None


def test_a_mask_that_is_given_by_name():
    """As AFMoE and Doge pass it: the module matches."""
    kernel = match(MaskByName(), "sdpa")
    assert isinstance(kernel, SdpaAttention) and kernel.error < 1e-12, kernel


class AddsSink(WithoutAttention):
    """Its eager attention adds a sink, which sdpa has not."""

    def forward(self, hidden_states, attention_mask=None):
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        def eager(module, q, k, v, attention_mask, **_):
            scores = q @ k.mT + attention_mask
            full = torch.cat([scores, torch.zeros_like(scores[..., :1])], -1).softmax(-1)
            return (full[..., :-1] @ v).transpose(1, 2), None

        interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        x = self.proj(hidden_states).unsqueeze(1)
        out, _ = interface(self, x, x, x, attention_mask, scaling=1.0)
        return out[:, :, 0], None


def test_match_on_the_meta_device_with_an_example():
    """Attention without values is probed with the shapes of an example call."""
    with torch.device("meta"):
        config = transformers.LlamaConfig(**SMALL)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    table = torch.empty(1, 5, 4, device="meta")
    call = (
        (),
        {
            "hidden_states": torch.empty(3, 5, 16, device="meta"),
            "attention_mask": torch.empty(3, 1, 5, 5, device="meta"),
            "position_embeddings": (table, table),
            cache_argument(model): transformers.DynamicCache(),
        },
    )
    kernel = match(model.model.layers[1].self_attn, "sdpa", call)
    assert isinstance(kernel, SdpaAttention) and kernel.error < 1e-12
    assert all(p.is_meta for p in model.parameters())


def test_a_kernel_is_given_one_tensor():
    """A call with more arguments than the kernel takes is refused (S821)."""
    norm = nn.RMSNorm(4, eps=1e-6)
    replace(norm, match(norm, "rms_norm"))
    with pytest.raises(Refusal, match="S821.*called with 2 arguments"):
        norm(torch.ones(2, 4), torch.ones(4))
