"""Entry points listed in schedlang/doors.py: signatures, the architecture page, depth of calls."""

import inspect
import pickle
import subprocess
import sys
from importlib import import_module
from operator import attrgetter

import pytest

from schedlang.doors import MAIN_DOORS, ROW_STEPS, SIDE_DOORS, Door
from tests.architecture_page import PAGE, doors_table, row_table
from tests.door_calls import DoorCalls, count_files

# at most so many functions are called up to an entry point, in so many files
CALL_LIMITS = {"build": (291, 51), "step": (370, 62)}


@pytest.mark.parametrize("door", [*MAIN_DOORS, *SIDE_DOORS], ids=lambda door: door.name)
def test_a_door_is_what_its_line_says(door: Door) -> None:
    """The function exists, takes these arguments first, and returns this type."""
    signature = inspect.signature(door.function())
    assert tuple(signature.parameters)[: len(door.takes)] == door.takes
    assert str(signature.return_annotation).rpartition(".")[2] == door.gives


def test_the_page_shows_every_door() -> None:
    """docs/architecture.md shows the entry points, and the steps of one row."""
    assert doors_table() + row_table() in PAGE.read_text()
    for module, name, _ in ROW_STEPS:
        assert callable(attrgetter(name)(import_module(f"schedlang.{module}")))


def test_importing_the_list_opens_nothing() -> None:
    """The list imports without torch; its functions are imported when asked for."""
    code = "import sys, schedlang.doors; assert not {'torch', 'lark'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_way_of_a_row_does_not_become_longer() -> None:
    """The numbers of functions and files called by a build, and by a step, do not grow.

    Who makes the way shorter lowers the numbers. They are counted in a new process: checks of
    users' own loops, once a test has had one, stay in theirs.
    """
    code = "import pickle, sys; from tests.door_calls import trace_doors; d = trace_doors().doors"
    code += "; sys.stdout.buffer.write(pickle.dumps(d))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    walk = DoorCalls(pickle.loads(output))
    for door, limit in CALL_LIMITS.items():
        called = walk.until(door)
        counts = len(called), count_files(called)
        assert counts[0] <= limit[0] and counts[1] <= limit[1], (door, counts)
