"""Static proofs at scale: python -m tests.benchmarks.check_scale [--ranks 1024]

Times `check --model` of the Llama-3-70B-shaped model and the schedule of `plan_scale`, apart from
imports, and prints the greatest memory of the process.
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.benchmarks.plan_scale import MODEL, SCHEDULE


def main() -> None:
    """Prove it once, and say what it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1024, help="a multiple of 64")
    ranks = parser.parse_args().ranks
    import torch  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    from schedlang.passes.static_checks.static import static
    from schedlang.verbs.inputs import plan_schedule

    start, spent = time.perf_counter(), time.process_time()
    with TemporaryDirectory() as folder:
        file = Path(folder) / "llama70b.sched"
        file.write_text(SCHEDULE % (ranks // 64))
        file.with_name("model.py").write_text(MODEL)
        found = plan_schedule(file, None, None, None)
        proven = static(found.plan, found.model.batch(0), found.model.loss)
    done, spent = time.perf_counter() - start, time.process_time() - spent
    for claim in proven.claims:
        print(f"  {claim.name:<16} {claim.description}: {claim.verdict}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"\n{ranks} ranks, {len(found.plan.model.unique_parameters)} parameters")
    print(f"  proven in          {done:.1f} s, {spent:.1f} s of CPU time")
    print(f"  greatest memory    {peak:.2f} GiB")


if __name__ == "__main__":
    main()
