"""Weights as libraries write them: renamed, fused or split while only parts of them are read."""

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


class RecordedTensor(FileTensor):
    """A tensor that is in no file; the number of elements read is recorded."""

    def read(self, box: Any) -> Tensor:
        self.open_["read"] = self.open_.get("read", 0) + box_size(box)  # type: ignore[index,call-overload]
        content: Tensor = self.open_["data"][tuple(slice(*bounds) for bounds in box)]  # type: ignore[index]
        return content


def box_size(box: Any) -> int:
    total = 1
    for start, stop in box:
        total *= stop - start
    return total


def recorded_tensor(data: Tensor) -> tuple[LazyTensor, dict[Any, Any]]:
    record: dict[Any, Any] = {"data": data}
    leaf = RecordedTensor(Path("x"), "x", "F64", tuple(data.shape), record)
    return LazyTensor(leaf.read, data.shape, data.dtype, (leaf,)), record


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.sampled_from(sorted(OPERATORS)), max_size=4),
    st.lists(st.integers(2, 5), min_size=2, max_size=3),
    st.randoms(use_true_random=False),
)
def test_any_box_after_any_operators(names: list[str], shape: list[int], random: Any) -> None:
    """Reading a box of a lazily changed tensor gives what the operators give."""
    real = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
    lazy, _ = recorded_tensor(real)
    for name in names:
        try:
            real = OPERATORS[name](real)
        except (RuntimeError, IndexError, ValueError):
            continue  # the operator does not take this shape
        lazy = OPERATORS[name](lazy)  # type: ignore[assignment]
    assert isinstance(lazy, LazyTensor) and lazy.shape == real.shape and lazy.dtype == real.dtype
    ends = [sorted(random.sample(range(size + 1), 2)) if size else (0, 0) for size in real.shape]
    corner, size = [start for start, _ in ends], [stop - start for start, stop in ends]
    assert torch.equal(
        read_box(lazy, corner, size), real[tuple(slice(start, stop) for start, stop in ends)]
    )


EXACT = sorted({*OPERATORS} - {"every other", "another operator", "turned"})


@pytest.mark.parametrize("name", EXACT)
def test_nothing_beside_a_box_is_read(name: str) -> None:
    """Only the elements of the box are read from a file, or its rows where dims merge."""
    real = torch.arange(4 * 6 * 8, dtype=torch.float64).reshape(4, 6, 8)
    lazy, record = recorded_tensor(real)
    changed = OPERATORS[name](lazy)
    assert isinstance(changed, LazyTensor)
    read_box(changed, [0] * changed.ndim, [1] * changed.ndim)
    assert record["read"] <= {"flat": 48, "merged": 8, "heads": 24}.get(name, 1)


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


def make_model(kind: str) -> Any:
    config = getattr(transformers, f"{kind}Config")(**SIZES | KINDS[kind])
    return getattr(transformers, f"{kind}{HEADS.get(kind, 'ForCausalLM')}")(config)


def target_halves(model: nn.Module, cut: int) -> list[TargetPart]:
    """Return targets: the second half of each parameter along the dim `cut` from the last."""
    targets = []
    for name, parameter in model.named_parameters():
        cells = [((0, 0, size),) for size in parameter.shape]
        if parameter.ndim > cut and (size := parameter.shape[-1 - cut]) % 2 == 0:
            cells[-1 - cut] = ((0, size // 2, size // 2),)
        shape = [sum(n for *_, n in runs) for runs in cells]
        targets.append(
            TargetPart((name,), parameter, torch.zeros(shape, dtype=parameter.dtype), tuple(cells))
        )
    return targets


def count_read_bytes(files: WeightFiles, patch: pytest.MonkeyPatch) -> list[int]:
    original, count = FileTensor.read, [0]

    def read(self: FileTensor, box: Any) -> Tensor:
        content = original(self, box)
        count[0] += content.nbytes
        return content

    patch.setattr(FileTensor, "read", read)
    return count


@pytest.mark.parametrize("cut", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_as_from_pretrained_has_it(
    kind: str, cut: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each parameter's half, bit by bit; no other byte of the files is read."""
    torch.manual_seed(0)
    make_model(kind).save_pretrained(tmp_path, max_shard_size="30KB")
    expected = type(make_model(kind)).from_pretrained(tmp_path).state_dict()
    with torch.device("meta"):
        model = make_model(kind)
    files, rooms = files_of(tmp_path, model), target_halves(model, cut)
    read_bytes = count_read_bytes(files, monkeypatch)
    files.fill(rooms)
    for room in rooms:
        index = tuple(slice(*(runs[0][1], runs[0][1] + runs[0][2])) for runs in room.cells)
        assert torch.equal(room.part, expected[room.names[0]][index]), room.names
    assert read_bytes[0] == sum(room.part.nbytes for room in rooms)
    named_else = {*files.leaves} - {*expected}
    assert bool(named_else) == (kind in ("Mixtral", "Qwen2Moe", "Qwen3Moe", "Dinov2"))


def test_a_model_of_another_precision(tmp_path: Path) -> None:
    """Values are rounded as the library rounds them."""
    torch.manual_seed(0)
    make_model("Mixtral").save_pretrained(tmp_path)
    kind = transformers.MixtralForCausalLM
    expected = kind.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    with torch.device("meta"):
        model = make_model("Mixtral").to(torch.bfloat16)
    files_of(tmp_path, model).fill(rooms := target_halves(model, 9))
    assert rooms and all(torch.equal(room.part, expected[room.names[0]]) for room in rooms)


def _ids() -> dict[str, Tensor]:
    ids = torch.arange(32).reshape(4, 8)
    return {"input_ids": ids, "labels": ids}


ROWS = """schedule 1 for MixtralForCausalLM
mesh(dp=2)
model.layers.*.mlp.experts  expert_parallel(over=dp)
zero(stage=1, over=dp)
"""


def compare_programs(file: str, folder: str) -> None:
    """Compare programs built from a folder, programs and modules that load one, with
    `from_pretrained`."""
    expected = transformers.MixtralForCausalLM.from_pretrained(folder).state_dict()
    torch.manual_seed(3)
    model = schedlang.deferred_init(make_model, "Mixtral")
    built = schedlang.load(file, model).build(batch=_ids(), weights=folder)
    loaded = schedlang.load(file, make_model("Mixtral")).build(batch=_ids())
    module = make_model("Mixtral")
    for target in (loaded, module):
        schedlang.transfer(folder, target)
    for target in (built, loaded, module):
        state = target.state_dict()
        assert all(torch.equal(state[name], value) for name, value in expected.items())


def test_programs_of_a_folder(pool: Pool, tmp_path: Path) -> None:
    """Each rank has its experts; `schedlang.transfer` reads the same folder."""
    torch.manual_seed(0)
    make_model("Mixtral").save_pretrained(tmp_path, max_shard_size="30KB")
    file = tmp_path / "x.sched"
    file.write_text(ROWS)
    pool.run(compare_programs, 2, str(file), str(tmp_path))


# ---- folders that do not do ----------------------------------------------------------------------


def weight_map(folder: Path) -> dict[str, str]:
    names: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return names


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_weight(folder: Path, name: str, change: Callable[[Tensor], Tensor | None]) -> None:
    file = folder / weight_map(folder)[name]
    tensors = load_file(file)
    changed = change(tensors.pop(name))
    save_file(tensors | ({name: changed} if changed is not None else {}), file, {"format": "pt"})


EXPERT = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
DAMAGED: dict[str, tuple[Callable[[Path], None], str]] = {
    "quantised": (
        lambda folder: change_config(folder, quantization_config={"quant_method": "fp8"}),
        "the values are quantised by fp8",
    ),
    "another type": (
        lambda folder: change_config(folder, model_type="qwen3_moe"),
        "they are of a model of type `qwen3_moe`, and this one is of type `mixtral`",
    ),
    "a file of experts": (
        lambda folder: (folder / weight_map(folder)[EXPERT]).unlink(),
        "which is not there",
    ),
    "an expert": (
        lambda folder: change_weight(folder, EXPERT, lambda _: None),
        "`model.layers.1.mlp.experts.gate_up_proj`",
    ),
    "experts of several shapes": (
        lambda folder: change_weight(folder, EXPERT, lambda x: x[:-1].contiguous()),
        "`model.layers.1.mlp.experts.gate_up_proj`",
    ),
    "an expert in bytes": (
        lambda folder: change_weight(folder, EXPERT, lambda x: x.to(torch.int8)),
        f"`{EXPERT}` is I8",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_what_is_refused(name: str, tmp_path: Path) -> None:
    """The refusal names what is missing or wrong, and nothing is built."""
    make_model("Mixtral").save_pretrained(tmp_path, max_shard_size="30KB")
    spoil, expected = DAMAGED[name]
    spoil(tmp_path)
    model = schedlang.deferred_init(make_model, "Mixtral")
    with pytest.raises(Refusal) as info:
        schedlang.create_schedule(model).build(batch=_ids(), weights=tmp_path)
    message = " ".join(str(info.value).replace("=", " ").split())
    assert "S643" in message and expected in message


def test_a_folder_of_a_hubs_cache(tmp_path: Path) -> None:
    """Files are links to blobs, in a folder of their revision; a missing blob is named."""
    saved, cache = tmp_path / "saved", tmp_path / "models--a--b"
    torch.manual_seed(0)
    real = make_model("Mixtral")
    real.save_pretrained(saved, max_shard_size="30KB")
    revision, blobs = cache / "snapshots" / "0abc", cache / "blobs"
    for folder in (revision, blobs, cache / "refs"):
        folder.mkdir(parents=True)
    (cache / "refs" / "main").write_text("0abc")
    for number, file in enumerate(sorted(saved.iterdir())):
        file.rename(blobs / str(number))
        (revision / file.name).symlink_to(f"../../blobs/{number}")
    expected = real.state_dict()
    for path in (cache, revision):
        model = schedlang.deferred_init(make_model, "Mixtral")
        program = schedlang.create_schedule(model).build(batch=_ids(), weights=path)
        state = program.state_dict()
        assert all(torch.equal(state[name], value) for name, value in expected.items())
        schedlang.transfer(path, module := make_model("Mixtral"))
        assert all(torch.equal(module.state_dict()[n], v) for n, v in expected.items())
    (revision / weight_map(revision)[EXPERT]).resolve().unlink()
    model = schedlang.deferred_init(make_model, "Mixtral")
    with pytest.raises(Refusal, match=r"(?s)S643.*which is not\s+there"):
        schedlang.create_schedule(model).build(batch=_ids(), weights=cache)
