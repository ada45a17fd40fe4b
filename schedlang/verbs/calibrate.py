"""calibrate: a machine as it is measured, for verbs that time steps."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from schedlang.verbs.ending import bad_option, check_positive, show_json
from schedlang.verbs.inputs import check_folders, write_text
from schedlang.verbs.options import AsJson, verb

if TYPE_CHECKING:
    from schedlang.passes.simulate.machine import Cluster
    from schedlang.runtime.rates import Rate
    from schedlang.verbs.telling import Telling


@verb
def calibrate(
    *,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Machine file to write.")
    ] = None,
    ranks: Annotated[
        int, typer.Option("--ranks", metavar="N", help="Local ranks whose messages are measured.")
    ] = 2,
    like: Annotated[
        str | None,
        typer.Option("--like", metavar="NAME", help="Machine with what is not measured."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="float32 or bfloat16, in which models compute.")
    ] = None,
    longest: Annotated[
        float, typer.Option("--longest", metavar="SECONDS", help="Of the largest size measured.")
    ] = 0.1,
    as_json: AsJson = False,
) -> None:
    """Measure the machine at hand, for `--on FILE` of verbs that time steps.

    `schedlang calibrate -o mine.toml`

    Products of matrices, attention, sums in memory and starts of operators on this device; on a
    CPU collectives between local ranks too.  Links between accelerators are those of `--like`.
    """
    from schedlang.passes.simulate.calibrated import fitted, text
    from schedlang.runtime.device import on_host, own_device
    from schedlang.verbs.telling import Telling

    check_positive("longest", longest)
    check_folders(out=out)
    if ranks < 1:
        bad_option(f"`--ranks {ranks}` are too few", "give 2, or 1 to measure no messages")
    host = on_host(own_device())
    chosen = _dtype(dtype, host)
    base = _base(like, host, ranks)
    with Telling(as_json) as telling:
        rates, sent = _measured(longest, ranks if host else 1, telling)
    found = fitted(base, rates, sent, chosen, ranks)
    if out is not None:
        write_text(out, text(found))
    if as_json:
        samples = [asdict(one) for one in (*rates, *sent)]
        machine = asdict(found.cluster) | {"peaks": dict(found.cluster.peaks), "low": None}
        show_json({"machine": machine, "how": dict(found.how), "samples": samples})
    elif out is None:
        print(text(found), end="")
    else:
        print(f"{out}: {found.cluster.name}, read it with `--on {out}`")


def _dtype(asked: str | None, host: bool) -> str:
    from schedlang.passes.simulate.calibrated import WIDTHS

    if asked is not None and asked not in WIDTHS:
        bad_option(f"cannot measure in `{asked}`", f"give one of {', '.join(WIDTHS)}")
    return asked or ("float32" if host else "bfloat16")


def _base(like: str | None, host: bool, ranks: int) -> Cluster:
    """The machine whose fields stand where nothing is measured."""
    from schedlang.passes.simulate.machine import CLUSTERS, GIB, Cluster, cluster_named
    from schedlang.runtime.device import name_of, own_device, total_bytes

    known = cluster_named(like)[0] if like is not None else None
    known = known.slowest if known is not None else None  # of unlike nodes one machine
    if known is None and (like is not None or not host or ranks < 2):
        title = f"unknown machine `{like}`" if like else "links between ranks are not measured"
        bad_option(title, f"give one of {', '.join(CLUSTERS)}, or a file: `--like h100`")
    name = re.sub(r"\W+", "_", name_of(own_device()).lower()) or "host"
    held = total_bytes(own_device())
    if known is None:
        return Cluster(name, 1.0, 1.0, 1.0, 1.0, ranks, (held or GIB) // ranks)
    return replace(
        known, name=name, memory=held // (ranks if host else 1) if held else known.memory
    )


def _measured(longest: float, ranks: int, telling: Telling) -> tuple[list[Rate], list[Rate]]:
    """Rates of operators here, and of collectives on ranks that are started."""
    from schedlang.runtime.launch.pool import Pool
    from schedlang.runtime.rates import DTYPES, collectives, operators

    rates = []
    for one in operators(longest, tuple(DTYPES)):
        rates.append(one)
        telling(f"{one.what} in {one.dtype}")
    if ranks < 2:
        return rates, []
    telling(f"messages of {ranks} ranks")
    with Pool() as pool:
        return rates, pool.run(collectives, ranks, longest)[0]
