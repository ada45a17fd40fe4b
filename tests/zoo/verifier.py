"""Mistakes of the verifier itself, each with a program by which it would be noticed.

A faithful verifier catches the program, one with the mistake lets it pass (or, V12, cries wolf).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from schedlang.passes import prove as proving
from schedlang.passes.verify import compare, proof_case, requirements
from schedlang.runtime import full_tensors, program
from schedlang.runtime.grad_reduction import gradient
from schedlang.runtime.launch.pool import Pool
from schedlang.runtime.rng import logical_dropout as drawing
from tests.zoo.bug import Patch, mutate
from tests.zoo.place import rank
from tests.zoo.pool import Mutated
from tests.zoo.scenes import case

Injected = str | Callable[[Patch], None] | None  # a bug of the zoo, a function, or a right program


@dataclass(frozen=True)
class Flaw:
    """A mistake of the verifier.

    bug, scene  a program that shows it: wrong, and caught by a verifier without the mistake
    twin        the scene that a verifier with the mistake would have used instead
    everywhere  the bug is in this process, too
    """

    id: str
    what: str
    credit: str
    flaw: Callable[[Patch], None]
    bug: Injected
    scene: str
    twin: str = ""
    everywhere: bool = False

    @property
    def cries_wolf(self) -> bool:
        """It does not let a wrong program pass: it fails a right one."""
        return self.bug is None

    def verdict(self, pool: Pool, flawed: bool) -> bool:
        """Whether the program passes, with a right verifier or a flawed one."""
        scene = self.twin if flawed and self.twin else self.scene
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(proving, "add_suspects", lambda report, *_: report)
            if self.everywhere:
                assert isinstance(self.bug, str)
                with mutate(self.bug):
                    return self._proof(patch, scene, pool, flawed)
            return self._proof(patch, scene, pool, flawed)

    def _proof(self, patch: Patch, scene: str, pool: Any, flawed: bool) -> bool:
        mutant = self.bug
        if flawed:
            self.flaw(patch)
            mutant = mutant or self.flaw
        ranks = pool if mutant is None else Mutated(pool, mutant)
        return proving.prove(case(scene), pool=ranks).ok


FLAWS: dict[str, Flaw] = {}


def flaw(
    name: str, credit: str, bug: Injected, scene: str, twin: str = "", everywhere: bool = False
) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Enter a mistake of the verifier; its docstring says which."""

    def enter(made: Callable[[Patch], None]) -> Callable[[Patch], None]:
        what = " ".join((made.__doc__ or "").split())
        FLAWS[name] = Flaw(name, what, credit, made, bug, scene, twin, everywhere)
        return made

    return enter


# -- programs that are wrong in what they report -------------------------------------------------


def _reported(patch: Patch, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    plain = full_tensors.full_gradients
    patch.setattr(full_tensors, "full_gradients", lambda *given: change(plain(*given)))


def _one(change: Callable[[Tensor], Tensor]) -> Callable[[Patch], None]:
    """One gradient, of those runs in which it is not frozen, is changed."""
    name = "embed.weight"

    def changed(found: dict[str, Tensor]) -> dict[str, Tensor]:
        return {n: change(g) if n == name else g for n, g in found.items()}

    return lambda patch: _reported(patch, changed)


def gradient_lost(patch: Patch) -> None:
    """One gradient is not there."""
    _reported(patch, lambda found: {n: g for n, g in found.items() if n != "embed.weight"})


def gradients_renamed(patch: Patch) -> None:
    """The gradients of two blocks stand in the right order under each other's names."""
    plain, swap = proof_case.ProgramSubject.gradients, str.maketrans("01", "10")
    patch.setattr(
        proof_case.ProgramSubject,
        "gradients",
        lambda self: {name.translate(swap): grad for name, grad in plain(self).items()},
    )


gradient_turned = _one(lambda grad: grad.flip(0))
gradient_not_a_number = _one(lambda grad: grad * torch.nan)


def spare_drifts(patch: Patch) -> None:
    """A replica of a parameter that nothing reads drifts away."""
    plain = program.Program.train_step

    def step(self: Any, batch: Any, **options: Any) -> Tensor:
        loss = plain(self, batch, **options)
        with torch.no_grad():
            self.assembly.parameters["blocks.1.spare"].mul_(1 + 0.1 * rank())
        return loss

    patch.setattr(program.Program, "train_step", step)


def divided_by_another_axis(patch: Patch) -> None:
    """A sum over `dp` is multiplied by its size and divided by that of `tp`."""
    plain = program.Program._clip_and_reduce

    def finish(self: Any, *args: Any) -> Tensor:
        mesh = self.assembly.ranks.mesh
        if {"dp", "tp"} <= set(mesh.sizes):
            gradient.scale_gradients(self.assembly.parameters, mesh.size("dp") / mesh.size("tp"))
        return plain(self, *args)

    patch.setattr(program.Program, "_clip_and_reduce", finish)


def _compare_by(patch: Patch, made: Any) -> None:
    """All of a proof that compares does it so."""
    for module in (compare, proving, requirements):
        patch.setattr(module, "compare", made)


# -- flaws ---------------------------------------------------------------------------------------


@flaw("V01", "atorch's copy of PyTorch's pipeline test", "T03", "gated")
def nothing_asserted(patch: Patch) -> None:
    """Differences are computed, and nobody looks at them."""
    plain = compare._difference
    patch.setattr(compare, "_difference", lambda *a: (plain(*a)[0], True, ""))
    _no_other_rows(patch)


def _no_other_rows(patch: Patch) -> None:
    """What else would catch the program passes, too."""
    plain = compare.compare
    _compare_by(patch, lambda *a, **k: tuple(replace(r, ok=True) for r in plain(*a, **k)))


@flaw("V02", "veScale's 1e2, transformers' 5e-3", "F06", "normed by kernel")
def tolerance_above_the_signal(patch: Patch) -> None:
    """The gate is 5e-3."""
    plain = compare.compare
    _compare_by(patch, lambda e, a, **k: plain(e, a, **{**k, "rtol": 5e-3}))


@flaw("V03", "transformers, autoparallel, veScale", gradient_lost, "gated")
def missing_gradients_skipped(patch: Patch) -> None:
    """A gradient that one side lacks is not compared."""
    plain = compare._difference

    def difference(expected: Any, actual: Any, key: Any, *rest: Any) -> Any:
        if actual.tensors.get(key) is None or expected.tensors.get(key) is None:
            return 0.0, True, ""
        return plain(expected, actual, key, *rest)

    patch.setattr(compare, "_difference", difference)


@flaw("V04", "zip(named_parameters)", gradients_renamed, "gathered")
def compared_by_place(patch: Patch) -> None:
    """Gradients are compared by their place in the list, not by name."""
    plain = compare.compare

    def by_place(expected: Any, actual: Any, **options: Any) -> Any:
        ours: dict[Any, Any] = {}
        groups: dict[Any, list[Any]] = {}
        for key in expected.tensors:
            groups.setdefault(key[:3], []).append(key)
        places: dict[Any, int] = {}
        for key, value in actual.tensors.items():
            at = places[key[:3]] = places.get(key[:3], -1) + 1
            named = groups.get(key[:3], [])
            by_name = key.kind != "gradients" or at >= len(named)
            ours[key if by_name else named[at]] = value
        return plain(expected, replace(actual, tensors=ours), **options)

    _compare_by(patch, by_place)


@flaw("V05", "Liger-Kernel#1305", "T03", "gated")
def compared_with_itself(patch: Patch) -> None:
    """What is expected and what is seen are the same memory."""
    plain = compare.compare
    _compare_by(patch, lambda expected, actual, **k: plain(actual, actual, **k))


@flaw("V06", "nnsight#719", gradient_turned, "gated")
def order_does_not_matter(patch: Patch) -> None:
    """Elements are compared as a bag."""
    plain = compare._close

    def sorted_close(x: Tensor, r: Tensor, *rest: Any) -> Any:
        return plain(x.flatten().sort().values, r.flatten().sort().values, *rest)

    patch.setattr(compare, "_close", sorted_close)


@flaw("V07", "ISEEKYAN/Megatron#223", spare_drifts, "spare")
def recorded_and_not_compared(patch: Patch) -> None:
    """Replicas are looked at, and what was found is not judged."""
    plain = compare.compare
    _compare_by(patch, lambda e, a, **k: plain(e, replace(a, replicas={}), **k))


@flaw(
    "V08", "reference built from the transformed module", "F06", "normed by kernel", everywhere=True
)
def reference_was_transformed(patch: Patch) -> None:
    """The original is what the schedule has made of the model."""
    from schedlang.runtime.kernel_injection.kernel import match
    from schedlang.runtime.kernel_injection.kernel import replace as put

    plain = proof_case.copy_original
    known = {}
    for name, module in case("normed by kernel").plan.model.model.named_modules():
        if name.endswith("norm"):
            with mock.patch("schedlang.runtime.kernel_injection.kernel.norm"):
                known[name] = match(module, "rms_norm")

    def transformed(given: Any) -> Any:
        module = plain(given)
        for name, found in known.items():
            put(module.get_submodule(name), found)
        return module

    patch.setattr(proof_case, "copy_original", transformed)


def _mean_loss(output: Any, batch: Any) -> Tensor:
    return output.mean()


@flaw("V09", "picotron's ones", "P14", "predicting")
def constant_cotangent(patch: Patch) -> None:
    """The loss is the mean of the outputs."""
    plain = proving.prepare_case
    patch.setattr(proving, "prepare_case", lambda given: plain(replace(given, loss=_mean_loss)))


@flaw("V10", "pytorch#126484", "D21", "accumulated")
def simplified_until_green(patch: Patch) -> None:
    """Only the simplest run is left: one optimizer, whose steps nobody counts."""
    plain = proving.plan_runs

    def fewer(given: Any, *args: Any) -> Any:
        ran = plain(given, *args)
        return replace(ran, conditions=ran.conditions[:1])

    patch.setattr(proving, "plan_runs", fewer)


@flaw("V11", "verl#7493", gradient_turned, "gated")
def norms_compared(patch: Patch) -> None:
    """Norms are compared instead of tensors."""
    plain = compare._close
    patch.setattr(
        compare, "_close", lambda x, r, *rest: plain(x.norm()[None], r.norm()[None], *rest)
    )


@flaw("V12", "rank threads that call torch.manual_seed", None, "tp")
def shared_random_state(patch: Patch) -> None:
    """Masks come from the one generator of the process."""

    def keep(self: Any, shape: Any, p: float, device: Any) -> Tensor:
        self.drawn += 1
        return torch.ones(tuple(shape)).bernoulli_(1 - p).bool()

    patch.setattr(drawing.LogicalDropout, "keep", keep)


@flaw("V13", "all axes of one size", divided_by_another_axis, "three by two", twin="two by two")
def axes_of_one_size(patch: Patch) -> None:
    """All axes of the mesh have the same size, so one can stand for another."""


@flaw("V14", "`if error > tolerance`", gradient_not_a_number, "gated")
def not_a_number_accepted(patch: Patch) -> None:
    """A difference fails if it is greater than the gate, which NaN never is."""
    plain = compare._close

    def close(x: Tensor, r: Tensor, scale: float, most: float, rtol: float) -> Any:
        error, ok, note = plain(x, r, scale, most, rtol)
        return error, ok or not error > rtol, note

    patch.setattr(compare, "_close", close)
