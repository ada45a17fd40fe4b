"""Random user models under the other rows: `python -m tests.properties.user_rows N SEED`.

`user_models.py` draws shards, stages and slices; this file adds kernels, fused regions, casts,
frozen and tied parameters, plans of recomputation, and rows of memory.  The judge is a plain torch
loop.  It also compares evaluations, by the program and by a call of its module, with and without
gradients and in inference mode, on batches of other sizes, and a step after them; on one rank also
with dropout, by the same seeds of torch.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import Source
from schedlang.ir.plan import Plan
from schedlang.language.syntax import parse
from schedlang.passes.analyze.prepare import Prepared
from schedlang.passes.elaborate.state import Settings
from schedlang.passes.lower.build import build
from schedlang.passes.prove import Case
from schedlang.passes.verify.probe import check_parts
from schedlang.passes.verify.proof_case import prepare_case
from schedlang.runtime.lazy_logits.stand_in import to_full
from schedlang.runtime.parameter_changes import Freeze, Tie
from schedlang.schedule import Schedule
from tests.drawn import judge, rows
from tests.drawn.judge import BROKEN, FAILED, PASSED, REFUSED
from tests.drawn.models import Subject
from tests.engine import Threads
from tests.properties import user_models
from tests.properties.user_blocks import Gated, Heads, Packed
from tests.properties.user_models import Batch, Drawn, Seen, TrainingRecipe, differences, recipe_of

STEPS = 4  # the last one after evaluations
MESHES = ("", "", "", "", "dp=2", "tp=2", "pp=2", "cp=2", "dp=2 tp=2", "dp=2 pp=2", "pp=2 tp=2")
PLANS = ("rotor", "pareto", "dtr", "pofo, bandwidth=25GiB")
CHECKPOINTS = ("", "save=[linear]", "save=[linear, attention]", "every=2", "group=2", "group=sqrt")
CASTS = ("bf16", "bf16, params=true", "fp16, scale=1024", "fp16, params=true")
MODES: Mapping[str, Any] = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "recorded": contextlib.nullcontext,
}


class OtherRows(rows.Drawing):
    """Draws rows that the other generators seldom or never draw."""

    def others(self) -> None:
        """Add one to three kinds of rows."""
        kinds = (self.norms, self.fused, self.gated, self.sums, self.losses, self.attentions)
        kinds += (self.biases, self.trained, self.casts, self.kept, self.kept, self.stored)
        for _ in range(self.rng.choice([1, 1, 2, 2, 3])):
            self.rng.choice(kinds)()

    def _named_class(self, *classes: type[nn.Module]) -> str | None:
        modules = self.facts.model.named_modules()
        matches = [fqn for fqn, module in modules if fqn and isinstance(module, classes)]
        return self.rng.choice(matches) if matches else None

    def _add_at(self, fqn: str | None, verb: str) -> None:
        if fqn is not None:
            self.add(f"{fqn}  {verb}")

    def norms(self) -> None:
        """Replace a norm."""
        fqn = self._named_class(nn.RMSNorm, nn.LayerNorm)
        kind = type(self.facts.model.get_submodule(fqn or ""))
        self._add_at(fqn, f"replace_kernel({'rms' if kind is nn.RMSNorm else 'layer'}_norm)")

    def fused(self) -> None:
        """Generate a kernel of a norm or an activation."""
        fqn = self._named_class(nn.RMSNorm, nn.LayerNorm, nn.GELU, nn.Tanh, nn.ReLU)
        self._add_at(fqn, f"fuse(backend=rowwise{self.rng.choice(['', ', rounding=eager'])})")

    def gated(self) -> None:
        """Replace the gate of an MLP."""
        self._add_at(self._named_class(Gated), "replace_kernel(gated)")

    def sums(self) -> None:
        """Join sums with norms."""
        outer = [fqn for fqn in self.sites if fqn.count(".") <= 2]
        self._add_at(self.rng.choice(outer), "replace_kernel(add_norm)")

    def losses(self) -> None:
        """Compute head and loss together."""
        self.add(f"head  replace_kernel({self.rng.choice(['', 'linear_'])}cross_entropy)")

    def attentions(self) -> None:
        """Replace an attention."""
        fqn = self._named_class(Heads, Packed, nn.MultiheadAttention)
        self._add_at(fqn, "replace_kernel(flex_attention)")

    def biases(self) -> None:
        """Separate a bias, or the backward of a projection."""
        verb = self.rng.choice(["decompose(bias)", "split_backward()"])
        self._add_at(self._named_class(nn.Linear), verb)

    def trained(self) -> None:
        """Freeze parameters, or tie blocks."""
        if self.trunks() and self.often(0.4):
            self.add(f"{self.rng.choice(self.trunks())}.*  tie()")
        else:
            names = self.rng.choice(["", '"*bias"', '"*weight"'])
            self.add(f"{self.somewhere()}  freeze({names})")

    def casts(self) -> None:
        """Compute in fewer bits: in float64 nothing changes."""
        cast = f"cast({self.rng.choice(CASTS)})"
        self.add(cast if self.often(0.5) else f"{self.somewhere()}  {cast}")

    def kept(self) -> None:
        """Recompute, as told or by a plan."""
        options = (*CHECKPOINTS, *(f"plan={plan}, memory=20KiB" for plan in PLANS))
        self.add(f"{self.somewhere()}  checkpoint({self.rng.choice(options)})")

    def stored(self) -> None:
        """Store state or activations off the device."""
        what = self.rng.choice(["parameters", "gradients", "optimizer", "activations"])
        streams = what in ("activations", "parameters")
        option = self.rng.choice(["", ", to=disk", ", prefetch=0"]) if streams else ""
        anywhere = what != "activations" and self.often(0.6)
        self.add(f"{'' if anywhere else self.somewhere() + '  '}offload({what}{option})")


def other_text(drawn: Drawn) -> str:
    """Return the text of a schedule with other rows for a drawn model."""
    rng = Random(f"other rows {drawn.name}")
    axes = tuple((axis.split("=")[0], int(axis[-1])) for axis in rng.choice(MESHES).split())
    kinds = ("parts", "data", "stages", "others")
    return rows.text(drawn.name, rng, axes, kinds, OtherRows)


# -- the plain loop --------------------------------------------------------------------------------


def changed_model(model: nn.Module, plan: Plan) -> nn.Module:
    """Change a model as a user would, for the rows of a plan that freeze or tie parameters."""
    for change in plan.model.changes:
        if isinstance(change, Freeze):
            for parameter in [model.get_parameter(name) for name in change.names]:
                parameter.requires_grad_(False)
        else:
            assert isinstance(change, Tie), change
            for first, *others in change.groups:
                for name in others:
                    owner, _, local = name.rpartition(".")
                    setattr(model.get_submodule(owner), local, model.get_parameter(first))
    return model


def other_batches(batch: Batch) -> dict[str, Batch]:
    """Return batches with other numbers of rows and tokens."""
    return {
        "few": {name: value[:4] for name, value in batch.items()},
        "short": {name: value[:, :4].contiguous() for name, value in batch.items()},
        "many": {name: torch.cat([value, value.flip(0)[:3]]) for name, value in batch.items()},
    }


def scores_of(output: Any) -> Tensor | None:
    """Return the full scores in an output of any form; None if it has none."""
    output = to_full(output)
    scores: Tensor | None = to_full(user_models._scores_of(output))
    return None if scores is None else scores.detach().clone()


def train_plainly(
    subject: Subject, recipe: TrainingRecipe, batches: Sequence[Batch], plan: Plan, seeded: bool
) -> Seen:
    """Train in a plain loop, with evaluations before the last step."""
    model = changed_model(subject.model().double().train(), plan)
    optimizer = recipe.optimizer([(n, p) for n, p in model.named_parameters() if p.requires_grad])
    scheduler = recipe.scheduler(optimizer) if recipe.scheduled else None
    results: Seen = {}
    for step, batch in enumerate(batches):
        if step == STEPS - 1:
            model.eval()
            with torch.no_grad():
                for name, other in other_batches(batches[0]).items():
                    results[f"eval {name}"] = scores_of(model(**other))  # type: ignore[assignment]
            model.train()
        if seeded:
            torch.manual_seed(step)
        output = model(**batch)
        loss = subject.loss(output, batch) if subject.loss else user_models.loss_of(output)
        results |= user_models.step_plainly(step, model, loss, optimizer, recipe.clip)
        if scheduler is not None:
            scheduler.step()
    return results | {f"state {name}": value for name, value in model.state_dict().items()}


# -- the program -----------------------------------------------------------------------------------


def evaluate(program: Any, batches: Mapping[str, Batch]) -> Seen:
    """Return scores by the program and by its module; batches or calls that are refused have none.

    The names say by what: `eval` (the program), or a mode of torch (its module).
    """
    results: dict[str, Tensor | None] = {}
    for name, batch in batches.items():
        with contextlib.suppress(Refusal):
            results[f"eval {name}"] = scores_of(program.eval_step(batch))
        for mode, entered in MODES.items():
            with contextlib.suppress(Refusal), entered():
                module = program.module.eval()
                results[f"{mode} {name}"] = scores_of(module(**batch))
                module.train()
    return {name: scores for name, scores in results.items() if scores is not None}


def train_on_rank(
    plan: Plan,
    batches: Sequence[Batch],
    recipe: TrainingRecipe,
    loss: tuple[Any, Any],
    prepared: Prepared | None,
    seeded: bool,
) -> Seen:
    """Train the program on this rank; returns the same values as the plain loop."""
    options = {"optimizer": recipe.optimizer, "clip": recipe.clip, "prepared": prepared}
    program = build(plan, batches[0], loss=loss[0], weight=loss[1], **options)
    scheduler = recipe.scheduler(program.optimizer) if recipe.scheduled else None
    results: Seen = {}
    for step, batch in enumerate(batches):
        if step == STEPS - 1:
            results |= evaluate(program, other_batches(batches[0]))
        if seeded:
            torch.manual_seed(step)
        results |= user_models.step_program(step, program, batch)
        if scheduler is not None:
            scheduler.step()
    return results | {f"state {name}": value for name, value in program.state_dict().items()}


def compare(drawn: Drawn, text: str, ranks: Any, rate: float = 0.0) -> tuple[str, str]:
    """Compare with the plain loop; returns kind and reason.  With dropout only on one rank."""
    subject, recipe = drawn.subject(rate), recipe_of(drawn)
    batches = [user_models._to_float64(subject.batch(step % 3)) for step in range(STEPS)]
    try:
        model = subject.model().double()
        plan = Schedule(model, parse(Source("user.sched", text)), Settings()).plan()
        if plan.gives_up - {"rounding", "dtype", "updates", "model"}:
            return PASSED, "relaxed"
        if rate and (plan.mesh.world > 1 or plan.micro > 1):
            return PASSED, "draws differ"
        case = check_parts(
            prepare_case(Case(plan, tuple(batches[:3]), subject.loss, subject.weight))
        )
        if case.by_parts:
            return PASSED, "relaxed"
        args = (case.plan, batches, recipe, (subject.loss, subject.weight), case.prepared)
        by_rank = ranks.run(train_on_rank, plan.mesh.world, *args, bool(rate), timeout=judge.LIMIT)
    except Exception as error:
        return judge._error_outcome(error)
    expected = train_plainly(subject, recipe, copy.deepcopy(batches), plan, bool(rate))
    for rank, results in enumerate(by_rank):
        evaluated = {
            name: expected[f"eval {name.split()[1]}"]
            for name in results
            if name.split()[0] in MODES
        }
        wanted = {
            name: value
            for name, value in expected.items()
            if value is not None and (name in results or not name.startswith("eval"))
        }
        if different := differences(wanted | evaluated, results, recipe.clip):
            return FAILED, f"rank {rank}, rate {rate}: {len(different)}: {different[:6]}"
    return PASSED, ""


def outcome(drawn: Drawn, ranks: Any) -> tuple[str, str, str]:
    """Return kind and reason without dropout and, on one rank, with it; and the text."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text, _ = user_models.legal_text(drawn, other_text(drawn))
        kind, reason = compare(drawn, text, ranks)
        if (kind, reason) == (PASSED, ""):
            kind, reason = compare(drawn, text, ranks, 0.2)
            # a rate of 0 shows nothing of batches that rows split by draws
            kind = PASSED if kind == REFUSED else kind
    return kind, reason, text


def main() -> None:
    """Hunt for failures over many numbers."""
    parser = argparse.ArgumentParser(prog="tests.properties.user_rows", description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=50)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    with Threads() as ranks:
        for number in range(options.first, options.first + options.count):
            drawn, start = Drawn(number, options.seed), time.perf_counter()
            try:
                kind, reason, text = outcome(drawn, ranks)
            except Exception as error:
                kind, reason, text = BROKEN, "".join(traceback.format_exception(error)), ""
            counts[kind] += 1
            seconds = time.perf_counter() - start
            print(f"{drawn.name} {seconds:.1f} s {kind} {reason.strip()[-150:]}", flush=True)
            if kind not in (PASSED, REFUSED):
                print(f"{text}\n{reason}", flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main()
