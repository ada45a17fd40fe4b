"""What is compared and timed on a GPU, without one: every kernel, judged as it should be."""

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


def raising(x: Tensor) -> Tensor:
    """A kernel that does not run."""
    raise RuntimeError("no such device")


@pytest.mark.parametrize(
    ("ours", "outcome", "said"),
    [
        (lambda x: x * 2, "ok", "ran ours, eager"),
        (lambda x: x * 2.1, "wrong", "twice 0 is"),
        (raising, "failed", "RuntimeError: no such device"),
    ],
)
def test_what_is_wrong_is_told(ours: object, outcome: str, said: str) -> None:
    """A right result, a wrong one, and none: each ends as it should, and nothing is raised."""
    one = Contest("twice", {"ours": ours, "eager": lambda x: x * 2}, ((4, 8),))  # type: ignore[dict-item]
    found = found_of("contests", Case("twice", lambda: contested(one, CPU)))
    assert found.outcome == outcome and said in found.note


def test_a_peer_that_fails_is_a_note() -> None:
    """What does not run of others is said; ours is right all the same."""
    one = Contest(
        "twice", {"ours": lambda x: x * 2, "eager": lambda x: x * 2, "liger": raising}, ((4, 8),)
    )
    told = contested(one, CPU)
    assert "liger failed: RuntimeError: no such device" in told.note
    assert told.numbers["failed"].keys() == {"liger"}


def test_nothing_is_made_on_another_device() -> None:
    """Checks and contests run on tensors of one device, whichever: none is left on the CPU."""
    for case in correctness.checks(META):
        dtype = getattr(torch, case.dtype)
        normal = lambda *shape: torch.empty(shape, device="meta")  # noqa: E731
        for kernel in (True, False):
            leaves = {n: t.to(dtype).requires_grad_() for n, t in case.draw(normal).items()}
            assert case.run(leaves, kernel).is_meta
    for one in contests(META):
        for way in ("ours", "eager") if one.name != "grouped" else ():  # it reads its groups' ends
            assert all(grad.is_meta for grad in work_of(one, way, "meta")())  # type: ignore[attr-defined]


def test_every_kernel_is_examined() -> None:
    """Each file of kernels that can be checked is, in all types, and in ragged shapes; torch's own
    attention is where a query sees no key."""
    folder = Path(schedlang.kernels.__file__).parent
    names = {path.stem for path in folder.glob("*.py")} - {"check", "__init__"}
    homes = {name: import_module(f"schedlang.kernels.{name}") for name in names}
    kernels = {
        n
        for n, home in homes.items()
        if callable(own := getattr(home, "Case", None)) and own.__module__ == home.__name__
    }
    cases = correctness.checks(replace(TINY, device="cuda"))
    assert {case.kernel for case in cases} == kernels | {"sdpa"}
    for kernel in ("norm", "gated", "rope", "linear_cross_entropy"):
        own = [case for case in cases if case.kernel == kernel]
        assert {case.dtype for case in own} == set(correctness.TYPES)
        assert any(size % 2 for case in own for size in case.shape)
    found = [case.name for case in correctness.cases(CPU)]
    assert len(found) == len(set(found))


def test_a_reference_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch's reference ran in place of a kernel nothing was shown, however equal it is."""
    monkeypatch.setattr(correctness, "_require_triton", lambda setup: None)
    first = correctness.checks(TINY)[0]
    monkeypatch.setattr("schedlang.kernels.norm.norm", _by_reference)
    found = found_of("kernels", Case("norm", lambda: correctness._check_kernel(first, CPU)))
    assert found.outcome == "wrong" and "did not run" in found.note


def _by_reference(x: Tensor, weight: Tensor, *more: object) -> Tensor:
    from schedlang.kernels.norm import reference

    return reference(x, weight, *more)  # type: ignore[arg-type]


@pytest.mark.parametrize(("gib", "least", "most"), [(4, 1, 1), (79, 5, 14), (139, 12, 28)])
def test_as_many_layers_as_there_is_room_for(gib: int, least: int, most: int) -> None:
    """Layers of Llama-8B between one and all, by the memory of the device."""
    assert least <= layers_for(EIGHT, gib * 2**30) <= most
    assert layers_for(EIGHT, 2000 * 2**30) == EIGHT.layers


def test_told_is_plain() -> None:
    """What a case tells can be written as JSON."""
    import json

    found = found_of("kernels", Case("one", lambda: Told("fine", {"share": 0.5})))
    assert json.loads(json.dumps(found.plain()))["numbers"] == {"share": 0.5} and not found.bad
