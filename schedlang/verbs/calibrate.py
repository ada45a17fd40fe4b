"""calibrate: measure a machine, or fit one to timed runs, for verbs that time steps."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from schedlang.verbs.exits import bad_option, check_positive, show_json
from schedlang.verbs.inputs import check_folders, write_text
from schedlang.verbs.options import AsJson, verb

if TYPE_CHECKING:
    from schedlang.passes.simulate.calibration import FittedMachine
    from schedlang.passes.simulate.machine import Cluster
    from schedlang.runtime.device_rates import Rate
    from schedlang.verbs.progress import ProgressLine


@verb
def calibrate(
    model: Annotated[Path | None, typer.Argument(help="Model file of the timed `--runs`.")] = None,
    *,
    runs: Annotated[
        Path | None,
        typer.Option("--runs", metavar="FILE", help="Timed runs of the model, as CSV or JSON."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Machine file to write.")
    ] = None,
    ranks: Annotated[
        int,
        typer.Option(
            "--ranks", metavar="N", help="Number of local ranks for the measured collectives."
        ),
    ] = 2,
    like: Annotated[
        str | None,
        typer.Option(
            "--like",
            "--on",
            metavar="NAME",
            help="Machine that gives the figures that are not measured.",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="Dtype in which models compute: float32 or bfloat16."),
    ] = None,
    longest: Annotated[
        float,
        typer.Option(
            "--longest", metavar="SECONDS", help="Measure sizes up to one that takes this long."
        ),
    ] = 0.1,
    as_json: AsJson = False,
) -> None:
    """Write a machine file for `--on FILE`: measure this machine, or fit a machine to timed
    runs.

    `schedlang calibrate -o mine.toml`

    `schedlang calibrate model.py --runs runs.csv --like a100 -o mine.toml`

    Measured on this device: matrix products, attention, copies in memory and the start of an
    operator.  On a CPU also collectives between local ranks.  Links between accelerators are those
    of `--like`.  With `--runs` nothing is measured: the constants are fitted so that the predicted
    time of each run is its `step_s` in the table.
    """
    from schedlang.passes.simulate.calibration import fit_machine
    from schedlang.runtime.device import local_device, on_host
    from schedlang.verbs.progress import ProgressLine

    check_positive("longest", longest)
    check_folders(out=out)
    if (model is None) != (runs is None):
        bad_option("a model and its runs go together", "`schedlang calibrate model.py --runs FILE`")
    if model is not None and runs is not None:
        _fit_to_runs(model, runs, like, dtype, out, as_json)
        return
    if ranks < 1:
        bad_option(f"`--ranks {ranks}` are too few", "give 2, or 1 to measure no messages")
    host = on_host(local_device())
    chosen = _check_dtype(dtype, host)
    base = _base_machine(like, host, ranks)
    with ProgressLine(as_json) as telling:
        rates, sent = _measure_rates(longest, ranks if host else 1, telling)
    machine = fit_machine(base, rates, sent, chosen, ranks)
    samples = [asdict(sample) for sample in (*rates, *sent)]
    _write_machine(machine, out, as_json, {"samples": samples})


def _write_machine(
    fitted: FittedMachine, out: Path | None, as_json: bool, extra: dict[str, Any]
) -> None:
    """Write the machine, or print it."""
    from schedlang.passes.simulate.calibration import machine_toml

    if out is not None:
        write_text(out, machine_toml(fitted))
    if as_json:
        machine = asdict(fitted.cluster) | {"peaks": dict(fitted.cluster.peaks)}
        machine["low"] = None if math.isinf(fitted.cluster.low) else fitted.cluster.low
        show_json({"machine": machine, "how": dict(fitted.remarks), **extra})
    elif out is None:
        print(machine_toml(fitted), end="")
    else:
        print(f"{out}: {fitted.cluster.name}, read it with `--on {out}`")


def _fit_to_runs(
    model: Path, runs: Path, on: str | None, dtype: str | None, out: Path | None, as_json: bool
) -> None:
    """Fit a machine to a table of runs; report the errors, and the constants that the runs do not
    show."""
    from schedlang.ir.model import ModelFacts
    from schedlang.ir.modelfile import load_model_file
    from schedlang.ir.primitive import load_all
    from schedlang.passes.planner.measured_runs import chains_of, fitted_to_runs, read_runs
    from schedlang.passes.planner.profile import Profiles
    from schedlang.passes.simulate.calibration import FittedMachine
    from schedlang.passes.simulate.machine import CLUSTERS, cluster_named
    from schedlang.passes.simulate.node_cluster import Nodes
    from schedlang.verbs.model_search import batch_of

    base = cluster_named(on)[0] if on is not None else None
    if base is None:
        title = f"unknown machine `{on}`" if on else "the machine is missing"
        bad_option(title, f"give one of {', '.join(CLUSTERS)}, or a file: `--like a100`")
    if isinstance(base, Nodes):
        bad_option(f"`{on}` has unlike nodes, whose runs are not fitted", "give one kind of them")
    single = _check_dtype(dtype, host=False) == "float32"
    timed = read_runs(runs)
    load_all()
    file = load_model_file(str(model), model)
    facts = ModelFacts(file.model(meta=True))
    profiles = Profiles(facts, batch_of(file), file.loss, file.weight, "" if single else "bf16")
    chains = chains_of(runs, timed, profiles, base, profiles.recipe)
    fit = fitted_to_runs(timed, chains, base, profiles.recipe)
    error, cv_error = fit.error(fit.predicted), fit.error(fit.left_out)
    if not as_json:
        kept = f"; not told by them: {', '.join(fit.unfitted)}" if fit.unfitted else ""
        print(f"{len(timed)} runs, {error:.1%} off in the mean, each left out {cv_error:.1%}{kept}")
    rows = [
        {**asdict(run), "told": predicted, "alone": left_out}
        for run, predicted, left_out in zip(timed, fit.predicted, fit.left_out, strict=True)
    ]
    extra = {"mape": error, "left_out": cv_error, "not_told": fit.unfitted, "runs": rows}
    _write_machine(FittedMachine(fit.cluster, fit.remarks), out, as_json, extra)


def _check_dtype(dtype: str | None, host: bool) -> str:
    from schedlang.passes.simulate.calibration import DTYPE_BYTES

    if dtype is not None and dtype not in DTYPE_BYTES:
        bad_option(f"cannot measure in `{dtype}`", f"give one of {', '.join(DTYPE_BYTES)}")
    return dtype or ("float32" if host else "bfloat16")


def _base_machine(on: str | None, host: bool, ranks: int) -> Cluster:
    """Return the machine whose fields are used where nothing is measured."""
    from schedlang.passes.simulate.machine import CLUSTERS, GIB, Cluster, cluster_named
    from schedlang.runtime.device import device_name, local_device, total_bytes

    base = cluster_named(on)[0] if on is not None else None
    base = base.slowest if base is not None else None  # of different nodes, one machine
    if base is None and (on is not None or not host or ranks < 2):
        title = f"unknown machine `{on}`" if on else "links between ranks are not measured"
        bad_option(title, f"give one of {', '.join(CLUSTERS)}, or a file: `--like h100`")
    name = re.sub(r"\W+", "_", device_name(local_device()).lower()) or "host"
    memory = total_bytes(local_device())
    if base is None:
        return Cluster(name, 1.0, 1.0, 1.0, 1.0, ranks, (memory or GIB) // ranks)
    return replace(
        base, name=name, memory=memory // (ranks if host else 1) if memory else base.memory
    )


def _measure_rates(
    longest: float, ranks: int, telling: ProgressLine
) -> tuple[list[Rate], list[Rate]]:
    """Measure the rates of operators here, and of collectives on ranks started here."""
    from schedlang.runtime.device_rates import DTYPES, measure_collectives, measure_operators
    from schedlang.runtime.launch.pool import Pool

    rates = []
    for rate in measure_operators(longest, tuple(DTYPES)):
        rates.append(rate)
        telling(f"{rate.what} in {rate.dtype}")
    if ranks < 2:
        return rates, []
    telling(f"messages of {ranks} ranks")
    with Pool() as pool:
        return rates, pool.run(measure_collectives, ranks, longest)[0]
