"""Compressed activations: rounding, what is compressed, equality with one process, bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.analyze.prepare import prepare
from schedlang.passes.lower.build import build
from schedlang.runtime.activation_memory.quantized import (
    Quantization,
    QuantizationCounts,
    quantize,
    quantize_saved,
)
from schedlang.runtime.storage.saved_tensors_slot import unpack
from tests import models
from tests.engine import Threads
from tests.proofs import (
    assert_near,
    assert_proven,
    make_plan,
    sgd,
    train_on_ranks,
    train_sequential,
)
from tests.tiers import thin_out

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def random_tensor(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Return random numbers of a shape."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


# -- codes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_within_a_step_of_its_block(dtype: torch.dtype, bits: int) -> None:
    """Each element's error is below one step of its block, and codes have the given bits."""
    x = random_tensor(37, 11, dtype=dtype)
    x[:6] *= 100  # blocks of other magnitudes
    quantized = quantize(x, Quantization(bits, 32), stream=5)
    flat, restored = x.reshape(-1), quantized.tensor().reshape(-1)
    assert restored.dtype == dtype and quantized.tensor().shape == x.shape
    for original, decoded in zip(flat.split(32), restored.split(32)):
        step = float(original.double().max() - original.double().min()) / (2**bits - 1)
        slack = 2 * torch.finfo(dtype).eps * float(original.abs().max())
        assert float((original.double() - decoded.double()).abs().max()) <= step + slack
    blocks = -(-x.numel() // 32)
    item = 8 if dtype == torch.float64 else 4
    assert quantized.codes.nbytes == blocks * 32 * bits // 8
    assert quantized.nbytes == blocks * 32 * bits // 8 + 2 * blocks * item
    assert quantized.nbytes == Quantization(bits, 32).stored_bytes(x.numel(), x.element_size())


def test_the_mean_over_draws_is_the_tensor() -> None:
    """The mean over many streams is within five standard errors; rounding to nearest is not."""
    x, coding, count = random_tensor(64), Quantization(2, 64), 4000
    mean = torch.stack([quantize(x, coding, s).tensor() for s in range(count)]).mean(0)
    step = (x.max() - x.min()) / 3
    bound = 5 * (step / 2) / count**0.5
    assert float((mean - x).abs().max()) < float(bound)
    nearest = x.min() + ((x - x.min()) / step).round() * step
    assert float((nearest - x).abs().max()) > 5 * float(bound)


def test_the_gradient_of_a_linear_layer_is_right_in_the_mean() -> None:
    """Over many steps the mean of the weight's gradient approaches the exact one; the input's is
    exact at once."""
    torch.manual_seed(0)
    layer = nn.Linear(16, 4).double()
    x, grad_output = random_tensor(8, 16).requires_grad_(), random_tensor(8, 4, seed=1)
    layer(x).backward(grad_output)
    exact, input_grad = layer.weight.grad.clone(), x.grad.clone()
    quantize_saved(layer, "it", Quantization(2, 16))
    errors = {}
    total, count = torch.zeros_like(exact), 0
    for target in (1, 400):
        while count < target:
            layer.weight.grad = x.grad = None
            layer(x).backward(grad_output)
            total, count = total + layer.weight.grad, count + 1
        errors[target] = float((total / count - exact).norm() / exact.norm())
    assert torch.equal(x.grad, input_grad)
    assert errors[1] > 0.05 and errors[400] < 0.15 * errors[1]


def test_elements_do_not_share_their_draws() -> None:
    """Rounding errors of neighbours, blocks and streams are not correlated."""
    x = torch.rand(4096, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    first, second = (quantize(x, Quantization(4, 64), s).tensor() - x for s in (1, 2))
    for other in (second, first.roll(1), first.roll(64)):
        assert abs(float(torch.corrcoef(torch.stack([first, other]))[0, 1])) < 0.08


@pytest.mark.parametrize(
    "make",
    [lambda x: x.t(), lambda x: x[:, ::2], lambda x: x.reshape(4, 6, 8, 4).permute(0, 3, 1, 2)],
)
def test_strides(make: Any) -> None:
    """A tensor that is not contiguous is restored with its values and strides."""
    x = make(random_tensor(24, 32))
    restored = quantize(x, Quantization(20, 8), 0).tensor()
    torch.testing.assert_close(restored, x, rtol=0, atol=1e-5)
    assert restored.stride() == torch.empty_like(x).stride()


@pytest.mark.parametrize("bits", [2, 4, 8, 44])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_has_no_size_is_told_apart(dtype: torch.dtype, bits: int) -> None:
    """If values were not checked before, infinities and extreme values (masks) are restored
    exactly, and the others within a step of their block."""
    x = random_tensor(37, 11, dtype=dtype)
    same = quantize(x, Quantization(bits, 32), 5, True)
    assert torch.equal(same.tensor(), quantize(x, Quantization(bits, 32), 5).tensor())
    for value in (-torch.inf, torch.inf, torch.finfo(dtype).min, torch.finfo(dtype).max):
        masked = x.clone()
        masked[3:9, ::2] = masked[20:30] = value  # parts of blocks, and complete blocks
        restored = quantize(masked, Quantization(bits, 32), 5, True).tensor()
        is_masked = masked == value
        assert torch.equal(restored == value, is_masked)
        levels = max(1, 2**bits - 2) if bits <= 8 else 2**bits - 1
        for original, decoded, masked_out in zip(
            *(t.reshape(-1).split(32) for t in (masked, restored, is_masked))
        ):
            visible = original[~masked_out].double()
            if visible.numel():
                slack = 2 * torch.finfo(dtype).eps * float(visible.abs().max())
                step = float(visible.max() - visible.min()) / levels
                assert float((visible - decoded[~masked_out].double()).abs().max()) <= step + slack
    infinities = x.clone()
    infinities[0, :2] = torch.tensor([-torch.inf, torch.inf])
    assert quantize(infinities, Quantization(bits, 32), 5, True).tensor()[0, :2].isnan().all()


def test_what_numbers_can_say_is_exact() -> None:
    """Blocks with one or two values are exact, or nearly; so are codes of many bits."""
    x = torch.where(random_tensor(256) > 0, 3.0, -1.0).double()
    torch.testing.assert_close(
        quantize(x, Quantization(2, 64), 0).tensor(), x, rtol=1e-15, atol=1e-15
    )
    constant = torch.full((128,), 0.1, dtype=torch.float32)
    assert torch.equal(quantize(constant, Quantization(2, 64), 0).tensor(), constant)
    fine = random_tensor(512)
    torch.testing.assert_close(
        quantize(fine, Quantization(44), 0).tensor(), fine, rtol=0, atol=1e-11
    )


# -- what is coded -------------------------------------------------------------------------------


class SavesMany(nn.Module):
    """Saves a weight, a mask, indices, row statistics, a table, and one tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.lin, self.two = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        y = self.norm(x)
        y = self.lin(y) * torch.sigmoid(self.two(y))
        y = y.masked_fill(table > 1, 0.0) * table
        attended = F.scaled_dot_product_attention(y[:, None], y[:, None], y[:, None])[:, 0]
        return x.gather(1, torch.zeros_like(x, dtype=torch.int64)) + attended


def saved_pairs(layer: nn.Module, *inputs: Tensor) -> list[Any]:
    """Return what autograd saves in a forward of a compressed module: pairs of tensor and saved
    form."""
    from schedlang.runtime.activation_memory import quantized

    pairs: list[Any] = []
    original_pack = quantized._Call.pack

    def pack(self: Any, tensor: Tensor) -> Any:
        pairs.append((tensor, original_pack(self, tensor)))
        return pairs[-1][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantized._Call, "pack", pack)
        layer(*inputs)
    return pairs


def test_what_stays() -> None:
    """Weights, masks, indices, row statistics and inputs without a gradient stay as they are; the
    rest is compressed, once."""
    layer, counts = SavesMany().double(), QuantizationCounts()
    quantize_saved(layer, "it", Quantization(8, 32), counts)
    x, table = random_tensor(4, 6, 16).requires_grad_(), random_tensor(4, 6, 16, seed=2)
    pairs = saved_pairs(layer, x, table)
    unchanged = [tensor for tensor, kept in pairs if is_unchanged(tensor, kept)]
    weights = {p.data_ptr() for p in layer.parameters()}
    assert sum(t.data_ptr() in weights for t in unchanged) >= 3
    assert any(t.dtype == torch.bool for t in unchanged) and any(
        t.dtype == torch.int64 for t in unchanged
    )
    assert any(t.data_ptr() == table.data_ptr() for t in unchanged)
    assert any(t.shape == (4, 6, 1) for t in unchanged) and any(
        t.shape == (4, 1, 6) for t in unchanged
    )
    quantized = [(tensor, kept) for tensor, kept in pairs if not is_unchanged(tensor, kept)]
    assert all(t.shape[-1] == 16 and t.data_ptr() not in weights for t, _ in quantized)
    codes = {kept.codes.data_ptr() for _, kept in quantized}
    assert counts.tensors == len(codes) < len(quantized)  # the norm's output is saved twice
    assert counts.after < 0.3 * counts.before


def is_unchanged(tensor: Tensor, kept: object) -> bool:
    """Return whether the saved form is the tensor's own memory."""
    return unpack(kept).data_ptr() == tensor.data_ptr()


def test_masked_scores_are_kept_as_they_are() -> None:
    """A tensor with masking values is not compressed: its other values would all become equal."""
    scores = random_tensor(4, 64)
    lowest = torch.finfo(scores.dtype).min
    for fill, unchanged in (
        (0.0, False),
        (lowest, True),
        (float("inf"), True),
        (float("nan"), True),
    ):
        module = _Square()
        quantize_saved(module, "it", Quantization(8, 32))
        x = scores.clone().requires_grad_()
        (tensor, kept), *_ = saved_pairs(module, x.masked_fill(x > 1, fill))
        assert is_unchanged(tensor, kept) == unchanged


class _Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


# -- programs ------------------------------------------------------------------------------------

ROW = "transformer.h.*  compress(activations, {}, block=32)\n"
PIPELINE = 'transformer.h pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)\n'


def gpt2_dropout(layers: int = 2) -> nn.Module:
    """Return GPT-2 with dropout."""
    return models.gpt2(layers, dropout=0.1)


def token_batches(rows: int = 6) -> list[dict[str, Any]]:
    """Return batches of GPT-2, of different sizes."""
    return [models.tokens(rows=rows + seed, seed=seed) for seed in range(2)]


@pytest.mark.parametrize(
    "how, more, mesh",
    thin_out(
        [
            ("int2", "zero(stage=0, over=dp)", "dp=3"),
            ("int4", "zero(stage=3, over=dp)", "dp=2"),
            (
                "int8",
                'transformer.h pipeline_split(over=pp)\npipeline(order="1F1B", micro=3)',
                "pp=2",
            ),
            ("int2", "zero(stage=0, over=dp)\ncompress(gradients, int8, over=dp)", "dp=2"),
            (
                "int4",
                'transformer.h pipeline_split(over=pp)\npipeline(order="ZB-H1", micro=2)',
                "pp=2",
            ),
        ]
    ),
)
def test_equal_to_one_process_that_rounds_alike(
    threads: Threads, how: str, more: str, mesh: str
) -> None:
    """Outputs, loss, gradients and training equal those of one process with the same rounding."""
    plan = make_plan(models.gpt2(2, dropout=0.1), ROW.format(how) + more, mesh, "lossy")
    report = assert_proven(threads, plan, token_batches())
    assert report.equivalence == "relaxed (lossy)"


class Signs(nn.Module):
    """Its second layer gets ones and minus ones, with gradients passed through."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        signs = torch.where(h > 0, 1.0, -1.0).double() + (h - h.detach())
        return (self.second(signs) ** 2).mean()


@pytest.mark.parametrize(
    "before, how", [("", "int2"), ("", "adaptive, bits=2"), ("second  checkpoint()\n", "int2")]
)
def test_in_the_limit_it_is_the_original(threads: Threads, before: str, how: str) -> None:
    """If rounding loses nothing, training on three ranks equals the original."""
    batches = [{"x": random_tensor(7, 8, seed=seed)} for seed in range(3)]
    rows = f"{before}second  compress(activations, {how}, block=16)\nzero(stage=0, over=dp)"
    plan = make_plan(Signs().double(), rows, "dp=3", "lossy")
    actual = train_on_ranks(threads, plan, batches)
    assert_near(actual, train_sequential(Signs().double(), batches, sgd))


def test_it_is_lossy(threads: Threads) -> None:
    """Gradients differ from the original's by about what two bits lose."""
    plan = make_plan(models.gpt2(2), ROW.format("int2"), "", "lossy")
    batch = models.tokens(rows=6)
    actual = train_on_ranks(threads, plan, [batch])
    expected = train_sequential(models.gpt2(2), [batch], sgd)
    name = "grad 0 transformer.h.0.mlp.c_fc.weight"
    error = float((actual[name] - expected[name]).norm() / expected[name].norm())
    assert 0.02 < error < 1.0
    assert torch.allclose(actual["loss 0"], expected["loss 0"])  # the forward is not changed


@pytest.mark.parametrize(
    "rows, mesh, relax, code, said",
    [
        (ROW.format("int8"), "", "", "S505", "relax(lossy)"),
        (ROW.format("onebit"), "", "lossy", "S856", "int8, int4, int2"),
        ("compress(activations, int8)", "", "lossy", "S856", "layers.*  compress"),
        (
            "transformer.h.*  compress(activations, int8, rank=2)",
            "",
            "lossy",
            "S856",
            "leave them out",
        ),
        ("compress(gradients, int8)", "", "lossy", "S856", "over=dp"),
        ("compress(gradients, int2)", "", "lossy", "S856", "powersgd, int8, onebit"),
        (ROW.format("int8") * 2, "", "lossy", "S501", "already"),
        (
            "transformer.h.*  checkpoint(save=[linear, collective])\n" + ROW.format("int8"),
            "",
            "lossy",
            "S857",
            "results of collectives",
        ),
        (
            "transformer.h.*  checkpoint(plan=dtr, memory=1MiB)\n" + ROW.format("int8"),
            "",
            "lossy",
            "S857",
            "dropped at run time",
        ),
        (
            "transformer.h.0  checkpoint()\ntransformer.h.0.mlp  compress(activations, int8)",
            "",
            "lossy",
            "S857",
            "recomputed inside",
        ),
        ("offload(parameters)\n" + ROW.format("int8"), "", "lossy", "S857", "moved in and out"),
        (
            ROW.format("int8") + "transformer.h pipeline_split(over=pp)\n"
            'pipeline(order="PipeDream", micro=4)',
            "pp=2",
            "lossy, staleness",
            "S859",
            "1F1B",
        ),
    ],
)
def test_refusals(rows: str, mesh: str, relax: str, code: str, said: str) -> None:
    """Incomplete rows, rows that are not allowed, and other rows for the same saved tensors."""
    with pytest.raises(Refusal) as error:
        plan = make_plan(models.gpt2(2, tied=False), rows, mesh, relax)
        prepare(plan, models.tokens(rows=4))
    assert code in error.value.render() and said in error.value.render()


@pytest.mark.parametrize("what", ["optimizer", "activations"])
def test_a_peer_that_there_is_not_is_in_nobodys_way(what: str) -> None:
    """Offloading to a peer along an axis of one rank does nothing, and is no conflict."""
    rows = f"transformer.h.*  offload({what}, to=peer, over=pp)\n" + ROW.format("int8")
    plan = make_plan(models.gpt2(2, tied=False), rows, "pp=1", "lossy")
    assert prepare(plan, models.tokens(rows=4)) and not plan.stores


# -- bytes ---------------------------------------------------------------------------------------


def saved_bytes(rows: str) -> tuple[float, int]:
    """Return the bytes that a row saves at GPT-2's peak: by the plan, and as modules count them."""
    from schedlang.ir.memory import CLASSES
    from schedlang.passes.simulate.simulated_ranks import estimate_memory
    from schedlang.runtime.forward import layers_of

    batch, peaks = models.tokens(rows=4), []
    for schedule in ("", rows):
        plan = make_plan(models.gpt2(4), schedule, "", "lossy" if schedule else "")
        estimate = estimate_memory(plan, batch, None, prepare(plan, batch))[0]
        index = CLASSES.index("activations")
        peaks.append(max(moment.end[index] for moment in estimate.moments))
    program = build(plan, batch, optimizer=sgd)
    program.train_step(batch)
    saved = 0
    for block in range(4):
        layers = layers_of(program.assembly.module.get_submodule(f"transformer.h.{block}"))
        assert layers is not None
        layer: Any = layers.kinds["code"]
        saved += layer.tally.before - layer.tally.after
    return peaks[0] - peaks[1], saved


@pytest.mark.parametrize("bits", [8, 2])
def test_the_plan_knows_the_bytes(bits: int) -> None:
    """The plan's saving at the peak equals the modules' own count."""
    estimated, saved = saved_bytes(ROW.format(f"int{bits}"))
    assert estimated == pytest.approx(saved, rel=0.1)
