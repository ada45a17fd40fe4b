"""Elastic training: the settings of a schedule for the ranks of a job, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

import schedlang
from examples.custom.model import Watcher, batch, loss
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import Source
from schedlang.elastic import Rendezvous, SettingSearch
from schedlang.language.syntax import parse
from schedlang.passes.elaborate.state import Settings
from schedlang.schedule import Schedule
from tests.launching.elastic_run import samples
from tests.training.test_trainer import ONE_RANK, LossFile, adamw, fixed_batches, refusal_text

SPLIT = """schedule 1 for Watcher

knob tp: int = 2 in 1..6
knob rank: int = 4 in [4, 8]
knob micro: int = 1 in [1, 3]

mesh(dp=_, tp=tp)

step "adapters" relax(model) {
  blocks.*.gate.back  adapt(lora, rank=rank)
  at blocks.*.gate {
    both  shard(col, blocks=2, over=tp)
    back  shard(row, over=tp)
  }
  zero(stage=1, over=dp)
  pipeline(order="GPipe", micro=micro)
}
"""


def search_of(text: str, ranks: int, names: tuple[str, ...] = (), **knobs: object) -> SettingSearch:
    """Return the search of one rank among so many, before it has met the others."""
    schedule = Schedule(Watcher(), parse(Source("my.sched", text)), Settings(knobs))
    meeting = Rendezvous()
    meeting.ranks = ranks
    return SettingSearch(schedule, names, meeting, batch(0), loss)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_settings_make_a_mesh_of_all_ranks(ranks: int) -> None:
    """Axes take every size of their domain that divides the ranks, `micro` every value; other knobs
    stay as the file has them."""
    menu, _ = search_of(SPLIT, ranks)._candidates()
    sizes = [tp for tp in range(1, 7) if ranks % tp == 0]
    assert {tuple(sorted(setting.items())) for setting in menu} == {
        (("micro", micro), ("tp", tp)) for tp in sizes for micro in (1, 3)
    }
    for setting in menu:
        plan = search_of(SPLIT, ranks).schedule_with(setting).plan()
        assert plan.mesh.world == ranks and dict(plan.decisions)["rank"] == 4


def test_what_is_trained_stays() -> None:
    """A named knob changes too, unless it changes the parameters; knobs that were set stay."""
    menu, against = search_of(SPLIT, 2, ("tp", "rank"))._candidates()
    assert [setting["rank"] for setting in menu] == [4, 4]
    assert against == [
        f"tp = {tp}, rank = 8: it trains other parameters, or gives up other things"
        for tp in (1, 2)
    ]
    search = search_of(SPLIT, 2, rank=8)
    menu, _ = search._candidates()
    assert all(
        dict(search.schedule_with(setting).plan().decisions)["rank"] == 8 for setting in menu
    )


def test_the_quickest_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner ranks all settings; if none fits into memory, the refusal lists each."""
    from schedlang.passes.autoshard.knob_tuning import rank_fitting
    from schedlang.runtime import device

    search = search_of(SPLIT, 1)
    assert search.best() == {"tp": 1, "micro": 1}
    prices: list[Any] = []
    price = SettingSearch._price

    def keeps(self: SettingSearch, *args: Any) -> Any:
        prices.extend(price(self, *args))
        return prices

    monkeypatch.setattr(SettingSearch, "_price", keeps)
    best = search_of(SPLIT, 1).best()
    assert len(prices) == 2 and best == dict(rank_fitting(prices, 1 << 60)[0].knobs)
    prices.clear()
    monkeypatch.setattr(device, "total_bytes", lambda _: 1000)
    with pytest.raises(Refusal, match="no setting of the knobs gives a mesh of 1 rank") as caught:
        search_of(SPLIT, 1).best()
    assert caught.value.diagnostic.code == "S695"
    notes = caught.value.diagnostic.notes
    assert [note.partition(": needs ")[0] for note in notes] == [
        f"tp = 1, micro = {micro}" for micro in (1, 3)
    ]


def test_no_setting_is_told_with_the_reasons() -> None:
    """Rank counts that no mesh fits, and unknown knobs."""
    two = SPLIT.replace("in 1..6", "in [2]")
    with pytest.raises(Refusal, match="the other axes take 2 of 3 ranks|do not divide") as caught:
        search_of(two, 3).best()
    assert caught.value.diagnostic.code == "S695"
    with pytest.raises(Refusal) as caught:
        search_of(SPLIT, 2, ("pp",)).best()
    assert caught.value.diagnostic.code == "S106"


def test_what_a_trainer_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """`local` rows; a torchrun whose rounds share a store; ranks without a torchrun store."""
    assert "leave out `local`" in refusal_text("S691", elastic=True, local=True)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    message = refusal_text("S695", elastic=True, data=fixed_batches())
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun" in message
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "no store of torchrun" in refusal_text("S695", elastic=True, data=fixed_batches())


@pytest.mark.parametrize("elastic", [True, False])
def test_draws_do_not_move_the_order(tmp_path: Path, elastic: bool) -> None:
    """Dropout does not touch the generator by which a loader shuffles; without `elastic` it does,
    as in torch."""
    orders: list[list[int]] = []

    def counted(output: torch.Tensor, batch: Any) -> torch.Tensor:
        if output.requires_grad and not batch["number"].is_meta:
            orders.append(batch["number"].tolist())
        return F.cross_entropy(output, batch["target"])

    data: Any = DataLoader(samples(), batch_size=6, shuffle=True)  # type: ignore[arg-type]
    trainer = schedlang.Trainer(
        ONE_RANK,
        Watcher().double(),
        data,
        18,
        adamw,
        loss=counted,
        callbacks=(LossFile(tmp_path / "heard"),),
        elastic=elastic,
    )
    torch.manual_seed(0)
    trainer.fit()
    torch.manual_seed(0)
    order = [batch["number"].tolist() for _ in range(3) for batch in data]
    assert (orders[-18:] == order) == elastic
