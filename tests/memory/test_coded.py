"""Tests of activations in fewer bits: what is kept, what it means, who is compared with whom."""

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
from tests.proofs import assert_near, planned, proven, sequential, sgd, steps
from tests.tiers import thinned

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def drawn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Numbers of some shape."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


# -- codes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_within_a_step_of_its_block(dtype: torch.dtype, bits: int) -> None:
    """Each element is off by less than one step of its own block, and codes take their bits."""
    x = drawn(37, 11, dtype=dtype)
    x[:6] *= 100  # blocks of other sizes
    made = quantize(x, Quantization(bits, 32), stream=5)
    flat, found = x.reshape(-1), made.tensor().reshape(-1)
    assert found.dtype == dtype and made.tensor().shape == x.shape
    for one, two in zip(flat.split(32), found.split(32)):
        step = float(one.double().max() - one.double().min()) / (2**bits - 1)
        slack = 2 * torch.finfo(dtype).eps * float(one.abs().max())
        assert float((one.double() - two.double()).abs().max()) <= step + slack
    blocks = -(-x.numel() // 32)
    item = 8 if dtype == torch.float64 else 4
    assert made.codes.nbytes == blocks * 32 * bits // 8
    assert made.nbytes == blocks * 32 * bits // 8 + 2 * blocks * item
    assert made.nbytes == Quantization(bits, 32).stored_bytes(x.numel(), x.element_size())


def test_the_mean_over_draws_is_the_tensor() -> None:
    """The mean over many streams is within five standard errors, and rounding to nearest is not."""
    x, coding, count = drawn(64), Quantization(2, 64), 4000
    mean = torch.stack([quantize(x, coding, s).tensor() for s in range(count)]).mean(0)
    step = (x.max() - x.min()) / 3
    bound = 5 * (step / 2) / count**0.5
    assert float((mean - x).abs().max()) < float(bound)
    nearest = x.min() + ((x - x.min()) / step).round() * step
    assert float((nearest - x).abs().max()) > 5 * float(bound)


def test_the_gradient_of_a_linear_layer_is_right_in_the_mean() -> None:
    """Over many steps of draws the weight's gradient approaches the exact one, and the input's,
    which needs no activation, is exact at once."""
    torch.manual_seed(0)
    layer = nn.Linear(16, 4).double()
    x, given = drawn(8, 16).requires_grad_(), drawn(8, 4, seed=1)
    layer(x).backward(given)
    exact, of_input = layer.weight.grad.clone(), x.grad.clone()
    quantize_saved(layer, "it", Quantization(2, 16))
    errors = {}
    total, count = torch.zeros_like(exact), 0
    for often in (1, 400):
        while count < often:
            layer.weight.grad = x.grad = None
            layer(x).backward(given)
            total, count = total + layer.weight.grad, count + 1
        errors[often] = float((total / count - exact).norm() / exact.norm())
    assert torch.equal(x.grad, of_input)
    assert errors[1] > 0.05 and errors[400] < 0.15 * errors[1]


def test_elements_do_not_share_their_draws() -> None:
    """Rounding errors of neighbours, of blocks and of streams are not correlated."""
    x = torch.rand(4096, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    one, two = (quantize(x, Quantization(4, 64), s).tensor() - x for s in (1, 2))
    for other in (two, one.roll(1), one.roll(64)):
        assert abs(float(torch.corrcoef(torch.stack([one, other]))[0, 1])) < 0.08


@pytest.mark.parametrize(
    "make",
    [lambda x: x.t(), lambda x: x[:, ::2], lambda x: x.reshape(4, 6, 8, 4).permute(0, 3, 1, 2)],
)
def test_strides(make: Any) -> None:
    """What is not contiguous comes back with its values in their places."""
    x = make(drawn(24, 32))
    found = quantize(x, Quantization(20, 8), 0).tensor()
    torch.testing.assert_close(found, x, rtol=0, atol=1e-5)
    assert found.stride() == torch.empty_like(x).stride()


@pytest.mark.parametrize("bits", [2, 4, 8, 44])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_has_no_size_is_told_apart(dtype: torch.dtype, bits: int) -> None:
    """Among values that nobody looked at, those that stand for none come back as they were, and
    the others within a step of their block; without any, numbers are those of what was seen."""
    x = drawn(37, 11, dtype=dtype)
    same = quantize(x, Quantization(bits, 32), 5, True)
    assert torch.equal(same.tensor(), quantize(x, Quantization(bits, 32), 5).tensor())
    for value in (-torch.inf, torch.inf, torch.finfo(dtype).min, torch.finfo(dtype).max):
        masked = x.clone()
        masked[3:9, ::2] = masked[20:30] = value  # some of a block, and whole ones
        found = quantize(masked, Quantization(bits, 32), 5, True).tensor()
        away = masked == value
        assert torch.equal(found == value, away)
        levels = max(1, 2**bits - 2) if bits <= 8 else 2**bits - 1
        for one, two, out in zip(*(t.reshape(-1).split(32) for t in (masked, found, away))):
            near = one[~out].double()
            if near.numel():
                slack = 2 * torch.finfo(dtype).eps * float(near.abs().max())
                step = float(near.max() - near.min()) / levels
                assert float((near - two[~out].double()).abs().max()) <= step + slack
    both = x.clone()
    both[0, :2] = torch.tensor([-torch.inf, torch.inf])
    assert quantize(both, Quantization(bits, 32), 5, True).tensor()[0, :2].isnan().all()


def test_what_numbers_can_say_is_exact() -> None:
    """Two values in a block, and one, come back to the last bit or nearly; large codes too."""
    x = torch.where(drawn(256) > 0, 3.0, -1.0).double()
    torch.testing.assert_close(
        quantize(x, Quantization(2, 64), 0).tensor(), x, rtol=1e-15, atol=1e-15
    )
    same = torch.full((128,), 0.1, dtype=torch.float32)
    assert torch.equal(quantize(same, Quantization(2, 64), 0).tensor(), same)
    fine = drawn(512)
    torch.testing.assert_close(
        quantize(fine, Quantization(44), 0).tensor(), fine, rtol=0, atol=1e-11
    )


# -- what is coded -------------------------------------------------------------------------------


class Many(nn.Module):
    """Saves a weight, a mask, indices, statistics of rows, a table, and one tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.lin, self.two = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        y = self.norm(x)
        y = self.lin(y) * torch.sigmoid(self.two(y))
        y = y.masked_fill(table > 1, 0.0) * table
        attended = F.scaled_dot_product_attention(y[:, None], y[:, None], y[:, None])[:, 0]
        return x.gather(1, torch.zeros_like(x, dtype=torch.int64)) + attended


def saved_by(layer: nn.Module, *given: Tensor) -> list[Any]:
    """What autograd holds after a forward of a coded module, as the hooks left it."""
    from schedlang.runtime.activation_memory import quantized

    held: list[Any] = []
    plain = quantized._Call.pack

    def pack(self: Any, tensor: Tensor) -> Any:
        held.append((tensor, plain(self, tensor)))
        return held[-1][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantized._Call, "pack", pack)
        layer(*given)
    return held


def test_what_stays() -> None:
    """Weights, masks, indices, sums of rows and what comes without a gradient stay in the very
    memory; the rest is coded, once."""
    layer, tally = Many().double(), QuantizationCounts()
    quantize_saved(layer, "it", Quantization(8, 32), tally)
    x, table = drawn(4, 6, 16).requires_grad_(), drawn(4, 6, 16, seed=2)
    held = saved_by(layer, x, table)
    stay = [tensor for tensor, kept in held if stays(tensor, kept)]
    weights = {p.data_ptr() for p in layer.parameters()}
    assert sum(t.data_ptr() in weights for t in stay) >= 3
    assert any(t.dtype == torch.bool for t in stay) and any(t.dtype == torch.int64 for t in stay)
    assert any(t.data_ptr() == table.data_ptr() for t in stay)
    assert any(t.shape == (4, 6, 1) for t in stay) and any(t.shape == (4, 1, 6) for t in stay)
    quantized = [(tensor, kept) for tensor, kept in held if not stays(tensor, kept)]
    assert all(t.shape[-1] == 16 and t.data_ptr() not in weights for t, _ in quantized)
    codes = {kept.codes.data_ptr() for _, kept in quantized}
    assert tally.tensors == len(codes) < len(quantized)  # the norm's result is saved twice
    assert tally.after < 0.3 * tally.before


def stays(tensor: Tensor, kept: object) -> bool:
    """Whether what is kept of a tensor is its own memory."""
    return unpack(kept).data_ptr() == tensor.data_ptr()


def test_masked_scores_are_kept_as_they_are() -> None:
    """A tensor with values that stand for none is not coded: its others would all become equal."""
    scores = drawn(4, 64)
    low = torch.finfo(scores.dtype).min
    for fill, as_it_is in ((0.0, False), (low, True), (float("inf"), True), (float("nan"), True)):
        module = _Times()
        quantize_saved(module, "it", Quantization(8, 32))
        x = scores.clone().requires_grad_()
        (tensor, kept), *_ = saved_by(module, x.masked_fill(x > 1, fill))
        assert stays(tensor, kept) == as_it_is


class _Times(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


# -- programs ------------------------------------------------------------------------------------

ROW = "transformer.h.*  compress(activations, {}, block=32)\n"
PIPE = 'transformer.h pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)\n'


def dropping(layers: int = 2) -> nn.Module:
    """GPT-2 with dropout."""
    return models.gpt2(layers, dropout=0.1)


def tokens(rows: int = 6) -> list[dict[str, Any]]:
    """Batches of GPT-2, of unlike sizes."""
    return [models.tokens(rows=rows + seed, seed=seed) for seed in range(2)]


@pytest.mark.parametrize(
    "how, more, mesh",
    thinned(
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
    """Outputs, loss, every gradient and training; with dropout; whatever cuts the batch."""
    plan = planned(models.gpt2(2, dropout=0.1), ROW.format(how) + more, mesh, "lossy")
    report = proven(threads, plan, tokens())
    assert report.equivalence == "relaxed (lossy)"


class Signs(nn.Module):
    """A layer that is given ones and minus ones, through which gradients pass."""

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
    """Where whole numbers can say what is kept, training on three ranks is the original's own."""
    batches = [{"x": drawn(7, 8, seed=seed)} for seed in range(3)]
    rows = f"{before}second  compress(activations, {how}, block=16)\nzero(stage=0, over=dp)"
    plan = planned(Signs().double(), rows, "dp=3", "lossy")
    found = threads.run(steps, 3, plan, batches, sgd, None, {})[0]
    assert_near(found, sequential(Signs().double(), batches, sgd))


def test_it_is_lossy(threads: Threads) -> None:
    """Gradients are not the original's, by about what two bits leave out."""
    plan = planned(models.gpt2(2), ROW.format("int2"), "", "lossy")
    batch = models.tokens(rows=6)
    found = threads.run(steps, 1, plan, [batch], sgd, None, {})[0]
    plain = sequential(models.gpt2(2), [batch], sgd)
    name = "grad 0 transformer.h.0.mlp.c_fc.weight"
    error = float((found[name] - plain[name]).norm() / plain[name].norm())
    assert 0.02 < error < 1.0
    assert torch.allclose(found["loss 0"], plain["loss 0"])  # the forward is the original's


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
    """What says half, what is not allowed, and what else decides of saved tensors."""
    with pytest.raises(Refusal) as error:
        plan = planned(models.gpt2(2, tied=False), rows, mesh, relax)
        prepare(plan, models.tokens(rows=4))
    assert code in error.value.render() and said in error.value.render()


@pytest.mark.parametrize("what", ["optimizer", "activations"])
def test_a_peer_that_there_is_not_is_in_nobodys_way(what: str) -> None:
    """A row that does nothing, along an axis of one rank, is not met."""
    rows = f"transformer.h.*  offload({what}, to=peer, over=pp)\n" + ROW.format("int8")
    plan = planned(models.gpt2(2, tied=False), rows, "pp=1", "lossy")
    assert prepare(plan, models.tokens(rows=4)) and not plan.stores


# -- bytes ---------------------------------------------------------------------------------------


def spared(rows: str) -> tuple[float, int]:
    """Bytes fewer at the peak of GPT-2 under a row: as the plan has it, as the modules count."""
    from schedlang.ir.memory import CLASSES
    from schedlang.passes.simulate.simulated_ranks import estimate_memory
    from schedlang.runtime.forward import layers_of

    batch, found = models.tokens(rows=4), []
    for each in ("", rows):
        plan = planned(models.gpt2(4), each, "", "lossy" if each else "")
        told = estimate_memory(plan, batch, None, prepare(plan, batch))[0]
        place = CLASSES.index("activations")
        found.append(max(moment.end[place] for moment in told.moments))
    program = build(plan, batch, optimizer=sgd)
    program.train_step(batch)
    saved = 0
    for block in range(4):
        layers = layers_of(program.assembly.module.get_submodule(f"transformer.h.{block}"))
        assert layers is not None
        layer: Any = layers.kinds["code"]
        saved += layer.tally.before - layer.tally.after
    return found[0] - found[1], saved


@pytest.mark.parametrize("bits", [8, 2])
def test_the_plan_knows_the_bytes(bits: int) -> None:
    """What a row saves at the peak, as the plan has it, is what the program's modules save."""
    told, saved = spared(ROW.format(f"int{bits}"))
    assert told == pytest.approx(saved, rel=0.1)
