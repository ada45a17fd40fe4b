"""Scripts of `launch`: what engines read, that they start the job, and what is refused."""

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
    """A folder with the schedule, which is the current one meanwhile."""
    made = tmp_path_factory.mktemp("a job")
    (made / "my nodes.sched").write_text(TEXT)
    before = Path.cwd()
    os.chdir(made)
    yield made
    os.chdir(before)


FILE = "my nodes.sched"
TRAINS = shlex.join(
    ["-m", "schedlang", "run", FILE, "--model", MODEL, "--mesh", "dp=2,tp=1", "--steps", "2"]
)


def invoked(*words: str) -> Result:
    """The command line, called."""
    return CliRunner().invoke(app, ["launch", FILE, "--model", MODEL, *words])


def launched(*words: str) -> str:
    """The script."""
    found = invoked(*words)
    assert found.exit_code == 0, found.output + found.stderr
    return found.stdout


def told(*words: str) -> Mapping[str, Any]:
    """The same as JSON."""
    found: Mapping[str, Any] = json.loads(launched(*words, "--json"))
    return found


def command(script: str) -> list[str]:
    """The words of the one torchrun in a shell's script."""
    line = next(line for line in script.splitlines() if "torchrun --nnodes" in line)
    return shlex.split(line[line.index("torchrun") :])[1:]


# -- what is started -------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["--torchrun", "--slurm"])
def test_torchrun_reads_its_command(engine: str) -> None:
    """Nodes, ranks of a node, restarts and the schedule's own options, by torchrun's parser."""
    words = ("--mesh", "dp=8", "--knob", "tp=2", "--restarts", "1")
    given = get_args_parser().parse_args(command(launched(engine, *words)))
    assert (given.nnodes, given.nproc_per_node, given.max_restarts) == ("2", "8", 1)
    assert given.rdzv_backend == "c10d"
    assert given.module
    rest = ["run", FILE, "--mesh", "dp=8", "--knob", "tp=2", "--model", MODEL]
    assert [given.training_script, *given.training_script_args] == ["schedlang", *rest]


def test_an_elastic_job_goes_on_with_fewer_nodes() -> None:
    """From so many nodes to all, with a store of its own for each round; what cannot is refused."""
    script = launched("--nodes", "4", "--elastic", "2", "--script", "train.py 5")
    given = get_args_parser().parse_args(command(script))
    assert (given.nnodes, given.max_restarts, given.rdzv_backend) == ("2:4", 100, "c10d")
    conf = dict(word.split("=") for word in given.rdzv_conf.split(","))
    assert conf["is_host"] == "0" and int(conf["last_call_timeout"]) < 30
    assert "env TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun" in script
    store = next(line for line in script.splitlines() if line.startswith("# python"))
    program, flag, code = shlex.split(store[2:])
    assert (program, flag) == ("python", "-c") and "is_master=True" in code
    compile(code, "store", "exec")
    words = ("--nodes", "2", "--script", "train.py")
    for odd in (("--elastic", "3", *words), ("--elastic", "1", "--slurm", *words)):
        assert invoked(*odd).exit_code == 2
    assert "begins anew" in invoked("--nodes", "2", "--elastic", "1").stderr


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
    """Ranks of a node follow each other; `_` takes what the nodes have; lines say what crosses."""
    found = told(*words)
    assert (found["nodes"], found["ranks_per_node"]) == sizes
    assert found["axes"] == axes
    assert all(f"# {axis}  {where}" in found["script"] for axis, where in axes.items())


def test_own_script_is_passed_as_it_is() -> None:
    """Words with spaces, quotes and dollars reach the script, and no shell reads them."""
    script = launched("--slurm", "--script", "train.py 'a b' '$(touch x)' \"it's\"")
    assert command(script)[-4:] == ["train.py", "a b", "$(touch x)", "it's"]
    assert "'$(touch x)'" in script


# -- engines ---------------------------------------------------------------------------------------


def test_batch_script_trains(tmp_path: Path) -> None:
    """Under stand-ins for `scontrol` and `srun`, which run on this machine, two steps are made."""
    script = launched(
        *("--slurm", "--cpu", "--mesh", "dp=2,tp=1", "--name", "Two ranks!", "--time", "1:02:03"),
        *("--script", TRAINS),
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
    here = {
        "PATH": path,
        "PYTHONPATH": PYTHONPATH,
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[0-1]",
    }
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ran = subprocess.run(
        ["bash"],
        input=script.replace(":29500", f":{port}"),
        env=os.environ | here,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "dp=2, tp=1 (2 ranks) · 2 steps" in ran.stdout


def test_kubernetes_reads_its_documents() -> None:
    """A Service and an indexed Job of as many pods as nodes, valid by Kubernetes' own schema."""
    yaml = pytest.importorskip("yaml")
    text = launched("--k8s", "--image", "me/it:1", "--nodes", "2", "--time", "0:10:00")
    service, job = yaml.safe_load_all(text)
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    spec = job["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (2, 2, "Indexed")
    assert spec["activeDeadlineSeconds"] == 600
    pod = spec["template"]
    assert service["spec"]["selector"] == pod["metadata"]["labels"]
    (ranks,) = pod["spec"]["containers"]
    assert ranks["resources"]["limits"] == {"nvidia.com/gpu": 8}
    given = get_args_parser().parse_args(ranks["command"][1:])
    host = f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]
    assert given.rdzv_endpoint == f"{host}:29500"
    validate = pytest.importorskip("kubernetes_validate").validate
    for document in (service, job):
        validate(document, "1.29", strict=True)
    spec["completions"] = "two"
    with pytest.raises(Exception, match="two"):
        validate(job, "1.29", strict=True)


def test_ray_driver_is_python() -> None:
    """It parses, asks for one bundle a node, and fills in the head's address only."""
    text = launched("--ray", "--nodes", "2", "--script", "train.py HEADS")
    tree = ast.parse(text)
    values = {
        one.targets[0].id: ast.literal_eval(one.value)
        for one in tree.body
        if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name)
        if one.targets[0].id in ("BUNDLE", "COMMAND", "ENVIRONMENT")
    }
    assert values["BUNDLE"] == {"CPU": 1, "GPU": 8}
    assert values["COMMAND"].count("HEAD") == 1
    assert values["COMMAND"][-2:] == ["train.py", "HEADS"]
    assert "placement_group([BUNDLE] * 2" in text


@pytest.mark.deep
def test_ray_driver_trains(tmp_path: Path) -> None:
    """On a Ray of this machine alone: one node, two ranks."""
    pytest.importorskip("ray")
    text = launched(*("--ray", "--cpu", "--mesh", "dp=2,tp=1"), *("--script", TRAINS))
    driver = tmp_path / "driver.py"
    driver.write_text(text)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    ran = subprocess.run(
        [sys.executable, str(driver)],
        env=os.environ | {"PATH": path, "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "2 steps" in ran.stdout + ran.stderr


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
    """Exit 2 and one message, before anything is printed: also what the plan refuses."""
    found = invoked(*words)
    assert found.exit_code == 2
    assert found.stdout == ""
    assert said in found.stderr


def test_records_are_asked_for_on_every_rank() -> None:
    """`--record` sets the variable by which ranks write what `doctor` reads, under each engine; its
    words stay one."""
    folder = "/shared/my records"
    command = shlex.split(launched("--nodes", "2", "--record", folder), comments=True)
    fresh = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"  # each round has a store of its own
    assert command[:4] == ["env", f"SCHEDLANG_RECORD={folder}", fresh, "torchrun"]
    assert f"export SCHEDLANG_RECORD='{folder}'" in launched("--slurm", "--record", folder)
    assert repr({"SCHEDLANG_RECORD": folder})[1:-1] in launched("--ray", "--record", folder)
    k8s = launched("--k8s", "--image", "x:1", "--record", folder)
    assert f'"value": "{folder}"' in k8s and "SCHEDLANG_RECORD" not in launched("--slurm")


@pytest.mark.parametrize(("ranks", "code"), [("2", 0), ("4", 2)])
def test_nodes_of_unlike_numbers_of_ranks_have_no_one_script(
    folder: Path, ranks: str, code: int
) -> None:
    """Nodes of as many ranks have, whatever their devices."""
    text = TEXT.replace("mesh(dp=_, tp=tp)", 'mesh(dp=2, tp=tp) on "mixed.toml"')
    (folder / "mixed.sched").write_text(text)
    each = (("a100", "2"), ("v100", ranks))
    nodes = "".join(f'[[node]]\ndevice = "{one}"\nranks = {many}\n' for one, many in each)
    (folder / "mixed.toml").write_text(nodes)
    ran = CliRunner().invoke(app, ["launch", "mixed.sched", "--model", MODEL])
    assert ran.exit_code == code, ran.output
    assert code == 0 or "2 a100 of 80 GiB, 4 v100 of 32 GiB" in ran.output
