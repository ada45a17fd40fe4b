"""Scripts of `launch` for torchrun, Slurm, Kubernetes and Ray: valid, started, or refused."""

from __future__ import annotations

import ast
import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser
from typer.testing import CliRunner, Result

from schedlang.cli import app

ROOT = Path(__file__).parents[2]
PYTHONPATH = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
MODEL = str(ROOT / "examples" / "custom" / "model.py")
TEXT = """schedule 1 for Watcher

knob tp: int = 2 in [1, 2, 3, 6]

mesh(dp=_, tp=tp)

at blocks.*.gate {
  both  shard(col, blocks=2, over=tp)
  back  shard(row, over=tp)
}
zero(stage=1, over=dp)
"""


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the schedule, which is the current one for these tests."""
    job_folder = tmp_path_factory.mktemp("a job")
    (job_folder / "my nodes.sched").write_text(TEXT)
    previous = Path.cwd()
    os.chdir(job_folder)
    yield job_folder
    os.chdir(previous)


FILE = "my nodes.sched"
TRAIN_COMMAND = shlex.join(
    ["-m", "schedlang", "run", FILE, "--model", MODEL, "--mesh", "dp=2,tp=1", "--steps", "2"]
)


def run_launch(*args: str) -> Result:
    """Run `launch` on the schedule."""
    return CliRunner().invoke(app, ["launch", FILE, "--model", MODEL, *args])


def launch_script(*args: str) -> str:
    """The script that `launch` prints."""
    result = run_launch(*args)
    assert result.exit_code == 0, result.output + result.stderr
    return result.stdout


def launch_record(*args: str) -> Mapping[str, Any]:
    """The JSON that `launch` prints."""
    record: Mapping[str, Any] = json.loads(launch_script(*args, "--json"))
    return record


def torchrun_args(script: str) -> list[str]:
    """The arguments of the one torchrun in a shell script."""
    line = next(line for line in script.splitlines() if "torchrun --nnodes" in line)
    return shlex.split(line[line.index("torchrun") :])[1:]


# -- what is started -------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["--torchrun", "--slurm"])
def test_torchrun_reads_its_command(engine: str) -> None:
    """torchrun's parser reads nodes, ranks per node, restarts and the schedule's own options."""
    options = ("--mesh", "dp=8", "--knob", "tp=2", "--restarts", "1")
    parsed = get_args_parser().parse_args(torchrun_args(launch_script(engine, *options)))
    assert (parsed.nnodes, parsed.nproc_per_node, parsed.max_restarts) == ("2", "8", 1)
    assert parsed.rdzv_backend == "c10d"
    assert parsed.module
    expected = ["run", FILE, "--mesh", "dp=8", "--knob", "tp=2", "--model", MODEL]
    assert [parsed.training_script, *parsed.training_script_args] == ["schedlang", *expected]


def test_an_elastic_job_goes_on_with_fewer_nodes() -> None:
    """An elastic job has a range of nodes and a new store for each round; illegal ones are
    refused."""
    script = launch_script("--nodes", "4", "--elastic", "2", "--script", "train.py 5")
    parsed = get_args_parser().parse_args(torchrun_args(script))
    assert (parsed.nnodes, parsed.max_restarts, parsed.rdzv_backend) == ("2:4", 100, "c10d")
    conf = dict(pair.split("=") for pair in parsed.rdzv_conf.split(","))
    assert conf["is_host"] == "0" and int(conf["last_call_timeout"]) < 30
    assert "env TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun" in script
    store = next(line for line in script.splitlines() if line.startswith("# python"))
    program, flag, code = shlex.split(store[2:])
    assert (program, flag) == ("python", "-c") and "is_master=True" in code
    compile(code, "store", "exec")
    script_options = ("--nodes", "2", "--script", "train.py")
    for options in (
        ("--elastic", "3", *script_options),
        ("--elastic", "1", "--slurm", *script_options),
    ):
        assert run_launch(*options).exit_code == 2
    assert "begins anew" in run_launch("--nodes", "2", "--elastic", "1").stderr


@pytest.mark.parametrize(
    ("words", "sizes", "axes"),
    [
        ((), (1, 4), {"dp=2": "within a node", "tp=2": "within a node"}),
        (("--mesh", "dp=8"), (2, 8), {"dp=8": "across 2 nodes", "tp=2": "within a node"}),
        (("--nodes", "3"), (3, 8), {"dp=12": "across 3 nodes", "tp=2": "within a node"}),
        (
            ("--nodes", "2", "--per-node", "2"),
            (2, 2),
            {"dp=2": "across 2 nodes", "tp=2": "within a node"},
        ),
        (("--per-node", "1"), (4, 1), {"dp=2": "across 2 nodes", "tp=2": "across 2 nodes"}),
    ],
)
def test_nodes_hold_the_last_axes(
    words: tuple[str, ...], sizes: tuple[int, int], axes: dict[str, str]
) -> None:
    """The last axes are within a node; `_` takes the remaining ranks; comments say which axes cross
    nodes."""
    record = launch_record(*words)
    assert (record["nodes"], record["ranks_per_node"]) == sizes
    assert record["axes"] == axes
    assert all(f"# {axis}  {span}" in record["script"] for axis, span in axes.items())


def test_own_script_is_passed_as_it_is() -> None:
    """Arguments with spaces, quotes and dollars reach the script unchanged."""
    script = launch_script("--slurm", "--script", "train.py 'a b' '$(touch x)' \"it's\"")
    assert torchrun_args(script)[-4:] == ["train.py", "a b", "$(touch x)", "it's"]
    assert "'$(touch x)'" in script


# -- engines ---------------------------------------------------------------------------------------


def test_batch_script_trains(tmp_path: Path) -> None:
    """With stand-ins for `scontrol` and `srun`, the Slurm script trains two steps here."""
    script = launch_script(
        *("--slurm", "--cpu", "--mesh", "dp=2,tp=1", "--name", "Two ranks!", "--time", "1:02:03"),
        *("--script", TRAIN_COMMAND),
    )
    assert "#SBATCH --job-name=two-ranks\n" in script
    assert "#SBATCH --time=1:02:03\n" in script
    assert "gpus" not in script
    for name, text in {
        "scontrol": "echo localhost; seq 100000",  # names of more nodes than a pipe holds
        "srun": 'shift; exec "$@"',
    }.items():
        stand_in = tmp_path / name
        stand_in.write_text(f"#!/bin/sh\n{text}\n")
        stand_in.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = {
        "PATH": path,
        "PYTHONPATH": PYTHONPATH,
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[0-1]",
    }
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    result = subprocess.run(
        ["bash"],
        input=script.replace(":29500", f":{port}"),
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "dp=2, tp=1 (2 ranks) · 2 steps" in result.stdout


def test_kubernetes_reads_its_documents() -> None:
    """A Service and an indexed Job with a pod per node, valid by Kubernetes' schema."""
    yaml = pytest.importorskip("yaml")
    text = launch_script("--k8s", "--image", "me/it:1", "--nodes", "2", "--time", "0:10:00")
    service, job = yaml.safe_load_all(text)
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    spec = job["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (2, 2, "Indexed")
    assert spec["activeDeadlineSeconds"] == 600
    pod = spec["template"]
    assert service["spec"]["selector"] == pod["metadata"]["labels"]
    (ranks,) = pod["spec"]["containers"]
    assert ranks["resources"]["limits"] == {"nvidia.com/gpu": 8}
    parsed = get_args_parser().parse_args(ranks["command"][1:])
    host = f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]
    assert parsed.rdzv_endpoint == f"{host}:29500"
    validate = pytest.importorskip("kubernetes_validate").validate
    for document in (service, job):
        validate(document, "1.29", strict=True)
    spec["completions"] = "two"
    with pytest.raises(Exception, match="two"):
        validate(job, "1.29", strict=True)


def test_ray_driver_is_python() -> None:
    """The Ray driver parses, asks for a bundle per node, and only fills in the head's address."""
    text = launch_script("--ray", "--nodes", "2", "--script", "train.py HEADS")
    tree = ast.parse(text)
    values = {
        statement.targets[0].id: ast.literal_eval(statement.value)
        for statement in tree.body
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)
        if statement.targets[0].id in ("BUNDLE", "COMMAND", "ENVIRONMENT")
    }
    assert values["BUNDLE"] == {"CPU": 1, "GPU": 8}
    assert values["COMMAND"].count("HEAD") == 1
    assert values["COMMAND"][-2:] == ["train.py", "HEADS"]
    assert "placement_group([BUNDLE] * 2" in text


@pytest.mark.deep
def test_ray_driver_trains(tmp_path: Path) -> None:
    """The driver trains on two ranks of a local Ray."""
    pytest.importorskip("ray")
    text = launch_script(*("--ray", "--cpu", "--mesh", "dp=2,tp=1"), *("--script", TRAIN_COMMAND))
    driver = tmp_path / "driver.py"
    driver.write_text(text)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    result = subprocess.run(
        [sys.executable, str(driver)],
        env=os.environ | {"PATH": path, "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "2 steps" in result.stdout + result.stderr


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--slurm", "--ray"), "a script is for one engine, not for slurm and ray"),
        (("--k8s",), "needs a container image"),
        (("--mesh", "dp=6"), "12 ranks do not fill nodes of 8"),
        (("--nodes", "3", "--mesh", "dp=8"), "the mesh has 16 ranks, 3 nodes of 8 have 24"),
        (("--nodes", "0"), "must be finite and above 0"),
        (("--time", "8h"), "cannot read `--time 8h`"),
        (("--script", ""), "`--script` is empty"),
        (("--script", "train.py 'a"), "cannot read `--script`"),
        (("--mesh", "dp=2,tp=5"), "tp"),
    ],
)
def test_what_cannot_be_started_is_refused(words: tuple[str, ...], said: str) -> None:
    """Exit 2 and one message, before anything is printed."""
    result = run_launch(*words)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert said in result.stderr


def test_records_are_asked_for_on_every_rank() -> None:
    """`--record` sets the variable for every engine, with the folder as one word."""
    folder = "/shared/my records"
    command = shlex.split(launch_script("--nodes", "2", "--record", folder), comments=True)
    fresh = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"  # each round has a store of its own
    assert command[:4] == ["env", f"SCHEDLANG_RECORD={folder}", fresh, "torchrun"]
    assert f"export SCHEDLANG_RECORD='{folder}'" in launch_script("--slurm", "--record", folder)
    assert repr({"SCHEDLANG_RECORD": folder})[1:-1] in launch_script("--ray", "--record", folder)
    k8s = launch_script("--k8s", "--image", "x:1", "--record", folder)
    assert f'"value": "{folder}"' in k8s and "SCHEDLANG_RECORD" not in launch_script("--slurm")


@pytest.mark.parametrize(("ranks", "code"), [("2", 0), ("4", 2)])
def test_nodes_of_unlike_numbers_of_ranks_have_no_one_script(
    folder: Path, ranks: str, code: int
) -> None:
    """Nodes need equal rank counts, but may have different devices."""
    text = TEXT.replace("mesh(dp=_, tp=tp)", 'mesh(dp=2, tp=tp) on "mixed.toml"')
    (folder / "mixed.sched").write_text(text)
    nodes_of = (("a100", "2"), ("v100", ranks))
    nodes = "".join(f'[[node]]\ndevice = "{device}"\nranks = {many}\n' for device, many in nodes_of)
    (folder / "mixed.toml").write_text(nodes)
    result = CliRunner().invoke(app, ["launch", "mixed.sched", "--model", MODEL])
    assert result.exit_code == code, result.output
    assert code == 0 or "2 a100 of 80 GiB, 4 v100 of 32 GiB" in result.output
