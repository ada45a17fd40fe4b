"""The zoo: every bug of a registered primitive is found by the proof, and entered in full."""

from __future__ import annotations

import re

import pytest

from schedlang.runtime.launch import Pool
from tests.zoo import ZOO
from tests.zoo.bug import found
from tests.zoo.hunt import hunt
from tests.zoo.scenes import SCENES

HUNTS = [(b.id, scene) for b in ZOO.values() if b.applies for scene in b.scenes]
SPREAD = HUNTS[::4]  # the deep tier hunts all


@pytest.mark.parametrize("bug", ZOO.values(), ids=ZOO.keys())
def test_every_entry_is_whole(bug: object) -> None:
    """Id, words, scene and mutation are there, unless its primitive is not."""
    entry = ZOO[bug.id]  # type: ignore[attr-defined]
    assert re.fullmatch(r"[TPDCFXES]\d\d[a-z]?", entry.id) and entry.what.endswith(".")
    assert found(f"{entry.id}@a.b") == (entry, "a.b") and found(entry.id) == (entry, None)
    if entry.applies:
        assert entry.mutation is not None, f"`{entry.primitive}` is registered: write the mutation"
        assert entry.scenes and set(entry.scenes) <= set(SCENES)
    else:
        assert not entry.scenes


@pytest.mark.parametrize("spec, scene", SPREAD, ids=[f"{s}-{n}" for s, n in SPREAD])
def test_a_bug_is_found(spec: str, scene: str, pool: Pool) -> None:
    """A spread of the zoo: the proof fails, or the run is refused or dies."""
    assert hunt(spec, scene, pool, blame=False).killed


@pytest.mark.deep
@pytest.mark.parametrize("spec, scene", HUNTS, ids=[f"{s}-{n}" for s, n in HUNTS])
def test_every_bug_is_found(spec: str, scene: str, pool: Pool) -> None:
    """All of the zoo."""
    assert hunt(spec, scene, pool, blame=False).killed
