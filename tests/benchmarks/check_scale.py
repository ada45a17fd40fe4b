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
    """Run the static checks once, and print time and memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1024, help="a multiple of 64")
    ranks = parser.parse_args().ranks
    import torch  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    from schedlang.passes.static_checks.static import static
    from schedlang.verbs.inputs import plan_schedule

    start, cpu_time = time.perf_counter(), time.process_time()
    with TemporaryDirectory() as folder:
        file = Path(folder) / "llama70b.sched"
        file.write_text(SCHEDULE % (ranks // 64))
        file.with_name("model.py").write_text(MODEL)
        inputs = plan_schedule(file, None, None, None)
        proven = static(inputs.plan, inputs.model.batch(0), inputs.model.loss)
    elapsed, cpu_time = time.perf_counter() - start, time.process_time() - cpu_time
    for claim in proven.claims:
        print(f"  {claim.name:<16} {claim.description}: {claim.verdict}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"\n{ranks} ranks, {len(inputs.plan.model.unique_parameters)} parameters")
    print(f"  proven in          {elapsed:.1f} s, {cpu_time:.1f} s of CPU time")
    print(f"  greatest memory    {peak:.2f} GiB")


if __name__ == "__main__":
    main()
