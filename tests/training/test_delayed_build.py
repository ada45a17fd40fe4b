"""Programs built at their first batch; whole batches, or each rank's own rows."""

import pytest
import torch
from torch import nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime.unbuilt_program import UnbuiltProgram
from schedlang.schedule import Schedule, create_schedule
from tests.engine import Threads
from tests.ranks import run_ranks


class Net(nn.Module):
    """Two layers and a mean over counted labels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 5)])
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        x = self.layers[1](self.drop(self.layers[0](x).relu()))
        if labels is None:
            return x
        return nn.functional.cross_entropy(x.flatten(0, 1), labels.flatten())


def _batch(rows: int = 5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    labels = torch.randint(5, (rows, 3), generator=generator)
    labels[0, 1:] = -100  # parts weigh differently
    return {"x": torch.randn(rows, 3, 6, generator=generator), "labels": labels}


def sgd(named):  # type: ignore[no-untyped-def]
    return torch.optim.SGD(named, lr=0.1)


def _schedule(dp: int = 1, pp: int = 1) -> Schedule:
    torch.manual_seed(1)
    sch = create_schedule(Net())
    sch.mesh(dp=dp, pp=pp)
    if pp > 1:
        sch["layers"].pipeline_split(over="pp")
    if dp > 1:
        sch.zero(stage=0, over="dp")
    return sch


def _loss(output, batch):  # type: ignore[no-untyped-def]
    return output


def train_step(sch: Schedule, **options) -> tuple[float, dict[str, torch.Tensor]]:  # type: ignore[no-untyped-def]
    program = sch.build(loss=_loss, optimizer=sgd, seed=3, **options)
    return float(program.train_step(_batch())), program.state_dict()


def equal_states(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.allclose(a[k], b[k], atol=1e-6) for k in a)


def test_built_at_the_first_batch() -> None:
    """With or without `batch=` the same program: the same loss and the same parameters."""
    built_early, built_late = train_step(_schedule(), batch=_batch()), train_step(_schedule())
    assert built_early[0] == built_late[0] and equal_states(built_early[1], built_late[1])


def test_what_waits_says_so() -> None:
    """Before the first batch nothing else is available, and the refusal says what to pass."""
    program = _schedule().build(loss=_loss)
    assert isinstance(program, UnbuiltProgram)
    for access in (lambda: program.module, lambda: program.state_dict(), lambda: program.grad_norm):
        with pytest.raises(Refusal, match="batch=batch"):
            access()
    with pytest.raises(Refusal, match="yet: the program is built at its first batch"):
        program.clip = 1.0
    with pytest.raises(AttributeError, match="has no `nonsense`"):
        _ = program.nonsense
    assert not hasattr(program, "__array__")
    assert program.eval_step(_batch()).ndim == 0
    program.clip = 0.5
    assert program.clip == 0.5 and isinstance(program.module, Net)


def test_a_batch_with_new_names_is_refused() -> None:
    """A program first used without labels would weigh by rows: training on labels is refused."""
    program = _schedule().build(loss=_loss)
    assert program.eval_step({"x": _batch()["x"]}).shape == (5, 3, 5)
    with pytest.raises(Refusal, match="the key `labels` of the batch was not in"):
        program.train_step(_batch())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda sch: sch.build(_batch()), "by name, not a dict by position"),
        (lambda sch: sch.build(optimiser=sgd), "did you mean `optimizer`"),
        (lambda sch: sch.build(optimizer=torch.optim.SGD), "give a function of them"),
        (lambda sch: sch.build(batch=torch.ones(3)), "`batch` is a Tensor, not a dict"),
        (lambda sch: sch.build(loss=3), "`loss` is a int"),
        (lambda sch: sch.build(clip=-1.0), "a number above 0"),
        (lambda sch: sch.build(seed=0.5), "give an integer"),
    ],
)
def test_mistakes_in_arguments(wrong, said: str) -> None:  # type: ignore[no-untyped-def]
    """A wrong argument of `build` is refused by name, before anything is built."""
    with pytest.raises(Refusal, match=said):
        wrong(_schedule())


def test_a_mesh_of_another_size_is_refused_at_once() -> None:
    """What needs no batch is checked without one."""
    with pytest.raises(Refusal, match="the mesh needs 2 ranks"):
        _schedule(dp=2).build()


def train_local(rank: int) -> tuple[float, dict[str, torch.Tensor], float]:
    batch = _batch()
    program = _schedule(dp=2).build(loss=_loss, optimizer=sgd, seed=3)
    rows = slice(0, 3) if rank == 0 else slice(3, 5)
    local_rows = {name: value[rows] for name, value in batch.items()}
    loss = program.train_step(local_rows, local=True)
    expected = train_step(_schedule(dp=2))
    return (
        float(loss),
        program.state_dict(),
        expected[0] if equal_states(program.state_dict(), expected[1]) else -1.0,
    )


def test_local_batches() -> None:
    """Each rank's own rows, uneven in number, give the results of the whole batch, with dropout."""
    one_rank = train_step(_schedule())
    for loss, state, full_loss in run_ranks(2, train_local):
        assert loss == pytest.approx(one_rank[0], rel=1e-6) and equal_states(state, one_rank[1])
        assert full_loss == pytest.approx(loss, rel=1e-6)


def read_module(rank: int) -> str:
    program = _schedule(pp=2).build(batch=_batch(), loss=_loss)
    try:
        _ = program.module
    except Refusal as refusal:
        return refusal.render()
    return ""


def test_a_pipeline_has_no_module() -> None:
    """`module` of a pipeline is refused, with what to use."""
    assert all("use `train_step`" in message for message in run_ranks(2, read_module))


def _masked(output, batch):  # type: ignore[no-untyped-def]
    """A mean over a mask of all ranks' rows."""
    losses = output.square().mean((1, 2)) + 0.0 * batch["labels"].sum()
    return (losses * batch["mask"]).sum() / batch["mask"].sum()


def _neighbours(output, batch):  # type: ignore[no-untyped-def]
    """A loss of rows 2i and 2i + 1, which each rank has."""
    score = (output.mean((1, 2)) * batch["mask"]) + 0.0 * batch["labels"].sum()
    return (score[0::2] - score[1::2]).square().mean()


@pytest.mark.parametrize("large", [False, True])
def test_rows_of_one_rank_are_checked_as_a_batch(
    large: bool, threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Built at `train_step(rows, local=True)`: a mean over a mask without weight is refused."""
    generator = torch.Generator().manual_seed(1)
    rows = [{"x": torch.rand(4, 3, 5, generator=generator)} for _ in range(2)]
    for number, batch in enumerate(rows):
        batch["labels"] = torch.ones(4, 3, dtype=torch.long)
        batch["mask"] = torch.tensor([1.0, 0.25, 0.5, 1.0]) * (number + 1)
    if large:
        monkeypatch.setattr("schedlang.passes.verify.probe.CHEAP_WORK", 0)

    def body(loss, weight):  # type: ignore[no-untyped-def]
        sch = create_schedule(Scores())
        sch.mesh(dp=2)
        sch.zero(stage=1, over="dp")
        program = sch.build(loss=loss, weight=weight, optimizer=sgd)
        return program.train_step(rows[program.dp_rank], local=True).isfinite().item()

    for loss, weight in ((_masked, lambda batch: float(batch["mask"].sum())), (_neighbours, None)):
        assert threads.run(body, 2, loss, weight) == [True, True]
    with pytest.raises(Refusal, match="S703"):
        threads.run(body, 2, _masked, None)


class Scores(torch.nn.Module):
    """One linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layer(x)
        return scores
