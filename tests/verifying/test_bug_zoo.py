"""The bug zoo: every injected bug is found by the proof, mistakes of the verifier are noticed."""

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
from tests.tiers import thin_out
from tests.zoo import ZOO
from tests.zoo.bug import Bug, mutate, parse_spec
from tests.zoo.hunt import hunt
from tests.zoo.scenes import SCENES, scene_case
from tests.zoo.table import killed_summary, primitive_table
from tests.zoo.verifier import FLAWS, Flaw

HUNTS = [(b.id, scene) for b in ZOO.values() if b.applies for scene in b.scenes]
ACCEPTED = [name for name, scene in SCENES.items() if scene.holds]


@pytest.mark.parametrize("entry", ZOO.values(), ids=ZOO.keys())
def test_every_entry_is_whole(entry: Bug) -> None:
    """Each bug has id, description, scene and mutation, unless its primitive is not registered."""
    assert re.fullmatch(r"[TPDCFXES]\d\d[a-z]?", entry.id) and entry.what.endswith(".")
    assert parse_spec(f"{entry.id}@a.b") == (entry, "a.b") and parse_spec(entry.id) == (entry, None)
    if entry.applies:
        assert entry.mutation is not None, f"`{entry.primitive}` is registered: write the mutation"
        assert entry.scenes and set(entry.scenes) <= set(SCENES)
    else:
        assert not entry.scenes


@pytest.mark.parametrize("spec, scene", thin_out(HUNTS), ids=[f"{s}-{n}" for s, n in HUNTS])
def test_a_bug_is_found(spec: str, scene: str, pool: Pool) -> None:
    """The proof fails, or the run is refused or ends with the expected error (half of the zoo)."""
    assert hunt(spec, scene, pool, blame=False).killed


@pytest.mark.deep
@pytest.mark.parametrize("part", range(4))
def test_all_are_found_in_any_order(part: int, pool: Pool) -> None:
    """All bugs are found in random order in the same processes: none hides another."""
    shuffled = random.Random(7).sample(HUNTS, len(HUNTS))
    verdicts = [hunt(spec, scene, pool, blame=False) for spec, scene in shuffled[part::4]]
    assert [(v.spec, v.scene) for v in verdicts if not v.killed] == []


def test_nothing_remembered_hides_a_bug() -> None:
    """Caches are cleared when a bug is injected and when it is removed."""
    mesh = Mesh((("tp", 2),))
    holding = Holding("w", Layout.whole((12,)).split("tp", 0, (4, 4, 4)))
    expected = holding.segments(mesh, 0)
    with mutate("T08"):
        with_bug = holding.segments(mesh, 0)
    assert with_bug == ((Segment(0, 6),),) != expected
    assert holding.segments(mesh, 0) == expected


@pytest.mark.parametrize("name", ACCEPTED[::4])
def test_no_false_alarm(name: str, pool: Pool) -> None:
    """Scenes without a bug pass."""
    assert prove(scene_case(name), pool=pool).ok


@pytest.mark.deep
@pytest.mark.parametrize("name", ACCEPTED)
def test_no_false_alarm_in_any(name: str, pool: Pool) -> None:
    """All scenes pass without a bug."""
    assert prove(scene_case(name), pool=pool).ok


ROW_CASES = [
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


@pytest.mark.parametrize("spec, scene", thin_out(ROW_CASES), ids=[f"{s}-{n}" for s, n in ROW_CASES])
def test_the_row_is_named(spec: str, scene: str, pool: Pool) -> None:
    """The guilty row is named for bugs that show late, in low precision or after a load."""
    assert hunt(spec, scene, pool).right


@pytest.mark.deep
@pytest.mark.parametrize("part", range(4))
def test_rows_are_blamed_rightly(part: int, pool: Pool) -> None:
    """For at least 95 percent of bugs with a guilty row, it is named."""
    verdicts = [hunt(spec, scene, pool) for spec, scene in HUNTS[part::4]]
    judged_rows = [v for v in verdicts if v.right is not None]
    assert sum(v.right is True for v in judged_rows) >= 0.95 * len(judged_rows), primitive_table(
        verdicts
    )


def test_a_refusal_in_a_step_has_its_row(pool: Pool) -> None:
    """A refusal on a running rank names the row that causes it."""
    with pytest.raises(Refusal) as error:
        prove(scene_case("counting"), pool=pool)
    diagnostic = error.value.diagnostic
    assert diagnostic.code == "S813" and "checkpoint()" in diagnostic.render()


def test_a_bug_at_one_site(pool: Pool) -> None:
    """A bug at one module shows after that module, not before it."""
    verdict = hunt("T02@blocks.1.up", "gathered", pool, blame=False)
    assert verdict.killed and "blocks.0" in verdict.place
    assert not hunt("T02@blocks.7", "gathered", pool, blame=False).killed


def test_a_death_is_no_excuse(pool: Pool) -> None:
    """A run that fails with another error than expected is a faulty mutation."""
    with pytest.raises(AssertionError, match="the mutation P10 fails"):
        hunt("P10", "skipping", pool, blame=False)  # that model has no mask


def test_the_readme_tells_the_count() -> None:
    """The README states the number of bugs of this zoo."""
    bugs = list(ZOO.values())
    readme = " ".join((Path(__file__).parents[2] / "README.md").read_text().split())
    applicable = sum(bug.applies for bug in bugs)
    assert killed_summary(applicable, bugs) in readme
    assert f"| {applicable} of {applicable} found |" in readme


# ---- Mistakes of the verifier: for each there is a program that shows it.


@pytest.mark.parametrize("flaw", thin_out(FLAWS.values()), ids=FLAWS.keys())
def test_a_mistake_of_the_verifier_would_be_noticed(flaw: Flaw, pool: Pool) -> None:
    """A wrong program is caught, or a right one passes; with the mistake it is the reverse.

    The first assertion fails for a verifier with the mistake; the second checks the program.
    """
    assert flaw.verdict(pool, flawed=False) is flaw.cries_wolf, "the verifier has this mistake"
    if flaw.id == "V05":  # refused by the comparison itself
        with pytest.raises(AssertionError):
            flaw.verdict(pool, flawed=True)
    else:
        assert flaw.verdict(pool, flawed=True) is not flaw.cries_wolf, "it watches nothing"


def test_all_are_there() -> None:
    """All fourteen mistakes of verifiers are registered."""
    assert list(FLAWS) == [f"V{n:02}" for n in range(1, 15)]


def test_what_mutations_replace_is_there() -> None:
    """Every patched function or class of the runtime exists: mutations follow renames."""
    missing, count = [], 0
    for path in sorted(Path(zoo.__file__).parent.glob("*.py")):
        if path.stem.startswith("__"):
            continue
        module = importlib.import_module(f"tests.zoo.{path.stem}")
        for owner, name in re.findall(r'patch\.setattr\((\w+), "(\w+)"', path.read_text()):
            target = vars(module).get(owner)
            count += target is not None
            if target is not None and not hasattr(target, name):
                missing.append(f"{path.name}: {owner}.{name}")
    assert not missing and count > 100, (missing, count)
