"""Silent bugs from public threads: the buggy program is caught and named, the fixed one passes."""

import importlib
import re
from pathlib import Path

import pytest
import torch

import schedlang
from tests.judging.catches.language_model import original

FOLDER = Path(__file__).with_name("catches")
CATCHES = [file.stem for file in sorted(FOLDER.glob("*.py")) if "\nNAMED = " in file.read_text()]


def judge_catch(name, program, pool):
    """Return the verdict on one of a catch's programs, and the catch's module."""
    catch = importlib.import_module(f"tests.judging.catches.{name}")
    torch.manual_seed(0)
    inputs = original(catch)
    return schedlang.verify_program(getattr(catch, program), **inputs, ranks=2, pool=pool), catch


@pytest.mark.parametrize("name", CATCHES)
def test_the_bug_is_caught_and_named(name, pool) -> None:
    """The buggy program differs from its original, and the verdict matches NAMED."""
    report, catch = judge_catch(name, "wrong", pool)
    assert not report.ok
    _, _, difference = str(report).partition("first difference")
    assert re.search(catch.NAMED, difference), str(report)
    assert "not in float64" not in difference  # no catch is about fewer bits


@pytest.mark.parametrize("name", CATCHES)
def test_the_mended_program_passes(name, pool) -> None:
    """The fixed program equals its original."""
    report, _ = judge_catch(name, "right", pool)
    assert report.ok, str(report)
