"""Losses over pairs of rows: rows gathered over ranks, against the model on the full batch."""

from __future__ import annotations

import copy
import math
import re
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.plan import Plan
from schedlang.passes.analyze.prepare import prepare
from schedlang.passes.autoshard.propose import propose
from schedlang.passes.lower.build import build
from schedlang.passes.prove import Case, prove
from schedlang.passes.simulate.account import account
from schedlang.passes.verify import probe
from schedlang.passes.verify.probe import check_if_cheap
from tests.engine import Threads
from tests.proofs import assert_proven, make_plan, static_holds
from tests.sharding.test_propose import plan_from_text
from tests.towers import Towers, contrast
from tests.towers import batch as pairs
from tests.zoo_models.written import Written, hand_text, judge

GATHERS = "{image,text}  gather_rows(over=dp)\n"
CUT = 'text  pipeline_split(over=pp)\npipeline(order="1F1B", micro=1)\n'
LAYOUTS = {
    "dp": ("zero(stage=0, over=dp)", "dp=2"),
    "zero1": ("zero(stage=1, over=dp)", "dp=2"),
    "zero3": ("zero(stage=3, over=dp)", "dp=3"),
    "uneven": ("zero(stage=1, over=dp, rows=[3, 1])", "dp=2"),
    "overlap": ("zero(stage=0, over=dp)\noverlap(gradients)", "dp=2"),
    "checkpoint": ("{image,text}  checkpoint()\nzero(stage=0, over=dp)", "dp=2"),
    "tp": (
        "{image,text}.0  shard(col, over=tp)\n{image,text}.2  shard(row, over=tp)\n"
        "zero(stage=3, over=dp)",
        "dp=2, tp=2",
    ),
    "pp": (CUT + "zero(stage=1, over=dp)", "dp=2, pp=2"),
    "two data axes": ("zero(stage=1, over=dp)\nzero(stage=0, over=rep)", "rep=2, dp=2"),
}


def features_loss(output: Any, batch: Any) -> Tensor:
    """Return the loss of the features."""
    return contrast(*output)


class Supervised(nn.Module):
    """One encoder of two views; rows of one label attract each other (Khosla et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(6, 16), Labelled()

    def forward(self, view: Tensor, other: Tensor, label: Tensor) -> Tensor:
        """Return the loss over all pairs of rows."""
        first, labels = self.head(torch.tanh(self.encoder(view)), label)
        second, _ = self.head(torch.tanh(self.encoder(other)), label)
        logits = F.normalize(first, dim=-1) @ F.normalize(second, dim=-1).t() / 0.5
        same = labels[:, None] == labels
        picked = F.log_softmax(logits, dim=-1).masked_fill(~same, 0).sum(-1) / same.sum(-1)
        loss: Tensor = -picked.mean()
        return loss


class Labelled(nn.Module):
    """A projection that passes labels on."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 8)

    def forward(self, x: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """Return the projected rows, and their labels."""
        return self.project(x), label


def views(seed: int, rows: int = 8) -> dict[str, Tensor]:
    """Return a batch of two views with labels."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(rows, 6, generator=generator) for name in ("view", "other")}
    return {**drawn, "label": torch.randint(0, 3, (rows,), generator=generator)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_towers(layout: str, threads: Threads) -> None:
    """Outputs, loss, all gradients and three steps are those of the full batch; types hold."""
    rows, mesh = LAYOUTS[layout]
    gathers = GATHERS.replace("dp", "(rep, dp)") if "rep" in mesh else GATHERS
    torch.manual_seed(0)
    plan = make_plan(Towers(), gathers + rows, mesh)
    assert_proven(threads, plan, [pairs(0), pairs(1, rows=7)])
    static_holds(plan, pairs(0))


def test_a_loss_beside_the_model(threads: Threads) -> None:
    """Outputs of evaluation have each row once, though every rank has all of them."""
    plan = make_plan(Towers(inside=False), GATHERS + "zero(stage=1, over=dp)", "dp=2")
    assert_proven(threads, plan, [pairs(0), pairs(1, rows=7)], loss=features_loss)


def test_labels_of_gathered_rows(threads: Threads) -> None:
    """A module that returns labels too has them gathered; a module may be called twice."""
    plan = make_plan(Supervised(), "head  gather_rows(over=dp)\nzero(stage=1, over=dp)", "dp=2")
    assert_proven(threads, plan, [views(0), views(1, rows=7)])


def test_clip_of_transformers(threads: Threads) -> None:
    """CLIP with its own loss, under tensor parallelism of its towers."""
    from transformers import CLIPConfig, CLIPModel

    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "attention_dropout": 0.0,
    }
    text = {**sizes, "vocab_size": 40, "max_position_embeddings": 8, "eos_token_id": 39}
    vision = {**sizes, "image_size": 8, "patch_size": 4}
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    rows = (
        "{vision,text}_model.encoder.layers.* {\n"
        "  self_attn.{q,k,v}_proj  shard(col, over=tp)\n"
        "  self_attn.out_proj  shard(row, over=tp)\n"
        "  mlp.fc1  shard(col, over=tp)\n  mlp.fc2  shard(row, over=tp)\n}\n"
        "{visual,text}_projection  gather_rows(over=dp)\nzero(stage=3, over=dp)\n"
    )
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 39, (4, 8), generator=generator)
    ids[:, -1] = 39
    batch = {
        "input_ids": ids,
        "pixel_values": torch.randn(4, 3, 8, 8, generator=generator),
        "return_loss": True,
    }
    torch.manual_seed(0)
    plan = make_plan(CLIPModel(config), "at " + rows, "dp=2, tp=2")
    assert_proven(threads, plan, [batch])


@pytest.mark.parametrize("local", [False, True])
def test_a_plain_loop(local: bool, threads: Threads) -> None:
    """Three steps and an evaluation are those of plain torch, with seven rows and with eight.

    With `local=True` ranks have three and four rows that only they know.
    """
    torch.manual_seed(0)
    model = Towers().double()
    model.image[3] = nn.Identity()
    plan = make_plan(model, GATHERS + "zero(stage=1, over=dp)", "dp=2")
    batches = [
        {name: value.double() for name, value in pairs(seed, rows).items()}
        for seed, rows in enumerate((7, 8, 7))
    ]
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = plain(**batch)["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    with torch.no_grad():
        expected = plain(**batches[0])

    def run() -> None:
        program = build(
            plan, batches[1], optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)
        )

        def part(batch: dict[str, Tensor]) -> dict[str, Tensor]:
            if not local:
                return batch
            return {
                name: value[:3] if dist.get_rank() == 0 else value[3:]
                for name, value in batch.items()
            }

        for batch, loss in zip(batches, losses):
            torch.testing.assert_close(program.train_step(part(batch), local=local), loss)
        output = program.eval_step(part(batches[0]), local=local)
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(program.state_dict(), dict(plain.state_dict()))

    threads.run(run, 2)


def test_a_plan_tells_of_the_gathers() -> None:
    """Eight rows of eight floats are gathered forward and reduce-scattered backward, by the row."""
    plan = make_plan(Towers(), GATHERS + "zero(stage=0, over=dp)", "dp=2")
    sent = [
        (c.kind, c.what, c.count, c.bytes, c.row)
        for c in account(plan, pairs(0)).collectives
        if c.fqn == "image"
    ]
    assert sent == [
        ("all-gather", "rows", 1, 8 * 8 * 4, 0),
        ("reduce-scatter", "rows grad", 1, 8 * 8 * 4, 0),
    ]


def test_refusals() -> None:
    """A batch that is not split, or over more axes; microbatches; rows gathered twice."""
    cases = {
        "S412": (GATHERS, "dp=1"),
        "S412 ": (GATHERS + LAYOUTS["two data axes"][0], "rep=2, dp=2"),
        "S668": (
            GATHERS + CUT.replace("micro=1", "micro=2") + "zero(stage=0, over=dp)",
            "dp=2, pp=2",
        ),
        "S501": (GATHERS + "image  gather_rows(over=dp)", "dp=2"),
    }
    for code, (rows, mesh) in cases.items():
        with pytest.raises(Refusal) as caught:
            prepare(make_plan(Towers(), rows, mesh), pairs(0))
        assert caught.value.diagnostic.code == code.strip()


class Doubled(nn.Module):
    """An encoder of both views at once: its output has two rows for each row of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 8)

    def forward(self, view: Tensor, other: Tensor, label: Tensor) -> Tensor:
        """Return a loss that pairs row i with row i + n."""
        a, b = self.encoder(torch.cat([view, other])).chunk(2)
        return contrast(a, b, a.new_zeros(()))


def test_two_rows_for_each_row_are_refused(threads: Threads) -> None:
    """Gathered rank by rank, their order would not be that of the full batch."""
    plan = make_plan(Doubled(), "encoder  gather_rows(over=dp)\nzero(stage=0, over=dp)", "dp=2")

    def run() -> None:
        with pytest.raises(Refusal, match="8 rows for 4 rows of the batch"):
            build(plan, views(0)).train_step(views(0))

    threads.run(run, 2)


def test_statistics_of_each_part(threads: Threads) -> None:
    """A batch norm of each rank's rows trains below a gather, and no proof is claimed (S717)."""
    model = Towers()
    model.image[1] = nn.BatchNorm1d(16)
    plan = make_plan(model, GATHERS + "zero(stage=0, over=dp)", "dp=2", "batch_stats")
    with pytest.raises(Refusal, match="cannot be proven beside statistics of each part"):
        prove(Case(plan, (pairs(0),)), pool=threads)
    losses = threads.run(partial(_train_once, plan), 2)
    assert losses[0] == losses[1] and math.isfinite(losses[0])


def _train_once(plan: Plan) -> float:
    return float(build(plan, pairs(0)).train_step(pairs(0)))


@pytest.mark.parametrize("inside", [True, False])
def test_a_refusal_names_the_row(inside: bool, threads: Threads) -> None:
    """S703 names the row for such a loss, tried on the original; with it the proof passes."""
    torch.manual_seed(0)
    model, loss = Towers(inside), None if inside else features_loss
    plan = make_plan(model, "zero(stage=0, over=dp)", "dp=2")
    with pytest.raises(Refusal) as caught:
        prove(Case(plan, (pairs(0),), loss), pool=threads)
    row = "image, text  gather_rows(over=dp)" if inside else "gather_rows(over=dp)"
    diagnostic = caught.value.diagnostic
    assert diagnostic.code == "S703"
    assert diagnostic.helps[0] == f"gather the rows that the loss compares: `{row}`"
    with_row = make_plan(model, f"{row}\nzero(stage=0, over=dp)", "dp=2")
    assert_proven(threads, with_row, [pairs(0), pairs(1, rows=7)], loss=loss)


@pytest.mark.parametrize(
    ("model", "rows", "line"),
    [
        (Towers(), "", "towers.py"),
        (Towers(), GATHERS, ""),
        (nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)), "", ""),
    ],
    ids=["compared", "gathered", "not compared"],
)
def test_large_models_are_warned_of(
    model: nn.Module, rows: str, line: str, threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that is too large to be tried gets W704 at the line that compares rows."""
    monkeypatch.setattr(probe, "CHEAP_WORK", 0)
    plan = make_plan(model, rows + "zero(stage=0, over=dp)", "dp=2")
    batch = pairs(0) if isinstance(model, Towers) else {"input": torch.randn(4, 6)}
    loss = None if isinstance(model, Towers) else mean_of_squares
    ready = prepare(plan, batch, loss)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_if_cheap(plan, batch, ready, loss=loss)
    messages = [str(item.message) for item in caught if "W704" in str(item.message)]
    assert len(messages) == bool(line) and all(line in message for message in messages)


def mean_of_squares(output: Tensor, batch: Any) -> Tensor:
    """Return a loss that is a mean over rows."""
    return output.square().mean()


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("mesh", [{"dp": 2}, {"fsdp": 2, "dp": 2}, {"dp": 2, "pp": 2}])
def test_init_writes_the_row(inside: bool, mesh: dict[str, int], threads: Threads) -> None:
    """`init` tries a model with values, writes the row, and one microbatch; the proof passes."""
    with torch.device("meta"):
        bare = Towers(inside)
    loss = None if inside else features_loss
    torch.manual_seed(0)
    proposal = propose(bare, pairs(0), mesh, loss, values=partial(Towers, inside))
    over = "dp" if "fsdp" not in mesh else "(dp, fsdp)"
    row = f"{'image, text  ' if inside else ''}gather_rows(over={over})"
    assert row in proposal.text and ("pp" not in mesh or "micro=1" in proposal.text)
    plan = plan_from_text(Towers(inside), proposal.text)
    assert_proven(threads, plan, [pairs(0), pairs(1, rows=7)], loss=loss)


class Counting(Towers):
    """Towers whose loss counts the rows of an input: no gathered output makes it equal."""

    def forward(self, image: Tensor, text: Tensor) -> Any:
        """Return the loss."""
        a, b = self.image(image), self.text(text)
        return F.cross_entropy((a @ b.t())[: len(image)], torch.arange(len(image)))


def test_init_tells_what_it_cannot_gather() -> None:
    """Without values it says where to look; where no module helps it says so."""
    with torch.device("meta"):
        bare = Towers()
    notes = propose(bare, pairs(0), {"dp": 2}).notes
    assert any("not tried without values" in note and "towers.py" in note for note in notes)
    notes = propose(Counting(), pairs(0), {"dp": 2}).notes
    assert any("gathering the output of no module helps" in note for note in notes)
    assert not propose(
        nn.Linear(6, 6), {"input": torch.randn(4, 6)}, {"dp": 2}, mean_of_squares
    ).notes


class Captions(nn.Module):
    """A model after CLIP, whose features are computed outside of its modules, from texts' ends."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(6, 8), nn.Embedding(10, 8)
        self.projection = nn.Parameter(torch.randn(8, 4) / 4)
        self.features = CaptionFeatures(self) if apart else None

    def encode(self, x: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        """Return normed features of images and of texts, these at the largest token."""
        a, h = self.image(x) @ self.projection, self.text(words)
        b = h[torch.arange(len(h)), words.argmax(-1)] @ self.projection
        return a / a.norm(dim=-1, keepdim=True), b / b.norm(dim=-1, keepdim=True)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        a, b = self.encode(x, words) if self.features is None else self.features(x, words)
        scores, labels = 5 * a @ b.t(), torch.arange(len(a))
        return (F.cross_entropy(scores, labels) + F.cross_entropy(scores.t(), labels)) / 2


class CaptionFeatures(nn.Module):
    """The features of the model that holds it, as a module."""

    def __init__(self, model: Captions) -> None:
        super().__init__()
        self.image, self.text, self.projection = model.image, model.text, model.projection
        del model.image, model.text, model.projection

    encode = Captions.encode
    forward = encode


def captions(rows: int, seed: int) -> dict[str, Tensor]:
    """Return images and texts."""
    g = torch.Generator().manual_seed(seed)
    words = torch.randint(0, 10, (rows, 5), generator=g)
    return {"x": torch.randn(rows, 6, generator=g), "words": words}


def test_features_outside_of_modules(threads: Threads) -> None:
    """No module's rows help where others meet them; the refusal tells what does (S703)."""
    rows = "dp=2\n  {}zero(stage=1, over=dp)"
    with pytest.raises(Refusal, match="S703") as refused:
        judge(Written(partial(Captions, False), captions), hand_text(rows.format("")), threads)
    (row,) = re.findall("`(features  gather_rows.*?)`", refused.value.diagnostic.helps[0])
    text = hand_text(rows.format(f"{row}\n  "))
    assert judge(Written(partial(Captions, True), captions), text, threads) == ""
