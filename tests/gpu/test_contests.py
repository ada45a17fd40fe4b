"""GPU checks and timings, rehearsed without a GPU: every kernel, and how results are judged."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import Tensor

import schedlang.kernels
from schedlang.testing.gpu import correctness
from schedlang.testing.gpu.case import Case, Setup, Told
from schedlang.testing.gpu.contests import TINY, Contest, contested, contests, work_of
from schedlang.testing.gpu.driver import found_of
from schedlang.testing.gpu.steps import EIGHT, layers_for

META = replace(TINY, device="meta")
CPU = Setup("cpu", "tiny")


def raise_error(x: Tensor) -> Tensor:
    """Raise an error, as a kernel that does not run."""
    raise RuntimeError("no such device")


@pytest.mark.parametrize(
    ("ours", "outcome", "said"),
    [
        (lambda x: x * 2, "ok", "ran ours, eager"),
        (lambda x: x * 2.1, "wrong", "twice 0 is"),
        (raise_error, "failed", "RuntimeError: no such device"),
    ],
)
def test_what_is_wrong_is_told(ours: object, outcome: str, said: str) -> None:
    """A right result, a wrong one, and an error: each has its outcome, and nothing is raised."""
    contest = Contest("twice", {"ours": ours, "eager": lambda x: x * 2}, ((4, 8),))  # type: ignore[dict-item]
    result = found_of("contests", Case("twice", lambda: contested(contest, CPU)))
    assert result.outcome == outcome and said in result.note


def test_a_peer_that_fails_is_a_note() -> None:
    """A failure of another library is a note; ours is still right."""
    contest = Contest(
        "twice",
        {"ours": lambda x: x * 2, "eager": lambda x: x * 2, "liger": raise_error},
        ((4, 8),),
    )
    result = contested(contest, CPU)
    assert "liger failed: RuntimeError: no such device" in result.note
    assert result.numbers["failed"].keys() == {"liger"}


def test_nothing_is_made_on_another_device() -> None:
    """Checks and contests use tensors of one device only."""
    for case in correctness.checks(META):
        dtype = getattr(torch, case.dtype)
        normal = lambda *shape: torch.empty(shape, device="meta")  # noqa: E731
        for kernel in (True, False):
            leaves = {n: t.to(dtype).requires_grad_() for n, t in case.draw(normal).items()}
            assert case.run(leaves, kernel).is_meta
    for contest in contests(META):
        for variant in ("ours", "eager") if contest.name != "grouped" else ():  # it reads values
            assert all(grad.is_meta for grad in work_of(contest, variant, "meta")())  # type: ignore[attr-defined]


def test_every_kernel_is_examined() -> None:
    """Each kernel file with cases is checked, in all dtypes and odd shapes; and torch's attention
    where a query sees no key."""
    folder = Path(schedlang.kernels.__file__).parent
    names = {path.stem for path in folder.glob("*.py")} - {"check", "__init__"}
    modules = {name: import_module(f"schedlang.kernels.{name}") for name in names}
    kernels = {
        n
        for n, module in modules.items()
        if callable(case_class := getattr(module, "Case", None))
        and case_class.__module__ == module.__name__
    }
    cases = correctness.checks(replace(TINY, device="cuda"))
    assert {case.kernel for case in cases} == kernels | {"sdpa"}
    for kernel in ("norm", "gated", "rope", "linear_cross_entropy"):
        case_class = [case for case in cases if case.kernel == kernel]
        assert {case.dtype for case in case_class} == set(correctness.TYPES)
        assert any(size % 2 for case in case_class for size in case.shape)
    case_names = [case.name for case in correctness.cases(CPU)]
    assert len(case_names) == len(set(case_names))


def test_a_reference_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the reference ran instead of the kernel, the check fails, however equal it is."""
    monkeypatch.setattr(correctness, "_require_triton", lambda setup: None)
    first = correctness.checks(TINY)[0]
    monkeypatch.setattr("schedlang.kernels.norm.norm", _by_reference)
    result = found_of("kernels", Case("norm", lambda: correctness._check_kernel(first, CPU)))
    assert result.outcome == "wrong" and "did not run" in result.note


def _by_reference(x: Tensor, weight: Tensor, *more: object) -> Tensor:
    from schedlang.kernels.norm import reference

    return reference(x, weight, *more)  # type: ignore[arg-type]


@pytest.mark.parametrize(("gib", "least", "most"), [(4, 1, 1), (79, 5, 14), (139, 12, 28)])
def test_as_many_layers_as_there_is_room_for(gib: int, least: int, most: int) -> None:
    """The number of Llama-8B's layers follows from the device's memory."""
    assert least <= layers_for(EIGHT, gib * 2**30) <= most
    assert layers_for(EIGHT, 2000 * 2**30) == EIGHT.layers


def test_told_is_plain() -> None:
    """A case's result can be written as JSON."""
    import json

    result = found_of("kernels", Case("one", lambda: Told("fine", {"share": 0.5})))
    assert json.loads(json.dumps(result.plain()))["numbers"] == {"share": 0.5} and not result.bad
