"""Injected mistakes of the verifier, each with a program that shows the mistake.

A correct verifier catches the program, one with the mistake passes it (or, V12, fails wrongly).
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
from tests.zoo.pool import Mutated
from tests.zoo.scenes import scene_case
from tests.zoo.trackers import rank

Injected = str | Callable[[Patch], None] | None  # a bug of the zoo, a function, or a right program


@dataclass(frozen=True)
class Flaw:
    """A mistake of the verifier.

    bug, scene  a wrong program that a verifier without the mistake catches
    twin        the scene that a verifier with the mistake uses instead
    everywhere  inject the bug into this process, too
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
        """Whether the mistake fails a right program, instead of passing a wrong one."""
        return self.bug is None

    def verdict(self, pool: Pool, flawed: bool) -> bool:
        """Return whether the program passes with a correct or a flawed verifier."""
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
        return proving.prove(scene_case(scene), pool=ranks).ok


FLAWS: dict[str, Flaw] = {}


def flaw(
    name: str, credit: str, bug: Injected, scene: str, twin: str = "", everywhere: bool = False
) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Return a decorator that registers a mistake of the verifier; its docstring describes it."""

    def enter(mutation: Callable[[Patch], None]) -> Callable[[Patch], None]:
        description = " ".join((mutation.__doc__ or "").split())
        FLAWS[name] = Flaw(name, description, credit, mutation, bug, scene, twin, everywhere)
        return mutation

    return enter


# -- programs that report wrong values -----------------------------------------------------------


def _change_gradients(
    patch: Patch, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> None:
    original = full_tensors.full_gradients
    patch.setattr(full_tensors, "full_gradients", lambda *args: change(original(*args)))


def _change_one_gradient(change: Callable[[Tensor], Tensor]) -> Callable[[Patch], None]:
    """Return a patch that changes one gradient where it is not frozen."""
    name = "embed.weight"

    def changed(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        return {n: change(g) if n == name else g for n, g in gradients.items()}

    return lambda patch: _change_gradients(patch, changed)


def gradient_lost(patch: Patch) -> None:
    """One gradient is missing."""
    _change_gradients(
        patch, lambda gradients: {n: g for n, g in gradients.items() if n != "embed.weight"}
    )


def gradients_renamed(patch: Patch) -> None:
    """Gradients of two blocks are reported under each other's names."""
    original, swap = proof_case.ProgramSubject.gradients, str.maketrans("01", "10")
    patch.setattr(
        proof_case.ProgramSubject,
        "gradients",
        lambda self: {name.translate(swap): grad for name, grad in original(self).items()},
    )


gradient_turned = _change_one_gradient(lambda grad: grad.flip(0))
gradient_not_a_number = _change_one_gradient(lambda grad: grad * torch.nan)


def spare_drifts(patch: Patch) -> None:
    """Replicas of an unused parameter drift apart."""
    original = program.Program.train_step

    def step(self: Any, batch: Any, **options: Any) -> Tensor:
        loss = original(self, batch, **options)
        with torch.no_grad():
            self.assembly.parameters["blocks.1.spare"].mul_(1 + 0.1 * rank())
        return loss

    patch.setattr(program.Program, "train_step", step)


def divided_by_another_axis(patch: Patch) -> None:
    """A sum over `dp` is multiplied by its size and divided by that of `tp`."""
    original = program.Program._clip_and_reduce

    def finish(self: Any, *args: Any) -> Tensor:
        mesh = self.assembly.ranks.mesh
        if {"dp", "tp"} <= set(mesh.sizes):
            gradient.scale_gradients(self.assembly.parameters, mesh.size("dp") / mesh.size("tp"))
        return original(self, *args)

    patch.setattr(program.Program, "_clip_and_reduce", finish)


def _replace_compare(patch: Patch, new_compare: Any) -> None:
    """Replace `compare` in all modules of the proof."""
    for module in (compare, proving, requirements):
        patch.setattr(module, "compare", new_compare)


# -- flaws ---------------------------------------------------------------------------------------


@flaw("V01", "atorch's copy of PyTorch's pipeline test", "T03", "gated")
def nothing_asserted(patch: Patch) -> None:
    """Differences are computed, but never checked."""
    original = compare._difference
    patch.setattr(compare, "_difference", lambda *a: (original(*a)[0], True, ""))
    _pass_all_rows(patch)


def _pass_all_rows(patch: Patch) -> None:
    """Let all other checks pass, too."""
    original = compare.compare
    _replace_compare(patch, lambda *a, **k: tuple(replace(r, ok=True) for r in original(*a, **k)))


@flaw("V02", "veScale's 1e2, transformers' 5e-3", "F06", "normed by kernel")
def tolerance_above_the_signal(patch: Patch) -> None:
    """The tolerance is 5e-3."""
    original = compare.compare
    _replace_compare(patch, lambda e, a, **k: original(e, a, **{**k, "rtol": 5e-3}))


@flaw("V03", "transformers, autoparallel, veScale", gradient_lost, "gated")
def missing_gradients_skipped(patch: Patch) -> None:
    """A gradient that is missing on one side is not compared."""
    original = compare._difference

    def difference(expected: Any, actual: Any, key: Any, *args: Any) -> Any:
        if actual.tensors.get(key) is None or expected.tensors.get(key) is None:
            return 0.0, True, ""
        return original(expected, actual, key, *args)

    patch.setattr(compare, "_difference", difference)


@flaw("V04", "zip(named_parameters)", gradients_renamed, "gathered")
def compared_by_place(patch: Patch) -> None:
    """Gradients are compared by their place in the list, not by name."""
    original = compare.compare

    def by_place(expected: Any, actual: Any, **options: Any) -> Any:
        renamed: dict[Any, Any] = {}
        groups: dict[Any, list[Any]] = {}
        for key in expected.tensors:
            groups.setdefault(key[:3], []).append(key)
        places: dict[Any, int] = {}
        for key, value in actual.tensors.items():
            index = places[key[:3]] = places.get(key[:3], -1) + 1
            group_keys = groups.get(key[:3], [])
            by_name = key.kind != "gradients" or index >= len(group_keys)
            renamed[key if by_name else group_keys[index]] = value
        return original(expected, replace(actual, tensors=renamed), **options)

    _replace_compare(patch, by_place)


@flaw("V05", "Liger-Kernel#1305", "T03", "gated")
def compared_with_itself(patch: Patch) -> None:
    """Expected and actual values share memory."""
    original = compare.compare
    _replace_compare(patch, lambda expected, actual, **k: original(actual, actual, **k))


@flaw("V06", "nnsight#719", gradient_turned, "gated")
def order_does_not_matter(patch: Patch) -> None:
    """Elements are compared regardless of order."""
    original = compare._close

    def sorted_close(x: Tensor, r: Tensor, *args: Any) -> Any:
        return original(x.flatten().sort().values, r.flatten().sort().values, *args)

    patch.setattr(compare, "_close", sorted_close)


@flaw("V07", "ISEEKYAN/Megatron#223", spare_drifts, "spare")
def recorded_and_not_compared(patch: Patch) -> None:
    """Replicas are recorded, but not compared."""
    original = compare.compare
    _replace_compare(patch, lambda e, a, **k: original(e, replace(a, replicas={}), **k))


@flaw(
    "V08", "reference built from the transformed module", "F06", "normed by kernel", everywhere=True
)
def reference_was_transformed(patch: Patch) -> None:
    """The reference is the model after its transformation by the schedule."""
    from schedlang.runtime.kernel_injection.kernel import match
    from schedlang.runtime.kernel_injection.kernel import replace as put

    original = proof_case.copy_original
    matches = {}
    for name, module in scene_case("normed by kernel").plan.model.model.named_modules():
        if name.endswith("norm"):
            with mock.patch("schedlang.runtime.kernel_injection.kernel.norm"):
                matches[name] = match(module, "rms_norm")

    def transformed(proof: Any) -> Any:
        module = original(proof)
        for name, match_ in matches.items():
            put(module.get_submodule(name), match_)
        return module

    patch.setattr(proof_case, "copy_original", transformed)


def _mean_loss(output: Any, batch: Any) -> Tensor:
    return output.mean()


@flaw("V09", "picotron's ones", "P14", "predicting")
def constant_cotangent(patch: Patch) -> None:
    """The loss is the mean of the outputs."""
    original = proving.prepare_case
    patch.setattr(
        proving, "prepare_case", lambda prepared: original(replace(prepared, loss=_mean_loss))
    )


@flaw("V10", "pytorch#126484", "D21", "accumulated")
def simplified_until_green(patch: Patch) -> None:
    """Only the simplest run remains: one optimizer, whose step count is not checked."""
    original = proving.plan_runs

    def fewer(proof: Any, *args: Any) -> Any:
        plan = original(proof, *args)
        return replace(plan, conditions=plan.conditions[:1])

    patch.setattr(proving, "plan_runs", fewer)


@flaw("V11", "verl#7493", gradient_turned, "gated")
def norms_compared(patch: Patch) -> None:
    """Norms are compared instead of tensors."""
    original = compare._close
    patch.setattr(
        compare, "_close", lambda x, r, *args: original(x.norm()[None], r.norm()[None], *args)
    )


@flaw("V12", "rank threads that call torch.manual_seed", None, "tp")
def shared_random_state(patch: Patch) -> None:
    """Masks are drawn from the global generator of the process."""

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
    original = compare._close

    def close(x: Tensor, r: Tensor, scale: float, limit: float, rtol: float) -> Any:
        error, ok, note = original(x, r, scale, limit, rtol)
        return error, ok or not error > rtol, note

    patch.setattr(compare, "_close", close)
