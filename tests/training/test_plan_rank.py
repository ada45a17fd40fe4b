"""`plan --rank`: the planned program of one rank equals the one that a job builds there."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from safetensors.torch import save_model
from torch.distributed.tensor import DTensor
from typer.testing import CliRunner

import schedlang
from schedlang.cli import app
from schedlang.runtime.initial.lazy_tensors import Box, FileTensor
from schedlang.runtime.launch.pool import Pool
from tests import models

ROOT = Path(__file__).parents[2]
BLOCK = """
  at model.layers.* {
    self_attn.{q_proj,k_proj,v_proj}, mlp.{gate_proj,up_proj}  shard(col, over=tp)
    self_attn.o_proj, mlp.down_proj                            shard(row, over=tp)
  }
"""
ROWS = {
    "tp x zero3": f'mesh(dp=2, tp=2)\n\nstep "all" {{{BLOCK}  zero(stage=3, over=dp)\n}}\n',
    "pp x tp": f'mesh(pp=2, tp=2)\n\nstep "all" {{{BLOCK}'
    '  model.layers  pipeline_split(over=pp)\n  pipeline(order="1F1B", micro=2)\n}\n',
}
MODEL = """from tests import models


def model():
    return models.llama(4)


def batch(seed):
    return models.tokens(4, 8, seed=seed)
"""


def build_on_rank(file: str, weights: str) -> dict[str, Any]:
    """On a rank of a real job: return what it built, its groups, and what it read from files."""
    reads: list[Any] = []
    original = FileTensor.read

    def read(self: FileTensor, box: Box) -> Any:
        content = original(self, box)
        reads.append([self.file.name, self.name, [list(span) for span in box], content.nbytes])
        return content

    FileTensor.read = read  # type: ignore[method-assign]
    try:
        sch = schedlang.load(file, schedlang.deferred_init(models.llama, 4))
        program: Any = sch.build(batch=models.tokens(4, 8), weights=weights)
    finally:
        FileTensor.read = original  # type: ignore[method-assign]
    parts = {}
    for name, value in program.assembly.parameters.items():
        part = value.to_local() if isinstance(value, DTensor) else value
        parts[name] = [*part.shape], part.nbytes
    groups = [dist.get_process_group_ranks(value) for value in dist.distributed_c10d._world.pg_map]
    return {"held": parts, "asked": sorted(reads), "groups": groups}


@pytest.mark.parametrize("name", ROWS)
def test_the_rank_that_is_built(pool: Pool, tmp_path: Path, name: str) -> None:
    """Parts, their bytes, slices of files and groups of each rank are those of a real job."""
    (tmp_path / "model.py").write_text(MODEL)
    file = tmp_path / "x.sched"
    file.write_text(f"schedule 1 for LlamaForCausalLM\n\n{ROWS[name]}")
    weights = tmp_path / "weights"
    weights.mkdir()
    save_model(models.llama(4), str(weights / "model.safetensors"))
    real = pool.run(build_on_rank, 4, str(file), str(weights))
    for rank, built in enumerate(real):
        arguments = ["plan", str(file), "--rank", str(rank), "--weights", str(weights), "--json"]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        report = json.loads(result.stdout)
        assert {
            entry["name"]: (entry["part"], entry["bytes"]) for entry in report["parameters"]
        } == {name: tuple(value) for name, value in built["held"].items()}
        reads = [
            [entry["file"], entry["name"], entry["box"], entry["bytes"]]
            for entry in report["reads"]
        ]
        assert sorted(reads) == built["asked"] and reads
        used = [entry["ranks"] for entry in report["groups"]]
        assert used and all(ranks in built["groups"] and rank in ranks for ranks in used)
    text = CliRunner().invoke(app, ["plan", str(file), "--rank", "3"]).stdout
    assert "rank 3 of 4" in text and "model.layers.*.mlp.up_proj.weight" in text


def test_ranks_and_files_that_are_not_there(tmp_path: Path) -> None:
    """S109 for a rank outside of the mesh, or weights without a rank; S643 for wrong files."""
    (tmp_path / "model.py").write_text(MODEL)
    file = tmp_path / "x.sched"
    file.write_text(f"schedule 1 for LlamaForCausalLM\n\n{ROWS['tp x zero3']}")
    for options, code in (
        (["--rank", "4"], "S109"),
        (["--weights", str(tmp_path)], "S109"),
        (["--rank", "0", "--weights", str(tmp_path)], "S643"),
    ):
        result = CliRunner().invoke(app, ["plan", str(file), *options])
        assert result.exit_code == 2 and code in result.stderr, result.output


LLAMA_405B = """import torch
from transformers import LlamaConfig, LlamaForCausalLM


def model():
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128256,
            hidden_size=16384,
            intermediate_size=53248,
            num_hidden_layers=126,
            num_attention_heads=128,
            num_key_value_heads=8,
            max_position_embeddings=8192,
            use_cache=False,
        )
    )


def batch(seed):
    ids = torch.zeros(2048, 8192, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids}
"""


@pytest.mark.deep
@pytest.mark.parametrize("words", [[], ["--rank", "5000"]], ids=["plan", "rank"])
def test_405_billion_parameters_from_their_configuration(tmp_path: Path, words: list[str]) -> None:
    """On 16,384 ranks, within 2 GiB: the plan of all ranks, and what one of them would build."""
    (tmp_path / "model.py").write_text(LLAMA_405B)
    rows = f'mesh(dp=128, pp=16, tp=8)\n\nstep "all" {{{BLOCK}'
    rows += "  model.layers  pipeline_split(over=pp, balance=params)\n  zero(stage=1, over=dp)\n"
    rows += '  pipeline(order="1F1B", micro=16)\n}\n'
    (tmp_path / "x.sched").write_text(f"schedule 1 for LlamaForCausalLM\n\n{rows}")
    command = [sys.executable, "-m", "schedlang", "plan", "x.sched", *words, "--json"]
    limit = 2 << 30
    process = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)),
    )
    assert process.returncode == 0, process.stderr[-2000:]
    report = json.loads(process.stdout)
    if words:
        shapes = {entry["name"]: entry["part"] for entry in report["parameters"]}
        assert shapes["model.layers.7.mlp.up_proj.weight"] == [53248 // 8 // 128, 16384]
        assert report["at"] == {"dp": 39, "pp": 1, "tp": 0}
        assert [len(entry["ranks"]) for entry in report["groups"]] == [8, 16, 128, 16384]
