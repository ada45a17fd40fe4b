"""What a failure says of the first module, and of parts of the batch: only what is so."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from schedlang import TrainingProgram, verify_program
from schedlang.passes.judge import explanations, module_comparison
from schedlang.passes.judge.module_calls import ModuleCall, RecordedStep
from schedlang.passes.judge.module_comparison import ValueComparison
from schedlang.passes.verify.observe import Key, Observation
from schedlang.report import Report, Row
from schedlang.runtime.launch.pool import Pool
from tests.judging import net
from tests.judging.catches import lost_window, pipeline_accumulated
from tests.judging.catches.parts import Gathered, own, total
from tests.judging.catches.words import WIDTH, Words, batch, loss, original


def _said(report: Report) -> dict[str, str]:
    assert report.exit_code == 1, str(report)
    return dict(report.localised)


def _of(catch: Any, pool: Pool) -> dict[str, str]:
    torch.manual_seed(0)
    options = original(catch)
    return _said(verify_program(catch.wrong, **options, ranks=2, pool=pool))


def test_what_a_pipeline_makes_to_learn_shapes_is_no_output(pool: Pool) -> None:
    """All modules are right, and the schedule scales what they give: that alone is said."""
    said = _of(pipeline_accumulated, pool)
    assert "first module" not in said, said
    assert "2 parts of the batch count 0.5, 1 times what they should" in said["gradients"]


def test_places_that_are_wrong_are_no_rounding(pool: Pool) -> None:
    """A word that sees too much is off by as much as a rounding would be, and is no rounding."""
    said = _of(lost_window, pool)["first module"]
    assert "the output of `inner`: right, but for places [2] of dim 1" in said
    assert "rounding" not in said


def _accumulated(micro: int, weigh: bool) -> Any:
    """A step of one rank in micro-batches: the mean of their means, or each by its labels."""

    def program(model: Any) -> TrainingProgram:
        def step(batch: Any) -> Any:
            total = torch.zeros((), dtype=torch.float64)
            for place in range(micro):
                part = net.part(batch, place, micro)
                one = net.loss(model(part["ids"]), part) / micro
                if weigh:
                    one = net.share(model(part["ids"]), part, batch)
                one.backward()
                total += one.detach()
            return total

        return TrainingProgram(model, step)

    return program


def test_micro_batches_that_weigh_otherwise_are_told(pool: Pool) -> None:
    """Each has its own factor: none of them is wrong "everywhere"."""
    for micro in (2, 4):
        torch.manual_seed(0)
        original = {"model": net.Net(depth=1), "batch": net.batch, "loss": net.loss}
        report = verify_program(_accumulated(micro, False), **original, ranks=1, pool=pool)
        said = _said(report)
        first = said["first module"]
        assert "the loss: the gradient that it sends back" in first and "everywhere" not in first
        assert f"its {micro} parts of the batch have " in first, first
        assert f"the plain mean of what {micro} parts of the batch give" in said["gradients"], said
        report = verify_program(_accumulated(micro, True), **original, ranks=1, pool=pool)
        assert report.ok, str(report)


def test_sums_of_parts_with_other_weights_are_told(pool: Pool) -> None:
    """Weights that are neither right nor alike: by how much each is off."""

    def program(model: Any) -> TrainingProgram:
        def step(batch: Any) -> Any:
            shares = [net.part(batch, k, 2) for k in range(2)]
            found = [net.share(model(one["ids"]), one, batch) for one in shares]
            (found[0] + 3 * found[1]).backward()
            return found[0] + found[1]

        return TrainingProgram(model, step)

    torch.manual_seed(0)
    original = {"model": net.Net(depth=1), "batch": net.batch, "loss": net.loss}
    said = _said(verify_program(program, **original, ranks=1, pool=pool))
    assert "2 parts of the batch count 1, 3 times what they should" in said["gradients"], said


class Placed(torch.nn.Module):
    """Words and their positions, and something that mixes neither."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.place = torch.nn.Embedding(12, 8), torch.nn.Embedding(6, 8)
        self.mixed, self.head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 12)

    def forward(self, ids: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Scores of words, of which the first has some position."""
        places = torch.arange(first, first + ids.shape[1])
        return self.head(torch.tanh(self.mixed(self.word(ids) + self.place(places))))


def _words(right: bool) -> Any:
    """Words in two: each rank counts positions from its own first word, or from that of all."""

    def program(model: Any) -> TrainingProgram:
        def step(batch: Any) -> Any:
            mine = own(batch["ids"], 1)
            first = dist.get_rank() * mine.shape[1] if right else 0
            scores = Gathered.apply(model(mine, first), 1)
            value = loss(scores, batch)
            value.backward()
            for p in model.parameters():
                p.grad = total(p.grad)
            return value

        return TrainingProgram(model, step, world_loss="same")

    return program


def test_positions_of_other_words_are_told(pool: Pool) -> None:
    """The second rank's words have the positions of the first's."""
    torch.manual_seed(0)
    original = {"model": Placed(), "batch": batch, "loss": loss, "ranks": 2, "pool": pool}
    assert verify_program(_words(True), **original).ok
    said = _said(verify_program(_words(False), **original))["first module"]
    assert "on rank 1 `word` has the places [3, 4, 5], and `place` has [0, 1, 2]" in said, said


def test_an_output_that_is_laid_otherwise_is_told(pool: Pool) -> None:
    """A half twice: which place of what is right each place holds."""

    def program(model: Any) -> TrainingProgram:
        def twice(_module: Any, _given: Any, output: torch.Tensor) -> torch.Tensor:
            return torch.cat([output[:, :3], output[:, :3]], 1)

        model.mixed.register_forward_hook(twice)

        def step(batch: Any) -> Any:
            value = loss(model(batch["ids"]), batch)
            value.backward()
            return value

        return TrainingProgram(model, step)

    torch.manual_seed(0)
    original = {"model": Placed(), "batch": batch, "loss": loss, "ranks": 1, "pool": pool}
    said = _said(verify_program(program, **original))["first module"]
    assert "`mixed`: along dim 1 it holds the places [0, 1, 2, 0, 1, 2] of what is right" in said


def test_words_before_rows_where_there_are_as_many() -> None:
    """Eight words of two rows lie in eight rows of nine words; words that come twice do not."""
    whole = torch.randn(8, 9, 4, dtype=torch.float64)
    looks = ValueComparison(RecordedStep({("inner", 0): ModuleCall([whole])}))
    at = (("inner", 0), 0)
    part = whole[2:4, :8].transpose(0, 1)
    places = looks.find_elements(at, part)
    assert places is not None and torch.equal(whole.reshape(-1)[places], part)
    assert looks.find_elements(at, whole[:, [0, 1, 2] * 3]) is None
    assert looks.find_elements(at, whole[[0, 1] * 4]) is None


def test_rows_beside_an_output_that_is_split() -> None:
    """Which rows a rank has is told by an output of which it has some features alone."""
    size = torch.Size((4, 3, 6))
    places = torch.arange(size.numel()).reshape(size)[2:, :, 3:]
    half = module_comparison.RankOutput(1, ("up", 0), 0, torch.zeros(2, 3, 3), places, size)
    wrong = module_comparison.RankOutput(
        1, ("mlp", 0), 0, torch.zeros(2, 3, 2), None, torch.Size((4, 3, 2))
    )
    found = module_comparison.find_rows(wrong, [half], torch.Size((4, 3, 2)))
    assert found is not None and found.tolist() == [[6, 7, 8], [9, 10, 11]]


def test_a_step_that_is_another_after_right_gradients() -> None:
    """A rate that falls with each micro-batch is looked for in the optimizer, not in sums."""
    row = Row("own optimizer", "parameters", "w", 0.3, 1e-9, False, 0)
    key = Key("own optimizer", "parameters", 0, "w")
    want, got = (Observation({key: torch.tensor(value)}) for value in ([1.0, 2.0], [1.3, 1.9]))
    said = explanations._explain_first(row, want, got, {})
    assert said.startswith("`w`: ") and "its gradient is right: the optimizer's step" in said


def test_terms_that_ranks_have_as_copies(pool: Pool) -> None:
    """Rows in two, each half on two ranks: positions have a term of each half, and are right."""

    def program(model: Any) -> TrainingProgram:
        def step(batch: Any) -> Any:
            mine = {"ids": batch["ids"].chunk(2)[dist.get_rank() // 2]}
            value = loss(model(mine["ids"]), mine)
            value.backward()
            for p in model.parameters():
                p.grad = total(p.grad) / 8
            return value

        return TrainingProgram(model, step)

    torch.manual_seed(0)
    original = {"model": Placed(), "batch": batch, "loss": loss, "ranks": 4, "pool": pool}
    said = _said(verify_program(program, **original))
    assert "1/2 times the right value" in said["gradients"], said
    assert "first module" not in said, said


def test_a_bias_that_is_added_later_is_no_difference(pool: Pool) -> None:
    """A layer gives another thing than the original's, and the loss is right: it is not blamed."""

    def program(model: Any) -> TrainingProgram:
        layer = model.inner[0]
        layer.register_forward_hook(lambda _module, _given, output: output - layer.bias)
        model.inner[1].register_forward_pre_hook(lambda _module, given: given[0] + layer.bias)

        def step(batch: Any) -> Any:
            value = loss(model(batch["ids"]), batch)
            value.backward()
            for p in model.parameters():
                p.grad = p.grad / 2
            return value

        return TrainingProgram(model, step)

    torch.manual_seed(0)
    inner = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())
    original = {"model": Words(inner), "batch": batch, "loss": loss, "ranks": 1, "pool": pool}
    said = _said(verify_program(program, **original))
    assert "1/2 times the right value" in said["gradients"], said
    assert "first module" not in said, said


def test_another_thing_than_a_wrong_one(pool: Pool) -> None:
    """A layer whose bias is added later is passed over; a later one that is wrong is named."""

    def program(model: Any) -> TrainingProgram:
        layer = model.inner[0]
        layer.register_forward_hook(lambda _module, _given, output: output - layer.bias)
        model.inner[1].register_forward_pre_hook(lambda _module, given: given[0] + layer.bias)
        model.inner[2].register_forward_hook(lambda _module, _given, output: output * 2)

        def step(batch: Any) -> Any:
            value = loss(model(batch["ids"]), batch)
            value.backward()
            return value

        return TrainingProgram(model, step)

    torch.manual_seed(0)
    layers = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH)
    model = Words(torch.nn.Sequential(*layers))
    original = {"model": model, "batch": batch, "loss": loss, "ranks": 1, "pool": pool}
    said = _said(verify_program(program, **original))["first module"]
    assert said.startswith("the output of `inner.2`: 2 times"), said
