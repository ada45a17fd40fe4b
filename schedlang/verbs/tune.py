"""tune: settings of a schedule, or meshes for a model, ranked by the time of a step."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from schedlang.verbs.ending import FAILS, bad_option, check_positive, show_json
from schedlang.verbs.options import AsJson, Knobs, Model, verb
from schedlang.verbs.searched import Search

if TYPE_CHECKING:
    from schedlang.ir.modelfile import ModelFile
    from schedlang.language.nodes import File
    from schedlang.passes.autoshard.tune import Job, Tried
    from schedlang.passes.simulate.machine import Cluster

PYTHON = ".py"


@dataclass(frozen=True)
class Machine:
    """The ranks and their speeds; an option left out is taken from the cluster that is named."""

    gpus: Annotated[
        int | None,
        typer.Option("--gpus", metavar="N", help="Number of ranks; default: the schedule's `on`."),
    ] = None
    on: Annotated[
        str | None,
        typer.Option(
            "--on", metavar="NAME", help="v100, a100, h100 or h200; default: the schedule's `on`."
        ),
    ] = None
    memory: Annotated[
        str | None, typer.Option("--memory", metavar="80GiB", help="Memory of a rank.")
    ] = None
    tflops: Annotated[
        float | None, typer.Option("--tflops", help="TFLOP/s of a rank, in 16 bits.")
    ] = None
    bandwidth: Annotated[
        float | None, typer.Option("--bandwidth", help="GB/s of a rank to others in its node.")
    ] = None
    network: Annotated[
        float | None, typer.Option("--network", help="GB/s of a rank to other nodes.")
    ] = None
    node: Annotated[int | None, typer.Option("--node", help="Ranks in a node.")] = None


@dataclass(frozen=True)
class Wanted:
    """The values of knobs to try, and the number of results to show."""

    values: Annotated[
        list[str] | None,
        typer.Option("--try", metavar="NAME=V,V,..", help="Values of a knob; may be repeated."),
    ] = None
    top: Annotated[int, typer.Option("--top", help="Number of rows of the table.")] = 10


@verb
def tune(
    file: Annotated[
        Path, typer.Argument(help="A schedule with knobs, or a model file.", metavar="FILE")
    ],
    *,
    machine: Machine,
    search: Search,
    wanted: Wanted,
    model: Model = None,
    knob: Knobs = None,
    as_json: AsJson = False,
) -> None:
    """Rank settings of a schedule or a model by the time of a step.

    `schedlang tune my.sched --gpus 64 --on a100`

    Every setting of a schedule's knobs, or for a model file (`model.py`) every mesh of data,
    stages and tensors with the schedule that `init` writes for it.  Steps are simulated on the
    meta device and timed on a cluster by its data sheet; what needs more than `--memory` is left
    out.  Exit 1 where nothing fits.
    """
    from schedlang.diagnostics.tables import columns
    from schedlang.passes.autoshard.tune import ranked, text, to_json

    start = time.perf_counter()
    if file.suffix == PYTHON:
        _search(file, machine, search, wanted, knob or (), as_json)
        return
    if search.given:
        bad_option(
            "a schedule says how it trains: only its knobs are tried",
            "give the model file alone: `schedlang tune model.py --gpus 64 --on h100`",
        )
    asked = _asked(file, machine, wanted, model, knob or ())
    found = []
    for place, one in enumerate(asked.tried, 1):
        found.append(one)
        if not as_json and sys.stderr.isatty():
            print(f"\r{place} of {asked.count}", end="", file=sys.stderr, flush=True)
    best = ranked(found, asked.job.cluster.memory)
    if as_json:
        show_json(to_json(asked.job, found))
    else:
        print(text(asked.job, found, wanted.top, f"{file.name} · ", columns()))
        if best:  # in one line, however long: it is to be pasted
            print(f"next: {_next(file, best[0], model, knob or ())}")
        print(f"tried in {time.perf_counter() - start:.1f} s", file=sys.stderr)
    if not best:
        raise typer.Exit(FAILS)


def _search(
    file: Path, machine: Machine, search: Search, wanted: Wanted, knob: Sequence[str], as_json: bool
) -> None:
    """A schedule for a model file."""
    from schedlang.ir.modelfile import load_model_file
    from schedlang.ir.primitive import load_all
    from schedlang.verbs.searched import searched

    load_all()
    if knob or _values(wanted):
        bad_option(
            "a model file has no knobs", "leave out `--knob` and `--try`, or give a schedule"
        )
    cluster, ranks = _cluster(machine, None)
    searched(file, load_model_file(str(file)), cluster, ranks, search, as_json)


# -- what is asked ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Asked:
    job: Job
    tried: Iterable[Tried]
    count: int


def _asked(
    file: Path, machine: Machine, wanted: Wanted, model: str | None, knob: Sequence[str]
) -> _Asked:
    from schedlang.ir.model import ModelFacts
    from schedlang.ir.modelfile import load_model_file
    from schedlang.ir.primitive import load_all
    from schedlang.language.syntax import parse, read
    from schedlang.passes.autoshard.tune import Job, meshes, settings_of, tune, tune_meshes
    from schedlang.verbs.inputs import settings

    load_all()
    alone = file.suffix == PYTHON
    given = settings(knob, None).knobs
    tries = _values(wanted)
    tree = None if alone else parse(read(file))
    cluster, ranks = _cluster(machine, None if tree is None else _device(tree))
    if alone and (given or tries):
        bad_option(
            "a model file has no knobs", "leave out `--knob` and `--try`, or give a schedule"
        )
    menu = [] if tree is None else settings_of(tree, given, tries)
    found = load_model_file(str(file) if alone else model, file)
    job = Job(
        ModelFacts(found.model(meta=True)), _batch(found), found.loss, found.weight, cluster, ranks
    )
    if tree is None:
        sizes = list(meshes(ranks, cluster.node))
        return _Asked(job, tune_meshes(job, sizes), len(sizes))
    return _Asked(job, tune(job, tree, [{**given, **one} for one in menu]), len(menu))


def _batch(found: ModelFile) -> Mapping[str, Any]:
    if not found.has_batch:
        bad_option(
            f"`{found.name}` has no batch: a step has no cost without one",
            "define `batch(seed)` in it",
        )
    return found.batch(0)


def _device(tree: File) -> str | None:
    """Return the device that the mesh of the file names; None if it names none."""
    from schedlang.language import nodes

    found = [one.on for one in tree.items if isinstance(one, nodes.Mesh)]
    return found[0] if found else None


def _cluster(machine: Machine, device: str | None) -> tuple[Cluster, int]:
    """The cluster and its ranks, as options and the schedule's `on` have it (S109)."""
    from schedlang.passes.simulate.machine import CLUSTERS, changed, cluster_named

    known, told = cluster_named(machine.on or device)
    ranks = machine.gpus or told or cluster_named(device)[1]
    if known is None:
        said = machine.on or device
        title = f"unknown cluster `{said}`" if said else "the cluster is missing"
        bad_option(title, f"give one of {', '.join(CLUSTERS)}: `--on h100`")
    if ranks is None:
        bad_option("the number of ranks is missing", "give it: `--gpus 64`")
    for name in ("gpus", "tflops", "bandwidth", "network", "node"):
        check_positive(name, getattr(machine, name))
    return changed(
        known,
        speed=_times(machine.tflops, 1e12),
        link=_times(machine.bandwidth, 1e9),
        network=_times(machine.network, 1e9),
        node=machine.node,
        memory=_bytes(machine.memory),
    ), ranks


def _times(value: float | None, unit: float) -> float | None:
    return None if value is None else value * unit


def _bytes(text: str | None) -> int | None:
    from schedlang.language.value import Bytes, literal

    if text is None:
        return None
    try:
        value = literal(text.strip())
    except (ValueError, KeyError):
        value = None
    if not isinstance(value, Bytes) or value <= 0:
        bad_option(f"cannot read `--memory {text}`", "write `--memory 80GiB`")
    return int(value)


def _values(wanted: Wanted) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for text in wanted.values or ():
        name, _, values = (part.strip() for part in text.partition("="))
        listed = [value.strip() for value in values.split(",") if value.strip()]
        if not name or not listed:
            bad_option(f"cannot read `--try {text}`", "write `--try micro=4,8,16`")
        found[name] = listed
    return found


def _next(file: Path, best: Tried, model: str | None, knob: Sequence[str]) -> str:
    """The command that shows, or writes, the first of the table."""
    mesh = ",".join(f"{axis}={size}" for axis, size in best.mesh.items())
    if file.suffix == PYTHON:
        return f"schedlang init {file} --mesh {mesh} > my.sched"
    knobs = {**best.given}
    words = [f"--knob {name}={_word(value)}" for name, value in knobs.items()]
    words += [f"--mesh {mesh}"] + ([f"--model {model}"] if model else [])
    return f"schedlang plan {file} {' '.join(words)}"


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
