"""What ranks hold is found by values however it lies, or else by names; what is not is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from schedlang import TrainingProgram
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.judge.layouts import Held, Holdings, Table, candidates, held, together


class Original(nn.Module):
    """Three weights and a tie."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(4, 6, dtype=torch.float64), nn.Linear(4, 6, dtype=torch.float64)
        self.table = nn.Embedding(5, 4, dtype=torch.float64)
        self.head = nn.Linear(4, 5, bias=False, dtype=torch.float64)
        self.head.weight = self.table.weight


def offered(**parameters: Any) -> TrainingProgram:
    """A program of these parameters."""
    options = parameters.pop("options", {})
    module = nn.Module()
    for name, value in parameters.items():
        module.register_parameter(name, nn.Parameter(value.detach().clone()))
    return TrainingProgram(module, print, **options)


CUTS = {
    "rows": lambda o: {"w": o.q.weight[2:4]},
    "columns": lambda o: {"w": o.q.weight[:, 1:]},
    "transposed": lambda o: {"w": o.q.weight.T},
    "fused": lambda o: {"w": torch.cat([o.q.weight, o.k.weight])},
    "interleaved": lambda o: {"w": torch.stack([o.q.weight, o.k.weight], 1).flatten(0, 1)},
    "flat, across two": lambda o: {
        "w": torch.cat([o.q.weight.flatten(), o.k.weight.flatten()])[9:31]
    },
    "padded at the end": lambda o: {"w": nn.functional.pad(o.table.weight, (0, 0, 0, 3))},
    "padded with other numbers": lambda o: {
        "w": nn.functional.pad(o.table.weight, (0, 0, 0, 1), value=42.0)
    },
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_any_cut_is_found_by_values(cut: Any) -> None:
    """Each element of what a rank holds is told by its value: put back, it is the original's."""
    torch.manual_seed(0)
    original = Original()
    parts = cut(original)
    (one,), lost = held(offered(**parts), table := Table(original))
    assert not lost and one.by == "values"
    flat = next(iter(parts.values())).reshape(-1)
    there = one.index >= 0
    assert torch.equal(table.values[one.index[there]], flat[there])
    assert int((~there).sum()) == {"padded at the end": 12, "padded with other numbers": 4}.get(
        next(name for name, c in CUTS.items() if c is cut), 0
    )
    back = {name: table.values[table.starts[name] + there] for name, (_, there) in _pieces(one)}
    assert sum(len(v) for v in back.values()) == int(there.sum())


def _pieces(one: Any) -> Any:
    return one.pieces.items()


def test_one_changed_element_is_no_padding() -> None:
    """A tensor of the original's shape with another value anywhere goes by its name, or is lost."""
    original = Original()
    table = Table(original)
    for place in ((0, 0), (5, 3)):
        changed = original.q.weight.detach().clone()
        changed[place] += 1
        found, lost = held(offered(w=changed), table)
        assert not found and lost == ["`w` (6, 4)"]
        options = {"names": {"w": "q.weight"}}
        (one,), lost = held(offered(w=changed, options=options), table)
        assert not lost and one.by == "name"
        assert torch.equal(one.index.reshape(6, 4), table.numbers("q.weight"))


def test_rows_that_nobody_has_are_missing() -> None:
    """What all ranks hold together is counted against the original, element by element."""
    original = Original()
    table = Table(original)
    ranks = [held(offered(w=original.q.weight[rows]), table) for rows in (slice(2), slice(3, 6))]
    missing = together(ranks, table).missing
    assert missing["q.weight"] == 4 and "k.weight" in missing and missing["table.weight"] == 20


def test_what_is_fused_trains_as_one() -> None:
    """Names of weights that lie in one tensor somewhere are one group, all others their own."""
    original = Original()
    table = Table(original)
    fused = offered(w=torch.cat([original.q.weight, original.k.weight]))
    groups = Holdings((tuple(held(fused, table)[0]),), table).groups
    assert groups["k.weight"] == groups["q.weight"] == groups["w"] == "q.weight"
    assert groups["q.bias"] == "q.bias"


def test_what_is_not_found_is_named() -> None:
    """The refusal has the tensor, the rank, and what of the original nobody holds."""
    original = Original()
    table = Table(original)
    right, wrong = offered(w=original.q.weight), offered(v=torch.ones(3, dtype=torch.float64))
    with pytest.raises(Refusal) as refusal:
        together([held(right, table), held(wrong, table)], table)
    text = refusal.value.render()
    assert "S763" in text and "`v` (3,) on rank 1" in text and "`k.weight`" in text


@pytest.mark.parametrize(
    "name",
    [
        "module.q.weight",
        "_orig_mod.module.q.weight",
        "module._orig_mod.q.weight",
        "_fsdp_wrapped_module.q._checkpoint_wrapped_module.weight",
        "1:module.q.weight",
    ],
)
def test_wrappers_leave_the_name(name: str) -> None:
    """Of a wrapped parameter's name, the original's is found."""
    assert "q.weight" in candidates(name)


def test_a_module_of_that_name_keeps_it() -> None:
    """What the original itself calls `module` is not taken for a wrapper's word first."""
    assert next(candidates("module.weight")) == "module.weight"
    assert "deep.module.weight" in candidates("module.deep.module.weight")


def test_padding_is_counted_on_all_ranks() -> None:
    """Ranks that hold a tensor of one name may each have padding in it, or none."""
    ranks = tuple(
        (Held("weight", torch.tensor(index), (3,), True, "values"),)
        for index in ([0, 1, -1], [2, -1, -1], [3, 4, 5])
    )
    assert Holdings(ranks, Table(nn.Linear(2, 3, bias=False))).padding == {"weight": 3}
