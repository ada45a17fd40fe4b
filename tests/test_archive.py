"""Tests of archive: what one layout saved any other loads, or nothing changes."""

from __future__ import annotations

import copy
import errno
import os
import resource
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from schedlang.diagnostic import Refusal
from schedlang.mesh import Mesh
from schedlang.model import ModelFacts
from schedlang.passes.build import build
from schedlang.plan import Plan
from schedlang.primitives.pad import pad
from schedlang.primitives.pipeline import pipeline
from schedlang.primitives.pipeline_split import pipeline_split
from schedlang.primitives.shard import shard
from schedlang.primitives.zero import zero
from schedlang.runtime import archive
from schedlang.runtime.float64 import Float64
from schedlang.runtime.modes import ambient
from schedlang.runtime.program import Program
from tests.models import gpt2, tokens
from tests.ranks import run_ranks

Make = Callable[..., Program]
SEED = 3


class Odd(nn.Module):
    """Sizes that nothing divides: an odd matrix, one row, a scalar, a frozen weight, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.row = nn.Parameter(torch.randn(1, 7))
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(7, 5)
        self.head.bias.requires_grad_(False)
        self.register_buffer("shift", torch.randn(7))
        self.register_buffer("unsaved", torch.ones(7), persistent=False)
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = x + self.shift * self.unsaved
        for block in self.blocks:
            h = torch.tanh(block(h)) * self.gain + self.row
        return ((self.head(h).sum(-1) - y) ** 2).mean()


def _points(seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 7, generator=g, dtype=torch.float64)
    return {"x": x, "y": x.sum(1)}


def _tokens(seed: int) -> dict[str, Tensor]:
    return tokens(rows=8, seed=seed)


def _gpt2_tp(plan: Plan) -> Plan:
    """Tensor parallel, the fused q, k, v in three blocks, the vocabulary of 61 padded."""
    t = "transformer"
    h = [f"{t}.h.{k}" for k in range(2)]
    plan = plan.add(pad("vocab", multiple=4), [f"{t}.wte"])
    plan = plan.add(shard("vocab", over="tp"), [f"{t}.wte", "lm_head"])
    plan = plan.add(shard("col", over="tp", blocks=3), [f"{x}.attn.c_attn" for x in h])
    plan = plan.add(shard("col", over="tp"), [f"{x}.mlp.c_fc" for x in h])
    return plan.add(
        shard("row", over="tp"), [f"{x}.{y}.c_proj" for x in h for y in ("attn", "mlp")]
    )


LAYOUTS: dict[str, tuple[tuple[tuple[str, int], ...], dict[str, Any]]] = {
    "one": ((), {}),
    "tp2": ((("tp", 2),), {}),
    "dp2": ((("dp", 2),), {"stage": 0}),
    "dp2z1": ((("dp", 2),), {"stage": 1}),
    "dp2z3": ((("dp", 2),), {"stage": 3}),
    "pp2": ((("pp", 2),), {}),
    "dp2tp2": ((("dp", 2), ("tp", 2)), {"stage": 3}),
    "pp2dp2": ((("pp", 2), ("dp", 2)), {"stage": 1}),
}
WORLDS = {
    1: ["one"], 2: ["tp2", "dp2", "dp2z1", "dp2z3", "pp2"], 4: ["dp2tp2"],
}  # fmt: skip


def _plan(name: str, model: nn.Module) -> Plan:
    axes, more = LAYOUTS[name]
    plan, names = Plan.empty(ModelFacts(model), Mesh(axes)), dict(axes)
    trunk = "transformer.h" if hasattr(model, "transformer") else "blocks"
    if "tp" in names:
        plan = _gpt2_tp(plan)
    if "pp" in names:
        plan = plan.add(pipeline_split(over="pp"), [trunk])
    if "dp" in names:
        plan = plan.add(zero(over=("dp",), **more), [""])
    return plan.add(pipeline(order="GPipe", micro=2), [""]) if "pp" in names else plan


def _adamw(named: Any) -> torch.optim.Optimizer:
    """Two groups with a learning rate each."""
    flat = [p for _, p in named if p.ndim < 2]
    full = [p for _, p in named if p.ndim >= 2]
    groups = [{"params": flat, "lr": 2e-2}, {"params": full, "weight_decay": 0.1}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=1e-2)


def _program(
    name: str, odd: bool = False, *, fresh: bool = False, optimizer: Any = _adamw
) -> Program:
    """A program; `fresh` starts from other values everywhere, which loading must replace."""
    model = Odd() if odd else gpt2(layers=2)
    if fresh:
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                if tensor.is_floating_point():
                    tensor.copy_(torch.rand_like(tensor))
        if odd:
            model.unsaved.fill_(1.0)
    program = build(_plan(name, model), _batch(odd)(0), optimizer=optimizer, clip=1.0, seed=SEED)
    if fresh and program.optimizer is not None:
        for group in program.optimizer.param_groups:
            group["lr"] = 7.0
    return program


def _batch(odd: bool) -> Callable[[int], dict[str, Tensor]]:
    return _points if odd else _tokens


def _seen(program: Program) -> dict[str, Any]:
    groups = {}
    if program.optimizer is not None:
        names = {id(p): n for n, p in program.assembly.parameters.items()}
        for group in program.optimizer.param_groups:
            hyper = {k: v for k, v in group.items() if k != "params"}
            groups.update({names[id(p)]: hyper for p in group["params"]})
    state = {n: t.clone() for n, t in program.state_dict().items()}
    moments = copy.deepcopy(program.optimizer_state())
    return {"state": state, "moments": moments, "groups": groups, "step": program.step}


def _schedule(program: Program) -> None:
    """A learning rate that has moved away from where it began."""
    for group in program.optimizer.param_groups if program.optimizer is not None else ():
        group["lr"] *= 0.5


def _saving(rank: int, names: list[str], folder: str, odd: bool) -> dict[str, Any]:
    """Train two steps, save, train one more: what was saved, and what came after it."""
    with ambient(Float64()):
        return {name: _saved(name, folder, odd) for name in names}


def _saved(name: str, folder: str, odd: bool) -> tuple[Any, Any]:
    program, batch = _program(name, odd), _batch(odd)
    for seed in range(2):
        program.train_step(batch(seed))
    _schedule(program)
    program.save(f"{folder}/{name}")
    before = _seen(program)
    program.train_step(batch(2))
    return before, program.state_dict()


def _loading(
    rank: int, names: list[str], folder: str, saved: list[str], odd: bool
) -> dict[tuple[str, str], Any]:
    with ambient(Float64()):
        return {
            (source, name): seen
            for name in names
            for source, seen in _loaded(name, folder, saved, odd)
        }


def _loaded(name: str, folder: str, saved: list[str], odd: bool) -> Iterator[tuple[str, Any]]:
    program, batch = _program(name, odd, fresh=True), _batch(odd)
    program.train_step(batch(9))
    for source in saved:
        program.load(f"{folder}/{source}")
        before = _seen(program)
        program.train_step(batch(2))
        yield source, (before, program.state_dict())


def _equal(one: Any, other: Any, at: str = "") -> None:
    """Bitwise the same values, under the same names."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), at
        for key in one:
            _equal(one[key], other[key], f"{at}/{key}")
    elif isinstance(one, Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other), at
    else:
        assert one == other, at


def _close(one: Any, other: Any, at: str = "") -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys(), at
        for key in one:
            _close(one[key], other[key], f"{at}/{key}")
    elif isinstance(one, Tensor):
        assert float((one - other).norm()) <= 1e-12 * float(other.norm()) + 1e-13, at
    else:
        assert one == other, at


def _crossed(folder: Path, odd: bool, worlds: dict[int, list[str]]) -> None:
    gpt2(layers=1)  # what it imports is imported once, before ranks are forked
    saved: dict[str, Any] = {}
    for world, names in worlds.items():
        ranks = run_ranks(world, _saving, names, str(folder), odd)
        saved |= ranks[0]
    for world, names in worlds.items():
        for found in run_ranks(world, _loading, names, str(folder), list(saved), odd):
            for (source, name), (before, after) in found.items():
                for part in ("state", "moments", "step"):
                    _equal(before[part], saved[source][0][part], f"{source}->{name}/{part}")
                check = _equal if source == name else _close
                check(after, saved[source][1], f"{source}->{name}+1")
                lrs = {1e-2 * 0.5, 2e-2 * 0.5}
                assert {g["lr"] for g in before["groups"].values()} <= lrs
                assert before["groups"], (source, name)


def test_any_layout_loads_under_any_other(tmp_path: Path) -> None:
    """Bitwise the same parameters, buffers and moments; the next step as if nothing was saved."""
    _crossed(tmp_path, False, WORLDS)


def test_sizes_that_nothing_divides(tmp_path: Path) -> None:
    """Uneven and empty slices, a scalar, a frozen weight and a buffer survive alike."""
    two = ["dp2", "dp2z1", "dp2z3", "pp2"]
    _crossed(tmp_path, True, {1: ["one"], 2: two, 4: ["pp2dp2"]})


def _only_model(rank: int, folder: str) -> tuple[Any, Any]:
    program = _program("pp2", fresh=True, optimizer=None)
    program.load(f"{folder}/tp2")
    return program.state_dict(), program.step


def test_torchs_own_tools_read_it(tmp_path: Path) -> None:
    """dcp_to_torch_save gives nested whole tensors; a program without optimizer takes the model."""
    gpt2(layers=1)
    (saved, _), _ = (ranks["tp2"] for ranks in run_ranks(2, _saving, ["tp2"], str(tmp_path), False))
    dcp_to_torch_save(tmp_path / "tp2", tmp_path / "whole.pt")
    found = torch.load(tmp_path / "whole.pt")
    model = gpt2(layers=2)
    lost = model.load_state_dict(found["model"], strict=False)
    assert lost.missing_keys == ["lm_head.weight"] and not lost.unexpected_keys
    _equal(dict(model.state_dict()), saved["state"])
    key = "transformer.h.0.attn.c_attn.weight"
    moment = found["optim"]["state"][key]["exp_avg"]
    assert torch.equal(moment, saved["moments"][key]["exp_avg"])
    for state, step in run_ranks(2, _only_model, str(tmp_path)):
        _equal(state, saved["state"])
        assert step == 2


def _odd() -> Program:
    return _program("one", True)


def _refused(act: Callable[[], Any], code: str, *words: str) -> None:
    with pytest.raises(Refusal) as caught:
        act()
    assert caught.value.diagnostic.code == code
    for word in words:
        assert word in str(caught.value)


def _trained() -> Program:
    program = _odd()
    program.train_step(_points(0))
    return program


def test_places_that_are_no_checkpoints(tmp_path: Path) -> None:
    """Files and folders of others are neither replaced nor read."""
    program = _trained()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("mine")
    for name in ("file", "home"):
        _refused(partial(program.save, tmp_path / name), "S632", "is no checkpoint")
        _refused(partial(program.load, tmp_path / name), "S633")
    _refused(lambda: program.load(tmp_path / "none"), "S633", "no such folder")
    _refused(lambda: program.save(tmp_path / "file" / "below"), "S631", "/file")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "home"]
    (tmp_path / "empty").mkdir()
    program.save(tmp_path / "empty")
    program.load(tmp_path / "empty")


def test_a_save_replaces_the_one_before(tmp_path: Path) -> None:
    """The second save is what is read, and nothing else is left in the folder or beside it."""
    program = _trained()
    program.save(tmp_path / "a")
    (tmp_path / ".a.01234567.saving").mkdir()  # of a save that died
    (tmp_path / ".a.b.01234567.saving").mkdir()  # of somebody else
    program.train_step(_points(1))
    program.save(tmp_path / "a")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".a.b.01234567.saving", "a"]
    other = _odd()
    other.load(tmp_path / "a")
    _equal(_seen(other), _seen(program))


def test_a_crash_between_two_renames(tmp_path: Path) -> None:
    """The checkpoint that was set aside is found."""
    program = _trained()
    program.save(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / ".a.0123abcd.replaced")
    other = _odd()
    other.load(tmp_path / "a")
    _equal(_seen(other), _seen(program))


def _full_disk(rank: int, folder: str, real: bool) -> Any:
    """Save, then save again where the files of rank 1 may not grow."""
    program = _program("dp2z3")
    program.train_step(_tokens(0))
    program.save(f"{folder}/a")
    program.train_step(_tokens(1))
    if rank == 1 and real:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    elif rank == 1:
        FileSystemWriter.write_data = _no_space  # type: ignore[method-assign]
    try:
        program.save(f"{folder}/a")
        return "saved"
    except Refusal as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)


def _no_space(*args: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("real", [False, True])
def test_a_full_disk_on_one_rank(tmp_path: Path, real: bool) -> None:
    """All ranks refuse in the same words, and the older checkpoint is still whole."""
    gpt2(layers=1)
    told = run_ranks(2, _full_disk, str(tmp_path), real)
    assert told[0] == told[1] and "S631" in told[0] and "rank 1: " in told[0]
    assert ("File too large" if real else "No space left") in told[0]
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    program = _program("one", fresh=True)
    program.load(tmp_path / "a")
    assert program.step == 1


def _unwritable(rank: int, folder: str) -> str:
    program = _program("dp2", True)
    try:
        program.save(f"{folder}/file/a")
    except Refusal as error:
        return str(error)
    return "saved"


def test_an_unwritable_path_on_all_ranks(tmp_path: Path) -> None:
    """Only rank 0 makes the folder, and all ranks say why it cannot."""
    (tmp_path / "file").write_text("")
    told = run_ranks(2, _unwritable, str(tmp_path))
    assert told[0] == told[1] and "S631" in told[0] and "/file" in told[0]


@pytest.mark.parametrize("damage", ["truncated", "lost", "index", "emptied"])
def test_damage_changes_nothing(tmp_path: Path, damage: str) -> None:
    """A checkpoint with lost bytes is refused, and the program is as it was."""
    _trained().save(tmp_path / "a")
    data, listing = tmp_path / "a" / "__0_0.distcp", tmp_path / "a" / ".metadata"
    if damage == "truncated":
        data.write_bytes(data.read_bytes()[:-3000])
    elif damage == "lost":
        data.unlink()
    else:
        listing.write_bytes(b"" if damage == "emptied" else listing.read_bytes()[:50])
    program = _program("one", True, fresh=True)
    before = _seen(program)
    _refused(lambda: program.load(tmp_path / "a"), "S633", "the program is as it was")
    _equal(_seen(program), before)


class Wider(Odd):
    """One parameter more, one of another shape, or one of another dtype."""

    def __init__(self, change: str) -> None:
        super().__init__()
        if change == "more":
            self.extra = nn.Parameter(torch.ones(7, dtype=torch.float64))
        elif change == "less":
            del self.shift
            self.shift = 0.0
        elif change == "shape":
            self.row = nn.Parameter(torch.randn(2, 7, dtype=torch.float64)[:, :7].sum())
        elif change == "dtype":
            self.float()
        elif change == "frozen":
            self.row.requires_grad_(False)


def _of(model: nn.Module, optimizer: Any = _adamw) -> Program:
    dtype = next(model.parameters()).dtype
    batch = {name: value.to(dtype) for name, value in _points(0).items()}
    return build(Plan.empty(ModelFacts(model)), batch, optimizer=optimizer)


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ("more", "S634", ["missing in the checkpoint: `extra`"]),
        ("less", "S634", ["unknown here: `shift`"]),
        ("shape", "S635", ["`row` was saved as float64[1, 7], and is float64[] here"]),
        ("dtype", "S635", ["was saved as float64", "float32"]),
        ("frozen", "S636", ["unknown here: `row`"]),
    ],
)
def test_another_model(tmp_path: Path, change: str, code: str, words: list[str]) -> None:
    """Names, shapes and dtypes are compared before anything is changed."""
    _trained().save(tmp_path / "a")
    program = _of(Wider(change))
    before = _seen(program)
    _refused(lambda: program.load(tmp_path / "a"), code, *words)
    _equal(_seen(program), before)


def _in_one_group(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=1e-3)


def _sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=1e-3, momentum=0.9)


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [(_sgd, ["`AdamW`", "`SGD`"]), (_in_one_group, ["other groups"])],
)
def test_another_optimizer(tmp_path: Path, optimizer: Any, words: list[str]) -> None:
    """A state that this optimizer would ignore or mix up is refused."""
    _trained().save(tmp_path / "a")
    _refused(lambda: _of(Odd(), optimizer).load(tmp_path / "a"), "S636", *words)
    _of(Odd(), None).load(tmp_path / "a")


def test_a_checkpoint_without_optimizer(tmp_path: Path) -> None:
    """It does not fit a program that has one."""
    _of(Odd(), None).save(tmp_path / "a")
    _refused(lambda: _odd().load(tmp_path / "a"), "S636", "saved without one")


def test_state_that_cannot_be_saved(tmp_path: Path) -> None:
    """An object in the optimizer's state is refused by name, and nothing is written."""
    program = _trained()
    assert program.optimizer is not None
    program.optimizer.state[program.assembly.parameters["row"]]["hook"] = partial(print)
    _refused(lambda: program.save(tmp_path / "a"), "S637", "`row.hook`")
    assert not list(tmp_path.iterdir())


def test_before_the_first_step(tmp_path: Path) -> None:
    """Momentum that did not exist when it was saved is gone after loading."""
    _odd().save(tmp_path / "a")
    program = _trained()
    program.load(tmp_path / "a")
    assert program.step == 0 and not program.optimizer_state()


def test_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of another version is refused."""
    monkeypatch.setattr(archive, "VERSION", 2)
    _trained().save(tmp_path / "a")
    monkeypatch.undo()
    _refused(lambda: _odd().load(tmp_path / "a"), "S633", "another version")
