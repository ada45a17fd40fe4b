"""The generators of random schedules: every verb and argument is drawn; rare rows are equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given, settings

from tests.engine import Threads
from tests.properties import engine, schedules, splits
from tests.properties.choices import all_choices, count_choices
from tests.properties.drawn import Drawn
from tests.properties.models import Block, Config
from tests.tiers import thin_out

RARE = {  # rows that few sizes allow, and meshes for them
    "grid(summa": (("dp", 2), ("tp", 2)),
    "embed  grid(": (("dp", 2), ("tp", 2)),
    "uneven=pad": (("tp", 3),),
    "uneven=replicate": (("tp", 2),),
    "activations, to=peer": (("pp", 2),),
}

# choices that are never drawn, and where they are tested instead
TESTED_ELSEWHERE = {
    **dict.fromkeys(
        ("replace_kernel kernel=gated", "replace_kernel kernel=sdpa"),
        "modules of transformers: tests/kernels",
    ),
    **dict.fromkeys(
        (
            f"replace_kernel kernel={one}"
            for one in ("liger.rms_norm", "liger.layer_norm", "flash_attention")
        ),
        "packages that are not installed: tests/kernels/test_attention_backends.py",
    ),
    **dict.fromkeys(
        ("gather_rows", "gather_rows over"),
        "losses over pairs of rows: drawn by tests/properties/user_models.py",
    ),
    "grid style=cube": "eight ranks at least: tests/sharding",
    "expert_parallel capacity": "leaves tokens out, by an oracle of its own: tests/experts",
    "pipeline every": "stale weights, by an oracle of their own: tests/pipelines/test_stale.py",
    "pipeline slices": "models of causal attention alone: tests/pipelines/test_slices_program.py",
    "pipeline memory": "of orders that are searched for: tests/orders",
    "pipeline chunks": "of orders that leave it open: tests/orders/test_matrix.py",
}


# blocks of each kind with sizes that most meshes divide; blocks for context parallelism
KINDS = (
    Block("chain"),
    Block("mlp", 12),
    Block("mlp", 7, norm="rms", pre=False),
    Block("custom", 12),
    Block("attention", heads=12, groups=12),
    Block("attention", heads=12, groups=12, fused=True),
    Block("attention", heads=6, groups=3),
    Block("attention", heads=4, groups=1, norm="rms"),
    Block("experts", 12),
    Block("routed", 12, count=12),
    Block("twice"),
)
CONTEXT_BLOCKS = (Block("attention", heads=12, groups=12, flag=True), Block("mlp", 12))
MODELS = tuple(
    Config(blocks, 12, "words", 12, tied, "loss")
    for blocks in (KINDS, CONTEXT_BLOCKS, (Block("mlp", 12),) * 6)
    for tied in (False, True)
) + (Config(CONTEXT_BLOCKS, 12, "words", 11),)


def _offered_choices() -> Counter[str]:
    """Return the choices that the generators offer to some models on every mesh."""
    texts: set[str] = set()
    for config, axes in product(MODELS, schedules.MESHES):
        sizes = dict(axes)
        offers = [make(config, sizes, 4) for make in schedules.GENERATORS.values()]
        lossy_steps = [
            schedules.activation_compression(config),
            schedules.gradient_compression(config, sizes),
        ]
        texts |= {row for steps in (*offers, *lossy_steps) for offer in steps for row in offer.rows}
    body = "\n".join(f"  {row}" for row in sorted(texts))
    return count_choices(f'schedule 1\n\nstep "all" {{\n{body}\n}}\n')


def _drawn_choices(
    count: int, meshes: Sequence[schedules.Axes] = schedules.MESHES
) -> tuple[Counter[str], list[str]]:
    """Draw `count` schedules; returns their choices and texts."""
    choices_: Counter[str] = Counter()
    texts: list[str] = []

    @settings(max_examples=count, derandomize=True, database=None, deadline=None)
    @given(schedules.legal(meshes))
    def draw(drawn: Drawn) -> None:
        texts.append(drawn.text)
        choices_.update(count_choices(drawn.text))

    draw()
    return choices_, texts


def test_every_choice_is_offered() -> None:
    """Each verb and every value of every argument is offered to some model on some mesh, or listed
    above with the test that covers it."""
    missing = all_choices() - set(_offered_choices())
    assert missing == set(TESTED_ELSEWHERE), (
        missing - set(TESTED_ELSEWHERE),
        set(TESTED_ELSEWHERE) - missing,
    )


@pytest.mark.deep
def test_every_verb_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    """400 schedules contain every verb; on their meshes, rare rows are drawn, too."""
    choices_, _ = _drawn_choices(400)
    counts = {verb: choices_[verb] for verb in schedules.GENERATORS}
    for axes in sorted(set(RARE.values())):
        texts = _drawn_choices(400, [axes])[1]
        counts |= {
            row: sum(row in t for t in texts) for row, row_mesh in RARE.items() if row_mesh == axes
        }
    with capsys.disabled():
        print("\ndrawn:", ", ".join(f"{n} {verb_}" for verb_, n in sorted(counts.items())))
    assert min(counts.values()) >= 1, counts


@pytest.mark.parametrize(
    "block, axes, word",
    [
        (
            Block("attention", heads=4, groups=1, causal=True),
            (("dp", 2), ("tp", 2)),
            "uneven=replicate",
        ),
        (Block("attention", heads=2, groups=1, plain=True), (("tp", 2),), "uneven=replicate"),
        (Block("attention", heads=4, groups=2, causal=True), (("tp", 4),), "uneven=replicate"),
        (Block("attention", heads=6, groups=3, window=2, norm="rms"), (("tp", 2),), "uneven=pad"),
        (Block("mlp", hidden=7), (("dp", 2), ("tp", 3)), "uneven=pad"),
    ],
)
def test_uneven_rows_are_the_original(
    threads: Threads, block: Block, axes: schedules.Axes, word: str
) -> None:
    """Every uneven step is equal to the original, with replicas, tied weights and dropout."""
    config = Config((block,), entry="words", tied=True, dropout=0.25)
    steps = [s for s in splits.shard(config, dict(axes), 4) if any(word in row for row in s.rows)]
    assert steps
    for shard_step in steps:
        engine.assert_holds(Drawn(config, axes, (shard_step,), 1, 4), threads)


@pytest.mark.parametrize(
    "block, count",
    thin_out(
        [
            (Block("mlp", hidden=4, pre=False), 5),
            (Block("attention", heads=4, groups=2, norm="rms", causal=True), 8),
            (
                Block(
                    "attention", heads=4, groups=4, pre=False, flag=True, causal=True, fused=True
                ),
                6,
            ),
            (Block("attention", heads=2, window=2, pre=False, norm="rms"), 8),
            (Block("mlp", hidden=7, norm="rms", pre=False), 5),
        ],
        5,
    ),
)
def test_every_kernel_is_the_original(threads: Threads, block: Block, count: int) -> None:
    """Every kernel step is equal to the original, with a sharded block and head, and dropout."""
    config = Config((block,), entry="words", dropout=0.25, returns="dict")
    axes = (("tp", 2),)
    kernel_steps = schedules.replace_kernel(config, dict(axes), 4)
    assert len(kernel_steps) == count
    for kernel_step in kernel_steps:
        split = [
            s for s in splits.shard(config, dict(axes), 4) if len(s.rows) > 1 or "vocab" in str(s)
        ]
        engine.assert_holds(
            Drawn(config, axes, schedules.allowed([kernel_step, *split], config, axes), 1, 4),
            threads,
        )


NORM_SHARD = "blocks.0.norm  shard(input=S(seq), output=S(seq), over=tp)"
MLP_SHARDS = (
    "blocks.0.up  shard(col, over=tp)",
    "blocks.0.down  shard(row, output=S(seq), over=tp)",
)
BLOCK_SHARD = "blocks.0  shard(input=S(seq), output=R, over=tp)"
SEQUENCE_SHARDS = (NORM_SHARD, *MLP_SHARDS, BLOCK_SHARD)
FLAG = Block("attention", heads=4, groups=4, flag=True)


@pytest.mark.parametrize(
    "config, axes, rows",
    [
        # layers called as `layer(input=x)`
        (Config((Block("used", 4, use="named"),), 4), ("tp",), ("blocks.0.up  decompose(bias)",)),
        (Config((Block("used", 4, use="named"),), 4), ("tp",), SEQUENCE_SHARDS),
        # masks of tokens that two axes split
        (
            Config((Block("mlp", 4), FLAG), 4, dropout=0.25),
            ("cp", "tp"),
            (*SEQUENCE_SHARDS, "blocks.1  context_parallel(ulysses, over=cp)"),
        ),
        # dropout masks if rows and tokens are one dim
        (
            Config((Block("used", 4, use="folded"),), 4, dropout=0.25),
            ("tp",),
            (MLP_SHARDS[0], "blocks.0.down  shard(row, over=tp)"),
        ),
        # one module under two names
        (
            Config((Block("mlp", 4),) * 2, 4, use="same"),
            ("tp",),
            ("blocks.*  checkpoint(plan=adapipe, memory=1MiB)",),
        ),
    ],
)
def test_what_hunts_have_found(
    threads: Threads, config: Config, axes: tuple[str, ...], rows: tuple[str, ...]
) -> None:
    """Schedules that once failed are equal to the original."""
    split = ["tp"] if "shard(" in rows[0] else []
    drawn_step = schedules.step("shard", rows, [], split)
    engine.assert_holds(
        Drawn(config, tuple((axis, 2) for axis in axes), (drawn_step,), 0, 4), threads
    )
