"""Deferred initialization: models without values, built from a record or from files, part by
part."""

from __future__ import annotations

import json
import resource
import shutil
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import schedlang
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.memory import CLASSES
from schedlang.passes.simulate.account import account
from schedlang.runtime.initial.recorded_init import InitRecord, record_of
from schedlang.runtime.launch.forkserver import BASE_MODULES, PROGRAM_MODULES
from schedlang.runtime.launch.pool import Pool
from tests import models

transformers = pytest.importorskip("transformers")

EARLIER_TENSOR = torch.zeros(3)
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
}
IMAGES = {k: v for k, v in SIZES.items() if k != "vocab_size"} | {"image_size": 32, "patch_size": 8}


def varied_model() -> nn.Module:
    """Return a model of many kinds of initialization: reads of values, orthogonal and truncated
    draws, writes into views, products, another dtype."""
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    nn.init.orthogonal_(model[0].weight)
    nn.init.trunc_normal_(model[1].weight)
    with torch.no_grad():
        model[0].bias[2] = 3
        model[1].weight.mul_(model[0].weight.std().item())
        model[1].bias.copy_(torch.tensor(torch.linspace(0, 1, 4).tolist()))
    model.product = nn.Parameter(torch.randn(3, 4) @ model[0].weight)
    model.register_buffer("drawn", torch.rand(5), persistent=False)
    model.tied = model[0].weight
    return model.to(torch.float64)


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "by hand": varied_model,
    "layers of torch": lambda: nn.TransformerEncoderLayer(16, 4, 32),
    "recurrent": lambda: nn.LSTM(4, 4),
    "gpt2": lambda: models.gpt2(2),
    "llama": lambda: models.llama(2),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(d_model=32, d_ff=48, num_layers=2, num_heads=4, vocab_size=64, d_kv=8)
    ),
    "vit": lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**IMAGES)),
    "experts": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SIZES, num_local_experts=4, num_key_value_heads=2)
    ),
    "mamba": lambda: transformers.MambaForCausalLM(
        transformers.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=64)
    ),
}


def record_for(model: nn.Module) -> InitRecord:
    record = record_of(model)
    assert record is not None
    return record


@pytest.mark.parametrize("name", MAKERS)
def test_same_bits_as_made_here(name: str) -> None:
    """Every parameter and buffer, however it was drawn; the generator is not advanced."""
    torch.manual_seed(3)
    real = MAKERS[name]()
    torch.manual_seed(3)
    generator_state = torch.get_rng_state()
    model = schedlang.deferred_init(MAKERS[name])
    assert torch.equal(torch.get_rng_state(), generator_state)
    views = record_for(model).views
    parts = dict(zip(views, record_for(model).values(list(views.values())), strict=True))
    expected = dict(real.named_parameters(remove_duplicate=False))
    assert expected.keys() == parts.keys()
    assert all(p.is_meta for p in model.parameters())
    for key, value in expected.items():
        assert torch.equal(parts[key], value), key
    buffers = dict(model.named_buffers())
    for key, value in real.named_buffers():
        assert torch.equal(buffers[key], value), key


def test_a_seed_within_counts() -> None:
    """A generator that is seeded anew inside of the function draws the same values."""

    def make() -> nn.Module:
        layer = nn.Linear(3, 3)
        torch.manual_seed(9)
        return nn.Sequential(layer, nn.Linear(3, 3))

    torch.manual_seed(1)
    real = make()
    torch.manual_seed(1)
    record = record_for(schedlang.deferred_init(make))
    for key, value in real.named_parameters():
        assert torch.equal(record.values([record.views[key]])[0], value), key


def test_what_nobody_wants_is_not_held() -> None:
    """At most two storages are alive at a time while all are created."""
    record = record_for(schedlang.deferred_init(lambda: models.llama(3)))
    alive: list[int] = []
    largest = 0
    original = InitRecord._run

    def counting(self: InitRecord, places: Any) -> Any:
        nonlocal largest
        storages = original(self, places)
        largest = max(largest, sum(self.sizes[number] for number in storages))
        return storages

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InitRecord, "_run", counting)
        storages = {view.storage for view in record.views.values()}
        record.replay({number: lambda data: alive.append(data.nbytes()) for number in storages})
    assert len(alive) == len(storages)
    assert largest <= 2 * max(alive)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nn.init.normal_(torch.empty(3), generator=torch.Generator()), "of its own"),
        (lambda: EARLIER_TENSOR.normal_(), "there before"),
        (lambda: 3, "returns a module"),
    ],
)
def test_what_cannot_be_recorded_is_refused(make: Callable[[], Any], words: str) -> None:
    """Draws that a replay would not repeat, and functions that return no module."""
    with pytest.raises(Refusal, match=f"(?s)S626.*{words}"):
        schedlang.deferred_init(make)


# ---- programs ------------------------------------------------------------------------------------

ROWS = {
    "tp": """mesh(tp=2)
transformer.h.*.attn.c_attn shard(col, blocks=3, over=tp)
transformer.h.*.attn.c_proj shard(row, over=tp)
transformer.h.*.mlp.c_fc shard(col, over=tp)
transformer.h.*.mlp.c_proj shard(row, over=tp)""",
    "pp": """mesh(pp=2)
transformer.h pipeline_split(over=pp)
pipeline(order="1F1B", micro=2)""",
    "zero3": """mesh(dp=2)
zero(stage=3, over=dp)""",
}


def adamw(named: Any) -> torch.optim.Optimizer:
    """Return AdamW over named parameters, as `build` takes it."""
    return torch.optim.AdamW(named)


Run = tuple[dict[str, Any], list[float], dict[str, Any]]  # state before, losses, and after


def train_on_rank(file: str, model: nn.Module, weights: str | None = None) -> Run:
    """On a rank: train two steps of the program of a model."""
    batch = models.tokens(4, 9)
    program = schedlang.load(file, model).build(batch=batch, optimizer=adamw, weights=weights)
    state = program.state_dict()
    return state, [float(program.train_step(batch)) for _ in range(2)], program.state_dict()


def train_real(file: str) -> Run:
    torch.manual_seed(1)
    return train_on_rank(file, models.gpt2(2))


@cache  # for all the places that values may come from
def expected_runs(pool: Pool, name: str) -> list[Run]:
    """Return what the program of the model with values does on each rank."""
    with tempfile.TemporaryDirectory() as folder:
        return pool.run(train_real, 2, schedule_file(name, Path(folder)))


def schedule_file(name: str, folder: Path) -> str:
    file = folder / "x.sched"
    file.write_text(f"schedule 1 for GPT2LMHeadModel\n{ROWS[name]}\n")
    return str(file)


def compare_deferred(file: str, kind: str, folder: str, expected: list[Run]) -> None:
    """Compare the program of a model without values with that of one with values, bit by bit."""
    before, losses, after = expected[dist.get_rank()]
    torch.manual_seed(1 if kind == "record" else 2)
    if kind == "meta":
        with torch.device("meta"):
            model: nn.Module = models.gpt2(2)
    else:
        model = schedlang.deferred_init(models.gpt2, 2)
    start, our_losses, end = train_on_rank(file, model, None if kind == "record" else folder)
    assert losses == our_losses
    assert all(torch.equal(before[key], start[key]) for key in before)
    assert all(torch.equal(after[key], end[key]) for key in after)


def write_weights(kind: str, folder: Path) -> None:
    """Write the weights of a model: as transformers does, by `save`, or as torch's checkpoints."""
    torch.manual_seed(1)
    real: Any = models.gpt2(2)
    state = dict(real.state_dict())
    moments = {"exp_avg": torch.ones(3)}
    nested = {
        "dcp": state,
        "dcp nested": {"model": state, "optim": moments},
        "torchtitan": {**state, "optimizer": moments, "train_state": torch.zeros(2)},
    }
    if kind in nested:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp_save(nested[kind], storage_writer=FileSystemWriter(folder), no_dist=True)
    elif kind == "checkpoint":
        sch = schedlang.create_schedule(real)
        sch.build(batch=models.tokens(4, 9), optimizer=adamw).save(folder)
    else:
        real.save_pretrained(folder, max_shard_size="20KB" if kind == "index" else "1GB")


SOURCES = ["record", "files", "meta", "index", "checkpoint", "dcp", "dcp nested", "torchtitan"]


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("name", ROWS)
def test_the_program_of_the_model(pool: Pool, tmp_path: Path, name: str, kind: str) -> None:
    """Split tensors, stages and slices of state; values from a record, files or checkpoints."""
    weights = tmp_path / "weights"
    write_weights(kind, weights)
    assert (weights / "model.safetensors.index.json").exists() == (kind == "index")
    args = schedule_file(name, tmp_path), kind, str(weights), expected_runs(pool, name)
    pool.run(compare_deferred, 2, *args)


def test_names_of_the_base_model(tmp_path: Path) -> None:
    """Files of the model without its head have names without its prefix, as many on hubs."""
    torch.manual_seed(1)
    real = models.gpt2(2)
    real.transformer.save_pretrained(tmp_path)
    torch.manual_seed(2)
    model = schedlang.deferred_init(models.gpt2, 2)
    program = schedlang.create_schedule(model).build(batch=models.tokens(2, 5), weights=tmp_path)
    state = program.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in real.state_dict().items())


def test_a_checkpoint_is_gone_on_from(tmp_path: Path) -> None:
    """A checkpoint written by `save` gives values, the optimizer's state and the step."""
    batch = models.tokens(2, 5)

    def built(model: nn.Module, weights: Path | None = None) -> Any:
        sch = schedlang.create_schedule(model)
        return sch.build(batch=batch, optimizer=adamw, weights=weights)

    program = built(models.gpt2(2))
    program.train_step(batch)
    program.save(tmp_path)
    resumed = built(schedlang.deferred_init(models.gpt2, 2), tmp_path)
    assert resumed.step == 1
    assert float(program.train_step(batch)) == float(resumed.train_step(batch))


def save_sharded(folder: Path) -> nn.Module:
    models.gpt2(2).save_pretrained(folder, max_shard_size="20KB")
    return schedlang.deferred_init(models.gpt2, 2)


def drop_file(folder: Path) -> None:
    next(iter(sorted(folder.glob("*.safetensors")))).unlink()


def drop_name(folder: Path) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    del index["weight_map"]["transformer.h.1.ln_1.bias"]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def truncate_file(folder: Path) -> None:
    file = next(iter(sorted(folder.glob("*.safetensors"))))
    file.write_bytes(file.read_bytes()[:100])


def damage_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")


def remove_files(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (drop_file, "the index names `model-00001"),
        (drop_name, "there is no `transformer.h.1.ln_1.bias`"),
        (truncate_file, "cannot be read"),
        (damage_index, "cannot be read"),
        (remove_files, "there is no `model.safetensors`"),
    ],
)
def test_folders_that_are_not_whole(
    tmp_path: Path, spoil: Callable[[Path], None], words: str
) -> None:
    """The refusal names what is missing or damaged."""
    model = save_sharded(tmp_path)
    spoil(tmp_path)
    with pytest.raises(Refusal) as info:
        schedlang.create_schedule(model).build(batch=models.tokens(2, 5), weights=tmp_path)
    message = " ".join(str(info.value).replace("=", " ").split())
    assert "S643" in message and words in message


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.zeros(3), "has the shape"),
        (torch.zeros(64, 16, dtype=torch.int8), "is I8"),
        (torch.zeros(64, 16).to(torch.float8_e4m3fn), "is F8_E4M3"),
    ],
    ids=["shape", "int8", "float8"],
)
def test_files_of_another_model(tmp_path: Path, tensor: torch.Tensor, words: str) -> None:
    """Other shapes, and quantized values, are refused."""
    from safetensors.torch import save_file

    model = nn.Sequential(nn.Linear(16, 64, bias=False))
    save_file({"0.weight": tensor}, tmp_path / "model.safetensors")
    sch = schedlang.create_schedule(model)
    batch = {"input": torch.ones(2, 16)}
    with pytest.raises(Refusal, match=f"(?s)S643.*{words}"):
        sch.build(batch=batch, loss=lambda out, batch: out.sum(), weights=tmp_path)


CHANGES: tuple[Callable[[Any], Any], ...] = (
    lambda model: model.to(torch.bfloat16),
    lambda model: nn.init.zeros_(model.transformer.ln_f.weight),
    lambda model: setattr(model.transformer, "ln_f", nn.LayerNorm(16, device="meta")),
)


def test_what_is_real_stays() -> None:
    """A layer that was inserted with values keeps them."""
    model: Any = schedlang.deferred_init(models.gpt2, 2)
    model.transformer.ln_f = nn.LayerNorm(16, dtype=torch.float64)
    nn.init.constant_(model.transformer.ln_f.weight, 3)
    program = schedlang.create_schedule(model).build(batch=models.tokens(2, 5))
    assert program.state_dict()["transformer.ln_f.weight"].eq(3).all()


def test_what_has_no_values_is_named() -> None:
    """A model that was never recorded, and one that was changed after its record, are refused."""
    with torch.device("meta"):
        model = models.llama(2)
    with pytest.raises(Refusal, match=r"S623.*on the meta device"):
        schedlang.create_schedule(model).build(batch=models.tokens(2, 5))
    for change in CHANGES:
        model = schedlang.deferred_init(models.gpt2, 2)
        change(model)
        with pytest.raises(Refusal, match=r"S623.*it was changed after"):
            schedlang.create_schedule(model).build(batch=models.tokens(2, 5))


def test_a_buffer_that_no_file_has(tmp_path: Path) -> None:
    """Rotary tables are in no file: a record has them, the meta device has not."""
    models.llama(2).save_pretrained(tmp_path)
    with torch.device("meta"):
        model = models.llama(2)
    with pytest.raises(Refusal, match=r"S623.*inv_freq"):
        schedlang.create_schedule(model).build(batch=models.tokens(2, 5), weights=tmp_path)


def test_rows_that_try_the_model(tmp_path: Path) -> None:
    """Rows that try the model on slices of a sequence run it with its values."""
    file = tmp_path / "x.sched"
    file.write_text(
        "schedule 1 for GPT2LMHeadModel\nmesh(pp=1)\ntransformer.h pipeline_split(over=pp)\n"
        'pipeline(order="Seq1F1B", micro=2, slices=2)\n'
    )
    sch = schedlang.load(str(file), schedlang.deferred_init(models.gpt2, 2))
    with pytest.raises(Refusal, match=r"S623.*parts of sequences"):
        sch.build(batch=models.tokens(4, 8))


# ---- memory --------------------------------------------------------------------------------------

SMALL, LARGE = (1024, 80), (4096, 64)  # 320 MiB in tensors of 4 MiB, and 4 GiB in such of 64 MiB
OVERHEAD = 96 << 20  # bytes of threads, process groups and their buffers


def wide_model(wide: int, deep: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(wide, wide, bias=False) for _ in range(deep)))


def private_bytes() -> int:
    """Return the private memory of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmData"))


def run_limited(free: int, work: Callable[[], Any]) -> Any:
    """Call a function with a limit of free private memory."""
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (private_bytes() + free, limits[1]))
    try:
        return work()
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)


def build_limited(
    size: tuple[int, int], file: str, weights: str | None, narrow: str | None, peak: int
) -> None:
    width, depth = size
    batch = {"input": torch.ones(4, width)}
    loss = lambda out, batch: out.mean()  # noqa: E731
    imports = schedlang.load(file, schedlang.deferred_init(wide_model, 8, depth))
    imports.build(batch={"input": torch.ones(4, 8)}, loss=loss, weights=narrow)
    sch = schedlang.load(file, schedlang.deferred_init(wide_model, width, depth))
    layer_bytes = 4 * width * width
    free = depth * layer_bytes // 4 + 2 * layer_bytes + OVERHEAD
    assert free < depth * layer_bytes, "the whole model would not fit"
    if weights is not None and (Path(weights) / "model.safetensors").exists():
        free += depth * layer_bytes  # the mapped file counts, but its pages are not private
    program = run_limited(free, lambda: sch.build(batch=batch, loss=loss, weights=weights))
    stored = sum(p.nbytes for p in program.assembly.parameters.values())
    assert stored == depth * layer_bytes // 4
    with pytest.raises(RuntimeError, match="memory"):  # the limit works
        run_limited(OVERHEAD, lambda: torch.empty(2 * OVERHEAD, dtype=torch.uint8))
    run_limited(int(1.05 * (peak - stored)) + OVERHEAD, lambda: program.train_step(batch))


def planned_peak(file: Path, size: tuple[int, int]) -> int:
    """Return the peak bytes of a rank in a step by `plan`, without the moments of an optimizer."""
    width, depth = size
    plan = schedlang.load(str(file), schedlang.deferred_init(wide_model, width, depth)).plan()
    loss = lambda out, batch: out.mean()  # noqa: E731
    memory = account(plan, {"input": torch.ones(4, width)}, loss, memory=True).memory
    assert memory is not None
    index = CLASSES.index("optimizer")
    return max(
        max(sum(m.most) - m.most[index] for m in rank_memory.moments) for rank_memory in memory
    )


def weight_files(kind: str, where: Path, wide: int, deep: int) -> str | None:
    """Write weights as files of a kind; return their path, or None for the record."""
    from safetensors.torch import save_model

    if kind == "files":
        where.mkdir()
        save_model(wide_model(wide, deep), str(where / "model.safetensors"))
    elif kind == "checkpoint":
        batch, loss = {"input": torch.ones(4, wide)}, lambda out, batch: out.mean()
        schedlang.create_schedule(wide_model(wide, deep)).build(batch=batch, loss=loss).save(where)
    elif kind == "dcp":
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            state = wide_model(wide, deep).state_dict()
            dcp_save(state, storage_writer=FileSystemWriter(where), no_dist=True)
    return str(where) if where.exists() else None


@pytest.mark.parametrize("size", [SMALL, pytest.param(LARGE, marks=pytest.mark.deep)])
@pytest.mark.parametrize("kind", ["record", "files", "checkpoint", "dcp"])
def test_a_rank_never_has_the_whole_model(tmp_path: Path, kind: str, size: tuple[int, int]) -> None:
    """The operating system limits each rank to its parts, two full tensors and 96 MiB; a training
    step may add what `plan` says, 5% and 96 MiB.

    It runs in new ranks: after other jobs the C allocator keeps an unknown amount of memory.
    """
    width, depth = size
    weights, narrow = (weight_files(kind, tmp_path / str(w), w, depth) for w in (width, 8))
    rows = (f"{i} shard({('col', 'row')[i % 2]}, over=tp)" for i in range(depth))
    file = tmp_path / "x.sched"
    file.write_text("\n".join(["schedule 1", "mesh(tp=4)", *rows, ""]))
    try:
        with Pool(preload=(*BASE_MODULES, *PROGRAM_MODULES)) as pool:
            pool.run(build_limited, 4, size, str(file), weights, narrow, planned_peak(file, size))
    finally:
        shutil.rmtree(tmp_path / str(width), ignore_errors=True)  # up to 4 GiB
