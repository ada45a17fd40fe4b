"""The zoo: every bug is found by the proof, and the verifier's own mistakes are noticed."""

from __future__ import annotations

import importlib
import random
import re
from pathlib import Path

import pytest

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.mesh import Mesh
from schedlang.ir.placement import Layout, Segment
from schedlang.passes.prove import prove
from schedlang.runtime.checkpointing.holdings import Holding
from schedlang.runtime.launch.pool import Pool
from tests import zoo
from tests.tiers import thinned
from tests.zoo import ZOO
from tests.zoo.bug import Bug, found, mutate
from tests.zoo.hunt import hunt
from tests.zoo.scenes import SCENES, case
from tests.zoo.table import by_kind, counted
from tests.zoo.verifier import FLAWS, Flaw

HUNTS = [(b.id, scene) for b in ZOO.values() if b.applies for scene in b.scenes]
RIGHT = [name for name, scene in SCENES.items() if scene.holds]


@pytest.mark.parametrize("entry", ZOO.values(), ids=ZOO.keys())
def test_every_entry_is_whole(entry: Bug) -> None:
    """Id, words, scene and mutation are there, unless its primitive is not."""
    assert re.fullmatch(r"[TPDCFXES]\d\d[a-z]?", entry.id) and entry.what.endswith(".")
    assert found(f"{entry.id}@a.b") == (entry, "a.b") and found(entry.id) == (entry, None)
    if entry.applies:
        assert entry.mutation is not None, f"`{entry.primitive}` is registered: write the mutation"
        assert entry.scenes and set(entry.scenes) <= set(SCENES)
    else:
        assert not entry.scenes


@pytest.mark.parametrize("spec, scene", thinned(HUNTS), ids=[f"{s}-{n}" for s, n in HUNTS])
def test_a_bug_is_found(spec: str, scene: str, pool: Pool) -> None:
    """The proof fails, or the run is refused or ends with the expected error (half of the zoo)."""
    assert hunt(spec, scene, pool, blame=False).killed


@pytest.mark.deep
@pytest.mark.parametrize("part", range(4))
def test_all_are_found_in_any_order(part: int, pool: Pool) -> None:
    """One process after the other: what a bug or a program leaves behind hides no other bug."""
    shuffled = random.Random(7).sample(HUNTS, len(HUNTS))
    found = [hunt(spec, scene, pool, blame=False) for spec, scene in shuffled[part::4]]
    assert [(v.spec, v.scene) for v in found if not v.killed] == []


def test_nothing_remembered_hides_a_bug() -> None:
    """What was worked out before a bug is worked out anew with it, and once more without it."""
    mesh = Mesh((("tp", 2),))
    holding = Holding("w", Layout.whole((12,)).split("tp", 0, (4, 4, 4)))
    right = holding.segments(mesh, 0)
    with mutate("T08"):
        wrong = holding.segments(mesh, 0)
    assert wrong == ((Segment(0, 6),),) != right
    assert holding.segments(mesh, 0) == right


@pytest.mark.parametrize("name", RIGHT[::4])
def test_no_false_alarm(name: str, pool: Pool) -> None:
    """Without a bug a program of the zoo passes: what is found with one is the bug's doing."""
    assert prove(case(name), pool=pool).ok


@pytest.mark.deep
@pytest.mark.parametrize("name", RIGHT)
def test_no_false_alarm_in_any(name: str, pool: Pool) -> None:
    """All programs of the zoo pass without a bug."""
    assert prove(case(name), pool=pool).ok


NAMED = [
    ("P28", "stale, not kept"),
    ("C31", "overflowing"),
    ("F60", "compiled"),
    ("C20", "lent"),
    ("S03", "sliced"),
    ("D42", "untied head"),
    ("D40", "frozen front"),
    ("C15", "streamed"),
    ("D41", "tied blocks"),
]


@pytest.mark.parametrize("spec, scene", thinned(NAMED), ids=[f"{s}-{n}" for s, n in NAMED])
def test_the_row_is_named(spec: str, scene: str, pool: Pool) -> None:
    """What shows late, in few bits, after a load, or against a changed original has its row."""
    assert hunt(spec, scene, pool).right


@pytest.mark.deep
@pytest.mark.parametrize("part", range(4))
def test_rows_are_blamed_rightly(part: int, pool: Pool) -> None:
    """Of all bugs that a row has, it is named for 95 in 100."""
    found = [hunt(spec, scene, pool) for spec, scene in HUNTS[part::4]]
    asked = [v for v in found if v.right is not None]
    assert sum(v.right is True for v in asked) >= 0.95 * len(asked), by_kind(found)


def test_a_refusal_in_a_step_has_its_row(pool: Pool) -> None:
    """What ranks find out while they run is refused at the row that it comes from."""
    with pytest.raises(Refusal) as error:
        prove(case("counting"), pool=pool)
    said = error.value.diagnostic
    assert said.code == "S813" and "checkpoint()" in said.render()


def test_a_bug_at_one_site(pool: Pool) -> None:
    """Injected at one module, the bug shows behind that module and not before it."""
    one = hunt("T02@blocks.1.up", "gathered", pool, blame=False)
    assert one.killed and "blocks.0" in one.place
    assert not hunt("T02@blocks.7", "gathered", pool, blame=False).killed


def test_a_death_is_no_excuse(pool: Pool) -> None:
    """A run that dies of another error than the entry names is a mistake of the mutation."""
    with pytest.raises(AssertionError, match="the mutation P10 fails"):
        hunt("P10", "skipping", pool, blame=False)  # that model has no mask


def test_the_readme_tells_the_count() -> None:
    """The last line of the table, and the count on its first page, are those of this zoo."""
    bugs = list(ZOO.values())
    readme = " ".join((Path(__file__).parents[2] / "README.md").read_text().split())
    applicable = sum(bug.applies for bug in bugs)
    assert counted(applicable, bugs) in readme
    assert f"| {applicable} of {applicable} found |" in readme


# ---- The verifier's own mistakes: for each there is a program by which it would be noticed.


@pytest.mark.parametrize("flaw", thinned(FLAWS.values()), ids=FLAWS.keys())
def test_a_mistake_of_the_verifier_would_be_noticed(flaw: Flaw, pool: Pool) -> None:
    """A wrong program is caught (a right one passes), and with the mistake it would not be.

    The first half fails for a verifier that has the mistake; the second says what it watches.
    """
    assert flaw.verdict(pool, flawed=False) is flaw.cries_wolf, "the verifier has this mistake"
    if flaw.id == "V05":  # refused by the comparison itself
        with pytest.raises(AssertionError):
            flaw.verdict(pool, flawed=True)
    else:
        assert flaw.verdict(pool, flawed=True) is not flaw.cries_wolf, "it watches nothing"


def test_all_are_there() -> None:
    """Fourteen ways in which verifiers have failed."""
    assert list(FLAWS) == [f"V{n:02}" for n in range(1, 15)]


def test_what_mutations_replace_is_there() -> None:
    """A function or a class that is renamed takes the mutations of it along: few of them are run
    by ordinary tests."""
    gone, seen = [], 0
    for path in sorted(Path(zoo.__file__).parent.glob("*.py")):
        if path.stem.startswith("__"):
            continue
        home = importlib.import_module(f"tests.zoo.{path.stem}")
        for owner, name in re.findall(r'patch\.setattr\((\w+), "(\w+)"', path.read_text()):
            there = vars(home).get(owner)
            seen += there is not None
            if there is not None and not hasattr(there, name):
                gone.append(f"{path.name}: {owner}.{name}")
    assert not gone and seen > 100, (gone, seen)
