"""The list of doors is true: functions, arguments, results, and the page that shows them."""

import inspect
import subprocess
import sys
from importlib import import_module
from operator import attrgetter

import pytest

from schedlang.doors import MAIN_DOORS, ROW_STEPS, SIDE_DOORS, Door
from tests.architecture_page import PAGE, doors, row
from tests.walk import files, walked

# functions that are called on the way up to a door, and the files that they stand in
LONGEST = {"build": (291, 51), "step": (370, 62)}


@pytest.mark.parametrize("door", [*MAIN_DOORS, *SIDE_DOORS], ids=lambda door: door.name)
def test_a_door_is_what_its_line_says(door: Door) -> None:
    """The function lies there, takes these arguments first, and gives such a value."""
    found = inspect.signature(door.function())
    assert tuple(found.parameters)[: len(door.takes)] == door.takes
    assert str(found.return_annotation).rpartition(".")[2] == door.gives


def test_the_page_shows_every_door() -> None:
    """docs/architecture.md draws the doors from that list, and what happens to one row."""
    assert doors() + row() in PAGE.read_text()
    for module, name, _ in ROW_STEPS:
        assert callable(attrgetter(name)(import_module(f"schedlang.{module}")))


def test_importing_the_list_opens_nothing() -> None:
    """The list can be read without torch: functions are imported when they are asked for."""
    code = "import sys, schedlang.doors; assert not {'torch', 'lark'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_way_of_a_row_does_not_become_longer() -> None:
    """From text to a running module, and to its first step: functions that are called, and files.

    Who makes the way shorter lowers the numbers.
    """
    walk = walked()
    for door, most in LONGEST.items():
        called = walk.until(door)
        now = len(called), files(called)
        assert now[0] <= most[0] and now[1] <= most[1], (door, now)
