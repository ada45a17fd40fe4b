"""launch: print the script by which an engine (torchrun, Slurm, Kubernetes, Ray) starts a job."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from schedlang.diagnostics.job_refusals import FRESH_STORE
from schedlang.verbs.exits import bad_option, check_positive, show_json
from schedlang.verbs.options import AsJson, Common, verb

if TYPE_CHECKING:
    from schedlang.ir.mesh import Mesh

NODE = 8  # ranks of a node, without an option and without the mesh's `on`
PORT = 29500  # torchrun's own default
_RESTARTS = (3, 100)  # of a job, and of an elastic job
# of an elastic job: the store of all rounds is on none of its nodes; seconds until a silent node is
# given up, and in which further nodes may join
ELASTIC = "is_host=0,keep_alive_interval=2,keep_alive_max_attempt=3,last_call_timeout=10"
STORE = (
    "import time; from torch.distributed import TCPStore; "
    's = TCPStore("0.0.0.0", {port}, is_master=True, wait_for_workers=False); time.sleep(1e9)'
)
HEAD, SLURM_ID = f"$HEAD:{PORT}", "$SLURM_JOB_ID"  # variables of the shell


@dataclass(frozen=True)
class Engine:
    """The engine that the script is for; torchrun if none is named."""

    torchrun: Annotated[
        bool, typer.Option("--torchrun", help="Print the command to run on each node (default).")
    ] = False
    slurm: Annotated[bool, typer.Option("--slurm", help="Print a batch script for `sbatch`.")] = (
        False
    )
    k8s: Annotated[
        bool,
        typer.Option("--k8s", help="Print a Kubernetes Service and Job for `kubectl apply -f -`."),
    ] = False
    ray: Annotated[
        bool, typer.Option("--ray", help="Print a script for `ray job submit` or a Ray driver.")
    ] = False


@dataclass(frozen=True)
class Nodes:
    """The nodes of the job, and the engine's options for it."""

    nodes: Annotated[
        int | None,
        typer.Option(metavar="N", help="Number of nodes; default: as many as the mesh needs."),
    ] = None
    per_node: Annotated[
        int | None,
        typer.Option(metavar="N", help="Ranks of a node; default: from the mesh's `on`, else 8."),
    ] = None
    restarts: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Restarts after a rank has failed; default: 3, or 100 for an elastic job.",
        ),
    ] = None
    elastic: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Continue while this many nodes are left; for a script with an elastic `Trainer`.",
        ),
    ] = None
    time: Annotated[
        str | None, typer.Option(metavar="H:MM:SS", help="Time limit that the launcher enforces.")
    ] = None
    name: Annotated[
        str | None, typer.Option(help="Name of the job; default: the name of the file.")
    ] = None
    image: Annotated[
        str | None, typer.Option(metavar="IMAGE", help="Container image, for `--k8s`.")
    ] = None
    record: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder for the records that `doctor` reads; all nodes must share it.",
        ),
    ] = None
    cpu: Annotated[bool, typer.Option("--cpu", help="The nodes have no accelerators.")] = False
    script: Annotated[
        str | None,
        typer.Option(
            metavar="'train.py ARG..'",
            help="Your own script and its arguments; default: `schedlang run` with the file.",
        ),
    ] = None


@dataclass(frozen=True)
class Job:
    """A job to be started: `command` is what torchrun runs on each rank."""

    name: str
    command: tuple[str, ...]
    nodes: int
    per_node: int
    restarts: int
    seconds: int | None
    image: str | None
    cpu: bool
    record: str | None
    elastic: int | None  # the minimal number of nodes
    axis_spans: Mapping[str, str]  # axis -> the nodes that its groups span

    @property
    def notes(self) -> list[str]:
        """Comment lines about the axes."""
        ranks = f"{self.nodes * self.per_node} ranks, {self.per_node} a node"
        return [
            f"{self.name}: {ranks}",
            *(f"{axis}  {span}" for axis, span in self.axis_spans.items()),
        ]

    @property
    def store_variable(self) -> dict[str, str]:
        """The variable that gives restarted ranks a store of their own.

        In the store that torchrun 2.13 keeps, they would find the addresses of the ranks before and
        lose a restart; nodes count restarts separately, so that no name distinguishes the rounds.
        """
        fresh = self.elastic is not None or (self.nodes > 1 and self.restarts)
        return {FRESH_STORE: "1"} if fresh else {}

    def torchrun(self, *rendezvous: str) -> tuple[str, ...]:
        """Return the command of a node; `rendezvous` are the options of the rendezvous."""
        nodes = f"{self.nodes}" if self.elastic is None else f"{self.elastic}:{self.nodes}"
        counts = ("--nnodes", nodes, "--nproc-per-node", str(self.per_node))
        return (
            *("torchrun", *counts, "--max-restarts", str(self.restarts)),
            *("--rdzv-backend", "c10d", *rendezvous, *self.command),
        )


@verb
def launch(
    file: Annotated[Path, typer.Argument(help="A schedule.", metavar="FILE")],
    *,
    engine: Engine,
    nodes: Nodes,
    common: Common,
    as_json: AsJson = False,
) -> None:
    """Print the script that starts a job of this schedule under a launcher; nothing is
    submitted.

    First the schedule is planned for the ranks of the job, so errors appear here and not in the
    queue.  The ranks of a node are consecutive, so the last axes of the mesh are inside nodes.  A
    comment in the script gives the place of each axis.
    """
    engines = [option for option, is_set in vars(engine).items() if is_set]
    if len(engines) > 1:
        bad_option(
            f"a script is for one engine, not for {' and '.join(engines)}",
            "call `schedlang launch` once for each",
        )
    kind = engines[0] if engines else "torchrun"
    job = job_of(file, nodes, common)
    if job.elastic is not None and kind != "torchrun":
        bad_option(
            f"an elastic job is not written for {kind}, whose own rules end or replace its nodes",
            "print torchrun's command, and start it on each node that there is: `--torchrun`",
        )
    if kind == "k8s" and job.image is None:
        bad_option("a Kubernetes job needs a container image", "give it: `--image NAME:TAG`")
    script = SCRIPTS[kind](job)
    if as_json:
        sizes = {"nodes": job.nodes, "ranks_per_node": job.per_node}
        show_json(
            {"exit": 0, "engine": kind, **sizes, "axes": dict(job.axis_spans), "script": script}
        )
    else:
        print(script, end="")


# -- the job ---------------------------------------------------------------------------------------


def job_of(file: Path, request: Nodes, common: Common) -> Job:
    """Plan a schedule for the ranks of its job; refuses a mesh that does not fill the nodes."""
    for option in ("nodes", "per_node"):
        check_positive(option.replace("_", "-"), getattr(request, option))
    mesh, node = _plan_mesh(file, request, common)
    per_node = node if request.per_node else min(node, mesh.world)
    if mesh.world % per_node:
        bad_option(
            f"{mesh.world} ranks do not fill nodes of {per_node}",
            f"give ranks of a node that divide {mesh.world}: `--per-node N`",
        )
    if request.nodes is not None and request.nodes * per_node != mesh.world:
        node_text = f"{request.nodes} nodes of {per_node}"
        bad_option(
            f"the mesh has {mesh.world} ranks, {node_text} have {request.nodes * per_node}",
            f"give `--nodes {mesh.world // per_node}`, or other sizes: `--mesh AXIS=N`",
        )
    if request.elastic is not None:
        _check_elastic(request.elastic, mesh.world // per_node, request)
    spans = {
        f"{axis}={size}": _describe_span(mesh, axis, per_node)
        for axis, size in mesh.axes
        if size > 1
    }
    return Job(
        _job_name(request.name or file.stem),
        _rank_command(file, request, common),
        mesh.world // per_node,
        per_node,
        request.restarts
        if request.restarts is not None
        else _RESTARTS[request.elastic is not None],
        None if request.time is None else _parse_time(request.time),
        request.image,
        request.cpu,
        request.record,
        request.elastic,
        spans,
    )


def _check_elastic(min_nodes: int, nodes: int, request: Nodes) -> None:
    """Refuse a job that cannot continue with fewer nodes."""
    if min_nodes > nodes:
        title = f"a job of {nodes} nodes cannot go on while {min_nodes} are left"
        bad_option(title, f"give as many or fewer: `--elastic {nodes}`")
    if request.script is None:
        bad_option(
            "`schedlang run` begins anew, and an elastic job goes on",
            "give a script with `Trainer(..., elastic=True)`: `--script train.py`",
        )


def _plan_mesh(file: Path, request: Nodes, common: Common) -> tuple[Mesh, int]:
    """Return the mesh of the planned schedule, and the number of ranks of a node."""
    from schedlang.ir.modelfile import load_model_file
    from schedlang.language.syntax import parse, read
    from schedlang.passes.simulate.machine import cluster_of
    from schedlang.passes.simulate.node_cluster import Nodes as Unlike
    from schedlang.schedule import Schedule
    from schedlang.verbs.inputs import parse_settings

    settings, tree = parse_settings(common.knob, common.mesh), parse(read(file))
    cluster = cluster_of(tree)[0]
    node = request.per_node or (NODE if cluster is None else cluster.node)
    if isinstance(cluster, Unlike) and {kind.device.node for kind in cluster.nodes} != {node}:
        title = f"the nodes of `{cluster.name}` have {cluster.text()}: one script starts as many"
        bad_option(title, "start `torchrun` on each node with its own `--nproc-per-node`")
    if request.nodes is not None:
        settings = replace(settings, world=request.nodes * node)
    module = load_model_file(common.model, file).model(meta=True)
    return Schedule(module, tree, settings).plan().mesh, node


def _describe_span(mesh: Mesh, axis: str, per_node: int) -> str:
    """Say whether the groups of an axis are within nodes, or across how many."""
    spans = [{rank // per_node for rank in group} for group in mesh.groups(axis)]
    if all(len(span) == 1 for span in spans):
        return "within a node"
    return f"across {max(map(len, spans))} nodes"


def _rank_command(file: Path, request: Nodes, common: Common) -> tuple[str, ...]:
    if request.script is not None:
        try:
            command = tuple(shlex.split(request.script))
        except ValueError as error:
            bad_option(f"cannot read `--script`: {error}".lower(), "close the quotes")
        if not command:
            bad_option("`--script` is empty", "write `--script 'train.py --steps 100'`")
        return command
    options = [*(("--mesh", common.mesh) if common.mesh else ())]
    options += [argument for knob in common.knob or () for argument in ("--knob", knob)]
    options += ["--model", common.model] if common.model else []
    return ("-m", "schedlang", "run", str(file), *options)


def _job_name(text: str) -> str:
    """Return a name that every engine accepts: lower-case letters, digits and `-`, a letter
    first."""
    slug = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:50].strip("-")
    return slug if slug[:1].isalpha() else f"job-{slug}".strip("-")


def _parse_time(text: str) -> int:
    match = re.fullmatch(r"(\d{1,4}):([0-5]\d):([0-5]\d)", text)
    if match is None:
        bad_option(
            f"cannot read `--time {text}`", "write hours, minutes, seconds: `--time 8:00:00`"
        )
    hours, minutes, seconds = map(int, match.groups())
    return hours * 3600 + minutes * 60 + seconds


# -- scripts ---------------------------------------------------------------------------------------


def _torchrun(job: Job) -> str:
    """Return a command for each node; `HEAD` stands for the first node's name."""
    rendezvous: tuple[str, ...] = ("--rdzv-id", job.name, "--rdzv-endpoint", HEAD)
    lines = [*job.notes, "on each node, with HEAD the name of one of them:"]
    from schedlang.runtime.launch.rank_job import RECORD

    environment = {RECORD: job.record} if job.record else {}
    environment |= job.store_variable
    if job.elastic is not None:
        rendezvous = (*rendezvous, "--rdzv-conf", ELASTIC)
        store = shlex.join(("python", "-c", STORE.format(port=PORT)))
        lines = [*job.notes, "on HEAD, a machine that stays:", store, "on each node, HEAD or not:"]
    set_ = (
        ("env", *(f"{name}={value}" for name, value in environment.items())) if environment else ()
    )
    return _comment_lines(lines) + _quote_words((*set_, *job.torchrun(*rendezvous))) + "\n"


def _slurm(job: Job) -> str:
    """Return a batch script: one task per node, which is that node's torchrun."""
    options = [f"job-name={job.name}", f"nodes={job.nodes}", "ntasks-per-node=1", "exclusive"]
    options += [] if job.cpu else [f"gpus-per-node={job.per_node}"]
    options += [] if job.seconds is None else [f"time={_format_time(job.seconds)}"]
    options += [f"output={job.name}-%j.log", "open-mode=append"]
    options += ["requeue"] if job.restarts else ["no-requeue"]
    rendezvous = ("--rdzv-id", SLURM_ID, "--rdzv-endpoint", HEAD)
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH --{option}" for option in options),
            *(f"# {note}" for note in job.notes),
            "set -euo pipefail",
            # sed reads to the end: under `pipefail`, a reader that leaves early fails the line
            'HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)',
            *(f"export {name}={shlex.quote(value)}" for name, value in _environment(job).items()),
            # one node that fails ends the step on all, and the job with its exit code
            f"srun --kill-on-bad-exit=1 {_quote_words(job.torchrun(*rendezvous))}",
            "",
        ]
    )


def _k8s(job: Job) -> str:
    """Return a headless Service, by which pods find the first one, and a Job with a pod per
    node."""
    head = f"{job.name}-0.{job.name}:{PORT}"
    container: dict[str, object] = {
        "name": "ranks",
        "image": job.image,
        "command": list(job.torchrun("--rdzv-id", job.name, "--rdzv-endpoint", head)),
        "env": [{"name": n, "value": v} for n, v in _environment(job).items()],
        # ranks of a node share memory: more than the 64 MiB that a container has of itself
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
    }
    if not job.cpu:
        container["resources"] = {"limits": {"nvidia.com/gpu": job.per_node}}
    pod = {
        "subdomain": job.name,
        "restartPolicy": "Never",
        "containers": [container],
        "volumes": [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}],
    }
    spec: dict[str, object] = {
        "completions": job.nodes,
        "parallelism": job.nodes,
        "completionMode": "Indexed",
        "backoffLimit": job.restarts * job.nodes,
        "template": {"metadata": {"labels": {"app": job.name}}, "spec": pod},
    }
    if job.seconds is not None:
        spec["activeDeadlineSeconds"] = job.seconds
    service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"app": job.name}}
    documents = [
        _document("v1", "Service", job.name, service),
        _document("batch/v1", "Job", job.name, spec),
    ]
    # JSON is YAML, and needs no writer of it
    return _comment_lines(job.notes) + "---\n".join(
        json.dumps(document, indent=2) + "\n" for document in documents
    )


def _document(version: str, kind: str, name: str, spec: object) -> dict[str, object]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec}


def _ray(job: Job) -> str:
    """Return a driver script: one task per node, which is that node's torchrun."""
    bundle = {"CPU": 1} if job.cpu else {"CPU": 1, "GPU": job.per_node}
    # say which node has the store: torchrun may not recognise its machine by Ray's addresses
    rendezvous = ("--rdzv-id", job.name, "--rdzv-endpoint", "HEAD", "--rdzv-conf", "HOST")
    command = list(job.torchrun(*rendezvous))
    notes = "".join(f"# {note}\n" for note in job.notes)
    wait = "" if job.seconds is None else f", timeout={job.seconds}"
    return f"""{notes}import os
import subprocess

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

BUNDLE = {bundle!r}
COMMAND = {command!r}
ENVIRONMENT = {_environment(job)!r}


def address():
    return ray.util.get_node_ip_address()


def node(head, place):
    known = {{"HEAD": f"{{head}}:{PORT}", "HOST": f"is_host={{int(place == 0)}}"}}
    words = [known.get(word, word) for word in COMMAND]
    subprocess.run(words, check=True, env={{**os.environ, **ENVIRONMENT}})


ray.init()
group = placement_group([BUNDLE] * {job.nodes}, strategy="STRICT_SPREAD")
ray.get(group.ready())


def on(place, function, *given):
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place)
    options = {{"num_cpus": BUNDLE["CPU"], "num_gpus": BUNDLE.get("GPU", 0), "max_retries": 0}}
    return ray.remote(**options, scheduling_strategy=strategy)(function).remote(*given)


head = ray.get(on(0, address))
ray.get([on(place, node, head, place) for place in range({job.nodes})]{wait})
"""


SCRIPTS: Mapping[str, Callable[[Job], str]] = {
    "torchrun": _torchrun,
    "slurm": _slurm,
    "k8s": _k8s,
    "ray": _ray,
}


def _environment(job: Job) -> dict[str, str]:
    """Return the variables of ranks, besides those of torchrun."""
    variables = {"OMP_NUM_THREADS": "1"} if job.cpu else {}
    variables |= job.store_variable
    if job.record:
        from schedlang.runtime.launch.rank_job import RECORD

        variables[RECORD] = job.record
    # gloo of torch 2.13 starts an elastic job again only under this
    return variables | ({"TORCH_GLOO_LAZY_INIT": "1"} if job.restarts else {})


def _format_time(seconds: int) -> str:
    return f"{seconds // 3600}:{seconds % 3600 // 60:02}:{seconds % 60:02}"


def _comment_lines(notes: Sequence[str]) -> str:
    return "".join(f"# {note}\n" for note in notes)


def _quote_words(args: Sequence[str]) -> str:
    """Quote the words of a shell command, except our own variables."""
    return " ".join(f'"{arg}"' if arg in (HEAD, SLURM_ID) else shlex.quote(arg) for arg in args)
