"""Weights as libraries write them: renamed, fused and split while only parts of them are read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import schedlang
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime.initial.lazy_tensors import FileTensor, LazyTensor, read_box
from schedlang.runtime.initial.weight_files import INDEX, TargetPart, WeightFiles, files_of
from schedlang.runtime.launch.pool import Pool

transformers = pytest.importorskip("transformers")

# ---- elements of a tensor that is laid out anew --------------------------------------------------

OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.transpose(0, -1),
    "permuted": lambda x: x.permute(*range(1, x.ndim), 0),
    "chunk": lambda x: x.chunk(2, 0)[-1],
    "split": lambda x: torch.split(x, [1, x.shape[-1] - 1], -1)[1],
    "joined": lambda x: torch.cat([x, torch.ones_like(x), x], x.ndim - 1),
    "stacked": lambda x: torch.stack([x, x], 1),
    "one": lambda x: x.unbind(0)[-1].unsqueeze(-1),
    "chosen": lambda x: x[:, -1].unsqueeze(0),
    "narrow": lambda x: x.narrow(-1, 1, x.shape[-1] - 1),
    "flat": lambda x: x.flatten(),
    "heads": lambda x: x.reshape(x.shape[0] // 2, 2, -1) if x.shape[0] % 2 == 0 else x,
    "merged": lambda x: x.flatten(0, 1),
    "turned": lambda x: x.reshape(-1, 2).transpose(0, 1) if x.numel() % 2 == 0 else x,
    "cast": lambda x: x.to(torch.float32),
    "cast there": lambda x: x.to("cpu", torch.float32),
    "every other": lambda x: x[::2],
    "another operator": lambda x: x * 2,
}


class _Open(FileTensor):
    """A tensor that is in no file: what is read of it is noted."""

    def read(self, box: Any) -> Tensor:
        self.open_["read"] = self.open_.get("read", 0) + _count(box)  # type: ignore[index,call-overload]
        found: Tensor = self.open_["data"][tuple(slice(*span) for span in box)]  # type: ignore[index]
        return found


def _count(box: Any) -> int:
    total = 1
    for low, high in box:
        total *= high - low
    return total


def _noted(data: Tensor) -> tuple[LazyTensor, dict[Any, Any]]:
    seen: dict[Any, Any] = {"data": data}
    leaf = _Open(Path("x"), "x", "F64", tuple(data.shape), seen)
    return LazyTensor(leaf.read, data.shape, data.dtype, (leaf,)), seen


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.sampled_from(sorted(OPERATORS)), max_size=4),
    st.lists(st.integers(2, 5), min_size=2, max_size=3),
    st.randoms(use_true_random=False),
)
def test_any_box_after_any_operators(names: list[str], shape: list[int], random: Any) -> None:
    """What is read of a tensor that was laid out anew is what the operators give."""
    real = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
    lazy, _ = _noted(real)
    for name in names:
        try:
            real = OPERATORS[name](real)
        except (RuntimeError, IndexError, ValueError):
            continue  # not of this shape
        lazy = OPERATORS[name](lazy)  # type: ignore[assignment]
    assert isinstance(lazy, LazyTensor) and lazy.shape == real.shape and lazy.dtype == real.dtype
    ends = [sorted(random.sample(range(size + 1), 2)) if size else (0, 0) for size in real.shape]
    corner, size = [low for low, _ in ends], [high - low for low, high in ends]
    assert torch.equal(
        read_box(lazy, corner, size), real[tuple(slice(low, high) for low, high in ends)]
    )


EXACT = sorted({*OPERATORS} - {"every other", "another operator", "turned"})


@pytest.mark.parametrize("name", EXACT)
def test_nothing_beside_a_box_is_read(name: str) -> None:
    """Of what a file has, the elements of the box and no others: rows of it where dims merge."""
    real = torch.arange(4 * 6 * 8, dtype=torch.float64).reshape(4, 6, 8)
    lazy, seen = _noted(real)
    made = OPERATORS[name](lazy)
    assert isinstance(made, LazyTensor)
    read_box(made, [0] * made.ndim, [1] * made.ndim)
    assert seen["read"] <= {"flat": 48, "merged": 8, "heads": 24}.get(name, 1)


# ---- models --------------------------------------------------------------------------------------

SIZES = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64},
    **{"num_attention_heads": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
EXPERTS = {"num_experts": 4, "num_key_value_heads": 2, "moe_intermediate_size": 24}
KINDS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, "num_key_value_heads": 2},
    "Qwen2Moe": {**EXPERTS, "shared_expert_intermediate_size": 40},
    "Qwen3Moe": EXPERTS,
    "GPT2": {"n_embd": 32, "n_head": 4, "n_positions": 32, "n_layer": 2},
    "Llama": {"num_key_value_heads": 2},
    "Bert": {},
    "Dinov2": {"image_size": 28, "patch_size": 14},
}
HEADS = {"Bert": "ForMaskedLM", "GPT2": "LMHeadModel", "Dinov2": "Model"}


def _made(kind: str) -> Any:
    config = getattr(transformers, f"{kind}Config")(**SIZES | KINDS[kind])
    return getattr(transformers, f"{kind}{HEADS.get(kind, 'ForCausalLM')}")(config)


def _rooms(model: nn.Module, cut: int) -> list[TargetPart]:
    """The second half of each parameter along a dim that is `cut` from the last."""
    found = []
    for name, whole in model.named_parameters():
        cells = [((0, 0, size),) for size in whole.shape]
        if whole.ndim > cut and (size := whole.shape[-1 - cut]) % 2 == 0:
            cells[-1 - cut] = ((0, size // 2, size // 2),)
        shape = [sum(n for *_, n in runs) for runs in cells]
        found.append(
            TargetPart((name,), whole, torch.zeros(shape, dtype=whole.dtype), tuple(cells))
        )
    return found


def _read_bytes(files: WeightFiles, patch: pytest.MonkeyPatch) -> list[int]:
    plain, seen = FileTensor.read, [0]

    def read(self: FileTensor, box: Any) -> Tensor:
        found = plain(self, box)
        seen[0] += found.nbytes
        return found

    patch.setattr(FileTensor, "read", read)
    return seen


@pytest.mark.parametrize("cut", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_as_from_pretrained_has_it(
    kind: str, cut: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each parameter's half, bit by bit; of the files not one byte beside it is read."""
    torch.manual_seed(0)
    _made(kind).save_pretrained(tmp_path, max_shard_size="30KB")
    theirs = type(_made(kind)).from_pretrained(tmp_path).state_dict()
    with torch.device("meta"):
        model = _made(kind)
    files, rooms = files_of(tmp_path, model), _rooms(model, cut)
    seen = _read_bytes(files, monkeypatch)
    files.fill(rooms)
    for room in rooms:
        span = tuple(slice(*(runs[0][1], runs[0][1] + runs[0][2])) for runs in room.cells)
        assert torch.equal(room.part, theirs[room.names[0]][span]), room.names
    assert seen[0] == sum(room.part.nbytes for room in rooms)
    named_else = {*files.leaves} - {*theirs}
    assert bool(named_else) == (kind in ("Mixtral", "Qwen2Moe", "Qwen3Moe", "Dinov2"))


def test_a_model_of_another_precision(tmp_path: Path) -> None:
    """Values are rounded as the library rounds them."""
    torch.manual_seed(0)
    _made("Mixtral").save_pretrained(tmp_path)
    kind = transformers.MixtralForCausalLM
    theirs = kind.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    with torch.device("meta"):
        model = _made("Mixtral").to(torch.bfloat16)
    files_of(tmp_path, model).fill(rooms := _rooms(model, 9))
    assert rooms and all(torch.equal(room.part, theirs[room.names[0]]) for room in rooms)


def _ids() -> dict[str, Tensor]:
    ids = torch.arange(32).reshape(4, 8)
    return {"input_ids": ids, "labels": ids}


ROWS = """schedule 1 for MixtralForCausalLM
mesh(dp=2)
model.layers.*.mlp.experts  expert_parallel(over=dp)
zero(stage=1, over=dp)
"""


def _as_theirs(file: str, folder: str) -> None:
    """Programs that are built of a folder, or take one over, and a module that does."""
    theirs = transformers.MixtralForCausalLM.from_pretrained(folder).state_dict()
    torch.manual_seed(3)
    model = schedlang.deferred_init(_made, "Mixtral")
    built = schedlang.load(file, model).build(batch=_ids(), weights=folder)
    other = schedlang.load(file, _made("Mixtral")).build(batch=_ids())
    plain = _made("Mixtral")
    for target in (other, plain):
        schedlang.transfer(folder, target)
    for target in (built, other, plain):
        ours = target.state_dict()
        assert all(torch.equal(ours[name], value) for name, value in theirs.items())


def test_programs_of_a_folder(pool: Pool, tmp_path: Path) -> None:
    """Each rank has its experts; `schedlang.transfer` takes the same folder."""
    torch.manual_seed(0)
    _made("Mixtral").save_pretrained(tmp_path, max_shard_size="30KB")
    file = tmp_path / "x.sched"
    file.write_text(ROWS)
    pool.run(_as_theirs, 2, str(file), str(tmp_path))


# ---- folders that do not do ----------------------------------------------------------------------


def _index(folder: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return found


def _configured(folder: Path, **more: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | more))


def _changed(folder: Path, name: str, change: Callable[[Tensor], Tensor | None]) -> None:
    file = folder / _index(folder)[name]
    tensors = load_file(file)
    changed = change(tensors.pop(name))
    save_file(tensors | ({name: changed} if changed is not None else {}), file, {"format": "pt"})


EXPERT = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
SPOILT: dict[str, tuple[Callable[[Path], None], str]] = {
    "quantised": (
        lambda folder: _configured(folder, quantization_config={"quant_method": "fp8"}),
        "the values are quantised by fp8",
    ),
    "another type": (
        lambda folder: _configured(folder, model_type="qwen3_moe"),
        "they are of a model of type `qwen3_moe`, and this one is of type `mixtral`",
    ),
    "a file of experts": (
        lambda folder: (folder / _index(folder)[EXPERT]).unlink(),
        "which is not there",
    ),
    "an expert": (
        lambda folder: _changed(folder, EXPERT, lambda _: None),
        "`model.layers.1.mlp.experts.gate_up_proj`",
    ),
    "experts of several shapes": (
        lambda folder: _changed(folder, EXPERT, lambda x: x[:-1].contiguous()),
        "`model.layers.1.mlp.experts.gate_up_proj`",
    ),
    "an expert in bytes": (
        lambda folder: _changed(folder, EXPERT, lambda x: x.to(torch.int8)),
        f"`{EXPERT}` is I8",
    ),
}


@pytest.mark.parametrize("name", SPOILT)
def test_what_is_refused(name: str, tmp_path: Path) -> None:
    """What is missing, of another kind or another model is named, and nothing is built."""
    _made("Mixtral").save_pretrained(tmp_path, max_shard_size="30KB")
    spoil, words = SPOILT[name]
    spoil(tmp_path)
    model = schedlang.deferred_init(_made, "Mixtral")
    with pytest.raises(Refusal) as info:
        schedlang.create_schedule(model).build(batch=_ids(), weights=tmp_path)
    said = " ".join(str(info.value).replace("=", " ").split())
    assert "S643" in said and words in said


def test_a_folder_of_a_hubs_cache(tmp_path: Path) -> None:
    """Files are links to blobs, in a folder of their revision; a blob that is gone is named."""
    saved, cache = tmp_path / "saved", tmp_path / "models--a--b"
    torch.manual_seed(0)
    real = _made("Mixtral")
    real.save_pretrained(saved, max_shard_size="30KB")
    revision, blobs = cache / "snapshots" / "0abc", cache / "blobs"
    for made in (revision, blobs, cache / "refs"):
        made.mkdir(parents=True)
    (cache / "refs" / "main").write_text("0abc")
    for number, file in enumerate(sorted(saved.iterdir())):
        file.rename(blobs / str(number))
        (revision / file.name).symlink_to(f"../../blobs/{number}")
    expected = real.state_dict()
    for path in (cache, revision):
        model = schedlang.deferred_init(_made, "Mixtral")
        program = schedlang.create_schedule(model).build(batch=_ids(), weights=path)
        ours = program.state_dict()
        assert all(torch.equal(ours[name], value) for name, value in expected.items())
        schedlang.transfer(path, plain := _made("Mixtral"))
        assert all(torch.equal(plain.state_dict()[n], v) for n, v in expected.items())
    (revision / _index(revision)[EXPERT]).resolve().unlink()
    model = schedlang.deferred_init(_made, "Mixtral")
    with pytest.raises(Refusal, match=r"(?s)S643.*which is not\s+there"):
        schedlang.create_schedule(model).build(batch=_ids(), weights=cache)
