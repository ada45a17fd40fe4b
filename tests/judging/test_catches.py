"""Silent bugs from public threads: a program as it was written is caught, the mended one passes."""

import importlib
import re
from pathlib import Path

import pytest
import torch

import schedlang
from tests.judging.catches.words import original

FOLDER = Path(__file__).with_name("catches")
CATCHES = [file.stem for file in sorted(FOLDER.glob("*.py")) if "\nNAMED = " in file.read_text()]


def judged(name, program, pool):
    """The verdict on one of a catch's programs, and the catch."""
    catch = importlib.import_module(f"tests.judging.catches.{name}")
    torch.manual_seed(0)
    wanted = original(catch)
    return schedlang.verify_program(getattr(catch, program), **wanted, ranks=2, pool=pool), catch


@pytest.mark.parametrize("name", CATCHES)
def test_the_bug_is_caught_and_named(name, pool) -> None:
    """The program as it was written differs from its original, and the verdict says in what."""
    report, catch = judged(name, "wrong", pool)
    assert not report.ok
    _, _, said = str(report).partition("first difference")
    assert re.search(catch.NAMED, said), str(report)
    assert "not in float64" not in said  # no catch is about fewer bits


@pytest.mark.parametrize("name", CATCHES)
def test_the_mended_program_passes(name, pool) -> None:
    """The same program without the bug equals its original in everything."""
    report, _ = judged(name, "right", pool)
    assert report.ok, str(report)
