"""tune: settings of a schedule, or meshes for a model, ranked by the time of a step."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from schedlang.diagnostics.tables import terminal_columns, wrap_lines
from schedlang.verbs import operator_layouts
from schedlang.verbs.exits import FAILS, bad_option, check_positive, show_json
from schedlang.verbs.inputs import parse_settings, use_one_thread
from schedlang.verbs.model_search import Aims, Search, batch_of, search_model
from schedlang.verbs.operator_layouts import FLEXFLOW, UNITY
from schedlang.verbs.options import AsJson, Knobs, Model, verb

if TYPE_CHECKING:
    from schedlang.ir.limits import Limits
    from schedlang.language.nodes import File
    from schedlang.passes.autoshard.knob_tuning import PricedPlan
    from schedlang.passes.elaborate.state import Settings
    from schedlang.passes.simulate.machine import Cluster

PYTHON = ".py"


@dataclass(frozen=True)
class Machine:
    """The ranks and their speeds; an option left out is taken from the named cluster."""

    gpus: Annotated[
        int | None,
        typer.Option("--gpus", metavar="N", help="Number of ranks; default: the schedule's `on`."),
    ] = None
    on: Annotated[
        str | None,
        typer.Option(
            "--on",
            metavar="NAME",
            help="v100, a100, h100, h200, b200, mi300x or a file; default: the schedule's `on`.",
        ),
    ] = None
    memory: Annotated[
        str | None, typer.Option("--memory", metavar="80GiB", help="Memory of a rank.")
    ] = None
    tflops: Annotated[
        float | None, typer.Option("--tflops", help="TFLOP/s of a rank with 16-bit numbers.")
    ] = None
    bandwidth: Annotated[
        float | None, typer.Option("--bandwidth", help="GB/s of a rank to ranks of its node.")
    ] = None
    network: Annotated[
        float | None, typer.Option("--network", help="GB/s of a rank to ranks of other nodes.")
    ] = None
    node: Annotated[int | None, typer.Option("--node", help="Ranks in a node.")] = None


@dataclass(frozen=True)
class TuningOptions:
    """The values of knobs to try, and the number of results to show."""

    values: Annotated[
        list[str] | None,
        typer.Option(
            "--try", metavar="NAME=V,V,..", help="Values of a knob to try; may be repeated."
        ),
    ] = None
    top: Annotated[int, typer.Option("--top", help="Number of rows of the table.")] = 10
    layouts: Annotated[
        bool,
        typer.Option(
            "--layouts", help="Choose a split for each operator; rows of a schedule stay."
        ),
    ] = False


@verb
def tune(
    file: Annotated[
        Path, typer.Argument(help="A schedule with knobs, or a model file.", metavar="FILE")
    ],
    *,
    machine: Machine,
    search: Search,
    aims: Aims,
    wanted: TuningOptions,
    model: Model = None,
    knob: Knobs = None,
    as_json: AsJson = False,
) -> None:
    """Find the fastest schedule for a model, or rank the settings of a schedule's knobs.

    `schedlang tune model.py --gpus 64 --on h100 --batch 4M -o best.sched`

    For a model file (`model.py`) it searches all layouts on the ranks.  It writes the best one with
    its predicted time and memory, and lists what was rejected.  If the schedule has lines of
    `search`, they constrain this search.  For any other schedule it predicts the time of each
    setting of the knobs.  Settings that need more than `--memory` are left out.  Exit 1 if nothing
    fits.
    """
    use_one_thread()  # before numpy is imported
    from schedlang.ir.limits import Limits
    from schedlang.ir.primitive import load_all
    from schedlang.language.syntax import parse, read
    from schedlang.passes.elaborate.expand import expand
    from schedlang.passes.planner.paper_planners import describe_planners

    load_all()
    if search.planner == "list":
        print(wrap_lines(describe_planners(), terminal_columns()))
        return
    settings = parse_settings(knob, None)
    if wanted.layouts or search.planner == UNITY:
        if aims.is_given:
            bad_option("`--layouts` looks for the quickest step alone", "leave out `--aim`")
        _search_layouts(file, model, machine, search, settings, as_json)
        return
    if file.suffix == PYTHON:
        if settings.knobs or _parse_values(wanted):
            bad_option(
                "a model file has no knobs", "leave out `--knob` and `--try`, or give a schedule"
            )
        _search_model(file, str(file), machine, None, search, aims, as_json)
        return
    tree = parse(read(file))
    limits = expand(tree, None, settings).limits
    if limits != Limits():
        _search_model(file, model, machine, tree, search, aims, as_json, limits)
        return
    if search.is_given or aims.is_given:
        bad_option(
            "a schedule without `search` says how it trains: only its knobs are tried",
            "give the model file alone, or let the schedule say `search pin tp = 4`",
        )
    _rank_settings(file, tree, machine, wanted, model, knob or (), as_json)


def _search_layouts(
    file: Path,
    model: str | None,
    machine: Machine,
    search: Search,
    settings: Settings,
    as_json: bool,
) -> None:
    """Complete a schedule, or start without one: every operator gets a layout."""
    from schedlang.ir.model import ModelFacts
    from schedlang.ir.modelfile import load_model_file
    from schedlang.language.syntax import parse, read
    from schedlang.passes.elaborate.expand import expand

    layout_options = Search(out=search.out, planner=search.planner, dtype=search.dtype)
    if layout_options != search or search.planner not in (None, UNITY, FLEXFLOW):
        helps = f"`--gpus`, `--on`, `--dtype`, `-o`, `--planner {UNITY}` or `{FLEXFLOW}`"
        bad_option("`--layouts` takes none of the options of a search but `--dtype`", helps)
    if file.suffix == PYTHON:
        base, tree, model = None, None, str(file)
    else:
        if search.dtype != Search().dtype:
            bad_option("a schedule says its dtype itself", "leave out `--dtype`")
        source = read(file)
        tree = parse(source)
    cluster, ranks = _find_cluster(machine, tree)
    model_file = load_model_file(model, file)
    if tree is not None:
        plan = expand(tree, ModelFacts(model_file.model(meta=True)), settings).plan
        assert plan is not None
        base = operator_layouts.BaseSchedule(source, plan)
        ranks = plan.mesh.world
    operator_layouts.search_layouts(
        model_file, model or "model.py", cluster, ranks, base, search, as_json
    )


def _search_model(
    file: Path,
    model: str | None,
    machine: Machine,
    tree: File | None,
    search: Search,
    aims: Aims,
    as_json: bool,
    limits: Limits | None = None,
) -> None:
    from schedlang.ir.limits import Limits
    from schedlang.ir.modelfile import load_model_file

    cluster, ranks = _find_cluster(machine, tree)
    model_file = load_model_file(model, file)
    bound = limits or Limits()
    search_model(model_file, model or "model.py", cluster, ranks, bound, search, aims, as_json)


def _rank_settings(
    file: Path,
    tree: File,
    machine: Machine,
    options: TuningOptions,
    model: str | None,
    knob: Sequence[str],
    as_json: bool,
) -> None:
    """Price every setting of the knobs, and print the fastest that fit first."""
    from schedlang.ir.model import ModelFacts
    from schedlang.ir.modelfile import load_model_file
    from schedlang.passes.autoshard.knob_tuning import (
        Job,
        format_tuning,
        price_settings,
        rank_fitting,
        settings_of,
        to_json,
    )

    start = time.perf_counter()
    cluster, ranks = _find_cluster(machine, tree)
    fixed = parse_settings(knob, None).knobs
    candidates = settings_of(tree, fixed, _parse_values(options))
    source = load_model_file(model, file)
    job = Job(
        ModelFacts(source.model(meta=True)),
        batch_of(source),
        source.loss,
        source.weight,
        cluster,
        ranks,
    )
    priced = []
    for number, plan in enumerate(
        price_settings(job, tree, [{**fixed, **each} for each in candidates]), 1
    ):
        priced.append(plan)
        if not as_json and sys.stderr.isatty():
            print(f"\r{number} of {len(candidates)}", end="", file=sys.stderr, flush=True)
    best = rank_fitting(priced, cluster.memory)
    if as_json:
        show_json(to_json(job, priced))
    else:
        print(format_tuning(job, priced, options.top, f"{file.name} · ", terminal_columns()))
        if best:  # in one line, however long, to be pasted
            print(f"next: {_next_command(file, best[0], model)}")
        print(f"tried in {time.perf_counter() - start:.1f} s", file=sys.stderr)
    if not best:
        raise typer.Exit(FAILS)


# -- options ---------------------------------------------------------------------------------------


def _find_cluster(machine: Machine, tree: File | None) -> tuple[Cluster, int]:
    """Return the cluster and its ranks, from options and the schedule's `on`; refuses S109."""
    from schedlang.language.nodes import Mesh
    from schedlang.passes.simulate.machine import CLUSTERS, cluster_named, cluster_of, with_figures
    from schedlang.passes.simulate.node_cluster import Nodes

    declared = (None, None) if tree is None else cluster_of(tree)
    cluster, counted = declared if machine.on is None else cluster_named(machine.on)
    ranks = machine.gpus or counted or declared[1]
    if cluster is None:
        meshes = [
            mesh for mesh in (tree.items if tree is not None else ()) if isinstance(mesh, Mesh)
        ]
        label = machine.on or next((mesh.on for mesh in meshes), None)
        title = f"unknown cluster `{label}`" if label else "the cluster is missing"
        bad_option(title, f"give one of {', '.join(CLUSTERS)}: `--on h100`")
    if ranks is None:
        bad_option("the number of ranks is missing", "give it: `--gpus 64`")
    for name in ("gpus", "tflops", "bandwidth", "network", "node"):
        check_positive(name, getattr(machine, name))
    extra = {
        "speed": _scaled(machine.tflops, 1e12),
        "link": _scaled(machine.bandwidth, 1e9),
        "network": _scaled(machine.network, 1e9),
        "node": machine.node,
        "memory": _parse_bytes(machine.memory),
    }
    if not isinstance(cluster, Nodes):
        return with_figures(cluster, **extra), ranks
    if any(value is not None for value in extra.values()):
        title = f"`{cluster.name}` has unlike nodes: no option says a figure of all"
        bad_option(title, "write it into their file: `--on cluster.toml`")
    if ranks > cluster.ranks:
        bad_option(
            f"`{cluster.name}` has {cluster.ranks} ranks, not {ranks}", f"--gpus {cluster.ranks}"
        )
    return cluster.first_nodes(ranks), ranks


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else value * unit


def _parse_bytes(text: str | None) -> int | None:
    from schedlang.language.value import Bytes, literal

    if text is None:
        return None
    try:
        value = literal(text.strip())
    except (ValueError, KeyError):
        value = None
    if not isinstance(value, Bytes) or value <= 0:
        bad_option(f"cannot read `--memory {text}`", "a number with its unit: `80GiB`, `512MiB`")
    return int(value)


def _parse_values(options: TuningOptions) -> dict[str, list[str]]:
    domains: dict[str, list[str]] = {}
    for text in options.values or ():
        name, _, values = (part.strip() for part in text.partition("="))
        listed = [value.strip() for value in values.split(",") if value.strip()]
        if not name or not listed:
            bad_option(f"cannot read `--try {text}`", "write `--try micro=4,8,16`")
        domains[name] = listed
    return domains


def _next_command(file: Path, best: PricedPlan, model: str | None) -> str:
    """Return the command that shows the first setting of the table."""
    from schedlang.ir.limits import format_value

    mesh = ",".join(f"{axis}={size}" for axis, size in best.mesh.items())
    options = [f"--knob {name}={format_value(value)}" for name, value in best.knobs.items()]
    options += [f"--mesh {mesh}"] + ([f"--model {model}"] if model else [])
    return f"schedlang plan {file} {' '.join(options)}"
