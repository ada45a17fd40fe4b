"""The first wrong module and the parts of the batch that a failed verdict names."""

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
from tests.judging import by_hand, net
from tests.judging.catches import lost_window, pipeline_accumulated
from tests.judging.catches.collectives import GatherFromSplit, local_part, rank_sum
from tests.judging.catches.language_model import WIDTH, LanguageModel, batch, loss, original


def _messages(report: Report) -> dict[str, str]:
    assert report.exit_code == 1, str(report)
    return dict(report.localised)


def _bug_messages(catch: Any, pool: Pool) -> dict[str, str]:
    torch.manual_seed(0)
    inputs = original(catch)
    return _messages(verify_program(catch.wrong, **inputs, ranks=2, pool=pool))


def test_what_a_pipeline_makes_to_learn_shapes_is_no_output(pool: Pool) -> None:
    """All modules are right, and the schedule scales gradients: only that is reported."""
    messages = _bug_messages(pipeline_accumulated, pool)
    assert "first module" not in messages, messages
    assert "2 parts of the batch count 0.5, 1 times what they should" in messages["gradients"]


def test_a_stage_that_is_made_in_each_step_learns_shapes_in_each(pool: Pool) -> None:
    """A pipeline with wrong labels has right modules: only the loss is wrong."""

    def program(model: Any) -> TrainingProgram:
        right = by_hand.torch_pipeline(model)

        def step(batch: Any) -> Any:
            return right.step({**batch, "labels": batch["labels"].roll(1, 0)})

        return TrainingProgram(right.module, step)

    torch.manual_seed(0)
    inputs: Any = {"model": net.Net(), "batch": net.batch, "loss": net.loss}
    message = _messages(verify_program(program, **inputs, ranks=2, pool=pool))["first module"]
    assert message.startswith("the loss: "), message


def test_places_that_are_wrong_are_no_rounding(pool: Pool) -> None:
    """A token that attends too far has an error as small as rounding, and is reported."""
    message = _bug_messages(lost_window, pool)["first module"]
    assert "the output of `inner`: right, but for places [2] of dim 1" in message
    assert "rounding" not in message


def _accumulating(micro: int, by_labels: bool) -> Any:
    """Return a program with micro-batches: the mean of their means, or weighted by labels."""

    def program(model: Any) -> TrainingProgram:
        def step(batch: Any) -> Any:
            total = torch.zeros((), dtype=torch.float64)
            for k in range(micro):
                micro_batch = net.batch_part(batch, k, micro)
                micro_loss = net.loss(model(micro_batch["ids"]), micro_batch) / micro
                if by_labels:
                    micro_loss = net.loss_share(model(micro_batch["ids"]), micro_batch, batch)
                micro_loss.backward()
                total += micro_loss.detach()
            return total

        return TrainingProgram(model, step)

    return program


def test_micro_batches_that_weigh_otherwise_are_told(pool: Pool) -> None:
    """Micro-batches with different factors are named, not a single factor "everywhere"."""
    for micro in (2, 4):
        torch.manual_seed(0)
        inputs = {"model": net.Net(depth=1), "batch": net.batch, "loss": net.loss}
        report = verify_program(_accumulating(micro, False), **inputs, ranks=1, pool=pool)
        messages = _messages(report)
        first_module = messages["first module"]
        assert (
            "the loss: the gradient that it sends back" in first_module
            and "everywhere" not in first_module
        )
        assert f"its {micro} parts of the batch have " in first_module, first_module
        assert f"the plain mean of what {micro} parts of the batch give" in messages["gradients"], (
            messages
        )
        report = verify_program(_accumulating(micro, True), **inputs, ranks=1, pool=pool)
        assert report.ok, str(report)


def test_sums_of_parts_with_other_weights_are_told(pool: Pool) -> None:
    """The factor of each wrongly weighted part is reported."""

    def program(model: Any) -> TrainingProgram:
        def step(batch: Any) -> Any:
            halves = [net.batch_part(batch, k, 2) for k in range(2)]
            losses = [net.loss_share(model(half["ids"]), half, batch) for half in halves]
            (losses[0] + 3 * losses[1]).backward()
            return losses[0] + losses[1]

        return TrainingProgram(model, step)

    torch.manual_seed(0)
    inputs = {"model": net.Net(depth=1), "batch": net.batch, "loss": net.loss}
    messages = _messages(verify_program(program, **inputs, ranks=1, pool=pool))
    assert "2 parts of the batch count 1, 3 times what they should" in messages["gradients"], (
        messages
    )


class PositionNet(torch.nn.Module):
    """Embeddings of tokens and positions, and a layer that does not mix tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.place = torch.nn.Embedding(12, 8), torch.nn.Embedding(6, 8)
        self.mixed, self.head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 12)

    def forward(self, ids: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Return scores of tokens; `first` is the position of the first token."""
        positions = torch.arange(first, first + ids.shape[1])
        return self.head(torch.tanh(self.mixed(self.word(ids) + self.place(positions))))


def _split_tokens(global_positions: bool) -> Any:
    """Return a program that splits tokens; positions are global, or wrongly start at zero."""

    def program(model: Any) -> TrainingProgram:
        def step(batch: Any) -> Any:
            local = local_part(batch["ids"], 1)
            first_position = dist.get_rank() * local.shape[1] if global_positions else 0
            scores = GatherFromSplit.apply(model(local, first_position), 1)
            value = loss(scores, batch)
            value.backward()
            for p in model.parameters():
                p.grad = rank_sum(p.grad)
            return value

        return TrainingProgram(model, step, world_loss="same")

    return program


def test_positions_of_other_words_are_told(pool: Pool) -> None:
    """Wrong positions of the second rank's tokens are named."""
    torch.manual_seed(0)
    inputs = {"model": PositionNet(), "batch": batch, "loss": loss, "ranks": 2, "pool": pool}
    assert verify_program(_split_tokens(True), **inputs).ok
    message = _messages(verify_program(_split_tokens(False), **inputs))["first module"]
    assert "on rank 1 `word` has the places [3, 4, 5], and `place` has [0, 1, 2]" in message, (
        message
    )


def test_an_output_that_is_laid_otherwise_is_told(pool: Pool) -> None:
    """An output with permuted or repeated positions is described by its positions."""

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
    inputs = {"model": PositionNet(), "batch": batch, "loss": loss, "ranks": 1, "pool": pool}
    message = _messages(verify_program(program, **inputs))["first module"]
    assert "`mixed`: along dim 1 it holds the places [0, 1, 2, 0, 1, 2] of what is right" in message


def test_words_before_rows_where_there_are_as_many() -> None:
    """A transposed part is located; a part with repeated values is not."""
    full = torch.randn(8, 9, 4, dtype=torch.float64)
    comparison = ValueComparison(RecordedStep({("inner", 0): ModuleCall([full])}))
    key = (("inner", 0), 0)
    part = full[2:4, :8].transpose(0, 1)
    places = comparison.find_elements(key, part)
    assert places is not None and torch.equal(full.reshape(-1)[places], part)
    assert comparison.find_elements(key, full[:, [0, 1, 2] * 3]) is None
    assert comparison.find_elements(key, full[[0, 1] * 4]) is None


def test_rows_beside_an_output_that_is_split() -> None:
    """The rows of a rank are inferred from another output of which it has some features."""
    size = torch.Size((4, 3, 6))
    places = torch.arange(size.numel()).reshape(size)[2:, :, 3:]
    split_output = module_comparison.RankOutput(1, ("up", 0), 0, torch.zeros(2, 3, 3), places, size)
    wrong_output = module_comparison.RankOutput(
        1, ("mlp", 0), 0, torch.zeros(2, 3, 2), None, torch.Size((4, 3, 2))
    )
    rows = module_comparison.find_rows(wrong_output, [split_output], torch.Size((4, 3, 2)))
    assert rows is not None and rows.tolist() == [[6, 7, 8], [9, 10, 11]]
    heads = torch.Size((4, 6, 3, 2))  # as many heads on a rank as it has tokens
    numbers = torch.arange(heads.numel()).reshape(heads)[2:, :3]
    heads_output = module_comparison.RankOutput(
        1, ("mix", 0), 0, torch.zeros(2, 3, 3, 2), numbers, heads
    )
    anchors = [heads_output, split_output]
    assert torch.equal(module_comparison.find_rows(wrong_output, anchors, wrong_output.shape), rows)


def test_a_step_that_is_another_after_right_gradients() -> None:
    """Right gradients and wrong parameters are attributed to the optimizer's step."""
    row = Row("own optimizer", "parameters", "w", 0.3, 1e-9, False, 0)
    key = Key("own optimizer", "parameters", 0, "w")
    expected, actual = (
        Observation({key: torch.tensor(value)}) for value in ([1.0, 2.0], [1.3, 1.9])
    )
    message = explanations._explain_first(row, expected, actual, {})
    assert message.startswith("`w`: ") and "its gradient is right: the optimizer's step" in message


def test_terms_that_ranks_have_as_copies(pool: Pool) -> None:
    """Partial gradients with copies on other ranks are combined rightly."""

    def program(model: Any) -> TrainingProgram:
        def step(batch: Any) -> Any:
            local = {"ids": batch["ids"].chunk(2)[dist.get_rank() // 2]}
            value = loss(model(local["ids"]), local)
            value.backward()
            for p in model.parameters():
                p.grad = rank_sum(p.grad) / 8
            return value

        return TrainingProgram(model, step)

    torch.manual_seed(0)
    inputs = {"model": PositionNet(), "batch": batch, "loss": loss, "ranks": 4, "pool": pool}
    messages = _messages(verify_program(program, **inputs))
    assert "1/2 times the right value" in messages["gradients"], messages
    assert "first module" not in messages, messages


def test_a_bias_that_is_added_later_is_no_difference(pool: Pool) -> None:
    """A layer whose bias is added later differs, but the loss is right: it is not named."""

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
    inputs = {"model": LanguageModel(inner), "batch": batch, "loss": loss, "ranks": 1, "pool": pool}
    messages = _messages(verify_program(program, **inputs))
    assert "1/2 times the right value" in messages["gradients"], messages
    assert "first module" not in messages, messages


def test_another_thing_than_a_wrong_one(pool: Pool) -> None:
    """Such a layer is skipped, and a later wrong one is named."""

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
    model = LanguageModel(torch.nn.Sequential(*layers))
    inputs = {"model": model, "batch": batch, "loss": loss, "ranks": 1, "pool": pool}
    message = _messages(verify_program(program, **inputs))["first module"]
    assert message.startswith("the output of `inner.2`: 2 times"), message
