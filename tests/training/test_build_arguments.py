"""Wrong arguments of `build` and `verify`, beside the model: each is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.lower.build import build
from schedlang.schedule import create_schedule
from tests.engine import Threads
from tests.proofs import make_plan


def net() -> nn.Module:
    """Return two projections."""
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def batch(seed: int = 0) -> dict[str, Any]:
    """Return eight rows."""
    g = torch.Generator().manual_seed(seed)
    return {"input": torch.randn(8, 6, generator=g), "y": torch.randn(8, 4, generator=g)}


def loss(output: Any, batch: Any) -> Any:
    """Return the mean error."""
    return F.mse_loss(output, batch["y"])


def step_loss(threads: Threads, given: Any = None, **options: Any) -> Any:
    """Return the loss of one step on two ranks."""

    def body() -> Any:
        sch = create_schedule(net())
        sch.mesh(dp=2)
        sch.zero(stage=1, over="dp")
        sgd: Any = lambda named: torch.optim.SGD(named, lr=0.1)  # noqa: E731
        program = sch.build(**{"batch": batch(), "loss": loss, "optimizer": sgd, **options})
        return program.train_step(batch() if given is None else given)

    return threads.run(body, 2)[0]


OTHER_PARAMETERS = list(net().parameters())
WRONG_ARGUMENTS: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"optimizer": lambda named: None}, "S618", "`optimizer` returns None"),
    ({"optimizer": lambda named: [torch.optim.SGD(named)]}, "S618", "returns a list"),
    (
        {"optimizer": lambda named: torch.optim.SGD(OTHER_PARAMETERS)},
        "S618",
        "none of the program's",
    ),
    ({"clip": float("nan")}, "S618", "`clip` is nan"),
    ({"weight": lambda part: -1.0}, "S621", "`weight` gives -1 for a part"),
    ({"weight": lambda part: float("nan")}, "S621", "`weight` gives nan for a part"),
    ({"loss": lambda output, batch: loss(output, batch) * 1j}, "S615", "a complex number"),
    ({"given": {1: torch.ones(8, 6)}}, "S619", "the keys of a batch are names, not an int"),
)


@pytest.mark.parametrize(
    "options, code, said", WRONG_ARGUMENTS, ids=[said for *_, said in WRONG_ARGUMENTS]
)
def test_what_is_given_wrongly_to_build(
    options: dict[str, Any], code: str, said: str, threads: Threads
) -> None:
    """Each is refused with its reason and a legal alternative."""
    assert torch.isfinite(step_loss(threads))
    with pytest.raises(Refusal) as caught:
        step_loss(threads, **options)
    assert caught.value.diagnostic.code == code and said in caught.value.render()
    assert caught.value.diagnostic.helps


class LearnedLoss(nn.Module):
    """A loss with a learned number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output: Any, batch: Any) -> torch.Tensor:
        return loss(output * self.scale, batch)


MODEL = net()
UNTRAINED: tuple[tuple[Any, str], ...] = (
    (lambda output, batch: loss(output.detach(), batch), "the loss has no gradient"),
    (lambda output, batch: loss(output, batch) + MODEL[0].bias.sum(), "`0.bias`, which no program"),
    (LearnedLoss(), "`scale`, which no program trains"),
)


@pytest.mark.parametrize("given, said", UNTRAINED, ids=[said for _, said in UNTRAINED])
def test_a_loss_whose_gradient_nobody_sees(given: Any, said: str) -> None:
    """A gradient that a program could not use is refused: a program trains a copy of the model."""
    with pytest.raises(Refusal) as caught:
        create_schedule(MODEL).build(batch=batch(), loss=given).train_step(batch())
    assert caught.value.diagnostic.code == "S615" and said in caught.value.render()


class Balanced(nn.Module):
    """Keeps a number for the loss in an attribute, a list, or a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 1)
        self.aux: Any = 0.0
        self.losses: list[torch.Tensor] = []
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the prediction."""
        y: torch.Tensor = self.lin(x)
        self.aux = y.square().mean()
        self.losses[:] = [self.aux]
        self.count += 1
        return y


BALANCED = Balanced()
READS: dict[str, Any] = {
    "aux": lambda: BALANCED.aux,
    "losses": lambda: sum(BALANCED.losses),
    "count": lambda: BALANCED.count,
    "aux again": lambda: next(m for m in BALANCED.modules() if type(m) is Balanced).aux,
}


@pytest.mark.parametrize("name", READS)
def test_a_loss_that_reads_what_the_forward_writes(name: str) -> None:
    """What a copy of the model writes is not what the loss reads of the model: refused."""
    x = {"x": torch.ones(2, 4)}

    def reading(output: Any, batch: Any) -> torch.Tensor:
        value: torch.Tensor = output.square().mean() + 0.1 * READS[name]()
        return value

    with pytest.raises(Refusal) as caught:
        create_schedule(BALANCED).build(batch=x, loss=reading)
    said = f"the loss reads `{name.split()[0]}` of the model, which no program writes"
    assert caught.value.diagnostic.code == "S615" and said in caught.value.render()
    assert "__getattribute__" not in vars(Balanced)


def test_a_loss_that_reads_a_setting_of_the_model() -> None:
    """What a forward does not write is read."""
    program = create_schedule(BALANCED).build(
        batch={"x": torch.ones(2, 4)},
        loss=lambda y, batch: y.square().mean() * BALANCED.lin.in_features,
    )
    assert program.train_step({"x": torch.ones(2, 4)}).isfinite()


@pytest.mark.parametrize("way", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_gradient(way: str) -> None:
    """A copy does not have the hook, so the program would train without it."""
    model = net()
    handle = getattr(model[0].weight, way)(lambda given: None)
    with pytest.raises(Refusal, match="S867"):
        create_schedule(model).build(batch=batch(), loss=loss)
    handle.remove()
    assert create_schedule(model).build(batch=batch(), loss=loss).train_step(batch()).isfinite()


class MappedLayer(nn.Module):
    """Calls a layer for each row by `torch.vmap`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, input: torch.Tensor) -> Any:
        return torch.vmap(self.layer)(input)


def compiled_layer() -> nn.Module:
    model: Any = net()
    model[0] = torch.compile(model[0], backend="eager")
    return nn.Sequential(*model)


LAYERS: tuple[tuple[Any, str, str], ...] = (
    (lambda: nn.Sequential(nn.Linear(6, 8), nn.LazyLinear(4)), "0", "S623"),
    (compiled_layer, "0", "S401"),
    (MappedLayer, "layer", "S843"),
)


@pytest.mark.parametrize("model, path, code", LAYERS, ids=[code for *_, code in LAYERS])
def test_layers_that_take_no_row(model: Any, path: str, code: str) -> None:
    """Without a shape, wrapped by `torch.compile`, or called in a transform: refused."""
    with pytest.raises(Refusal) as caught:
        sch = create_schedule(model())
        sch[path].checkpoint()
        sch.build(batch=batch(), loss=loss)
    assert caught.value.diagnostic.code == code


@pytest.mark.parametrize("local", ["False", 0, None])
def test_a_word_is_no_choice_of_rows(local: Any) -> None:
    """`local="False"`, as a configuration may have it, is not taken for true."""
    program = create_schedule(net()).build(batch=batch(), loss=loss)
    for step in (program.train_step, program.eval_step):
        with pytest.raises(Refusal, match="`local` is"):
            step(batch(), local=local)


BATCHES: tuple[tuple[Any, str], ...] = (
    (lambda seed: None, "`batch` returns None"),
    (lambda seed: [1], "`batch` returns a list"),
    (lambda a, b: batch(), "`batch` needs `a` and `b`"),
    (3, "`batch` is an int"),
)


@pytest.mark.parametrize("given, said", BATCHES, ids=[said for _, said in BATCHES])
def test_batches_that_are_none(given: Any, said: str) -> None:
    """A function of batches takes a seed and returns a dict."""
    sch = create_schedule(net())
    with pytest.raises(Refusal) as caught:
        sch.verify(batch=given, loss=loss)
    assert caught.value.diagnostic.code == "S902" and said in caught.value.render()


def test_a_hook_that_writes_into_the_model_itself() -> None:
    """Methods, and functions that hold the model, are copied with it. A function that finds the
    original elsewhere would write there, not into the copy, and is refused."""

    class Counted(nn.Module):
        """Counts its calls by a hook."""

        def __init__(self, kind: str) -> None:
            super().__init__()
            self.up = nn.Linear(4, 4)
            self.register_buffer("calls", torch.zeros(()))
            elsewhere = {"model": self}
            hooks = {
                "method": self.count,
                "function": lambda module, args, out: self.count(module, args, out),
                "elsewhere": lambda *call: elsewhere["model"].count(*call),
            }
            self.up.register_forward_hook(hooks[kind])

        def count(self, module: nn.Module, args: Any, output: Tensor) -> None:
            """Count one more call."""
            self.calls += 1

        def forward(self, x: Tensor) -> Tensor:
            """Return a mean of squares."""
            return self.up(x).square().mean()

    inputs = {"x": torch.ones(4, 4)}
    with pytest.raises(Refusal, match="writes into `calls` of the model") as caught:
        build(make_plan(Counted("elsewhere"), "up  offload(activations)"), inputs)
    assert caught.value.diagnostic.code == "S867"
    for kind in ("method", "function"):
        model = Counted(kind)
        program = build(make_plan(model, "up  offload(activations)"), inputs)
        program.train_step(inputs)
        assert program.state_dict()["calls"] == 1 and model.calls == 0, kind
