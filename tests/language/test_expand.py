"""Expanding statements into the actions of a plan: knobs, meshes, definitions, steps, refusals."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import Source
from schedlang.ir.model import ModelFacts
from schedlang.ir.placement import R
from schedlang.language.syntax import parse
from schedlang.passes.elaborate.expand import expand
from schedlang.passes.elaborate.state import Settings, State
from tests.samples import SAMPLES
from tests.strategies import with_damage, with_swaps
from tests.toy_primitives import GPT2LMHeadModel, only_toys

FACTS = ModelFacts(GPT2LMHeadModel())
GPT2 = """\
schedule 1 for GPT2LMHeadModel

# One-dimensional tensor parallelism, placed as Megatron places it.
knob tp: int = 2 in [1, 2, 4]

mesh(tp=tp) on a100x8

require model.config.n_head % tp == 0

step "tensor parallel" {
  transformer.wte  pad(vocab, multiple=8)
  at transformer.h.* {
    attn.c_attn  shard(col, blocks=3, over=tp)  # q, k and v
    attn.c_proj  shard(row, over=tp)
    mlp.c_fc     shard(col, over=tp)
    mlp.c_proj   shard(row, over=tp)
  }
  verify(forward, backward)
}
"""


@pytest.fixture(autouse=True)
def _toys() -> Iterator[None]:
    with only_toys():
        yield


def expand_text(text: str, model: bool = True, **settings: Any) -> State:
    """Expand a schedule with the model's facts or without a model."""
    name = settings.pop("name", "gpt2.sched")
    return expand(parse(Source(name, text)), FACTS if model else None, Settings(**settings))


def plan_rows(state: State) -> list[tuple[str, int, str]]:
    """The rows of the plan: primitive with arguments, number of modules, step."""
    assert state.plan
    return [(str(a.primitive), len(a.sites), a.step) for a in state.plan.actions]


def refusal_of(text: str, model: bool = True, **settings: Any) -> Refusal:
    """The refusal of a schedule."""
    with pytest.raises(Refusal) as caught:
        expand_text(text, model, **settings)
    return caught.value


def step_text(text: str) -> str:
    """A schedule with a mesh and one step of these rows."""
    return f'schedule 1\nknob tp: int = 2 in [1, 2, 4]\nmesh(tp=tp)\nstep "a" {{\n{text}\n}}\n'


def test_a_file_gives_its_actions_in_order() -> None:
    """Each row gives one action for all its modules, with its step, arguments and line."""
    state = expand_text(GPT2)
    assert plan_rows(state) == [
        ("pad(dim=vocab, multiple=8)", 1, "tensor parallel"),
        ("shard(style=col, over=tp, blocks=3)", 4, "tensor parallel"),
        ("shard(style=row, over=tp)", 4, "tensor parallel"),
        ("shard(style=col, over=tp)", 4, "tensor parallel"),
        ("shard(style=row, over=tp)", 4, "tensor parallel"),
        ("verify(what=('forward', 'backward'))", 1, "tensor parallel"),
    ]
    assert state.plan and state.plan.decisions == (("tp", 2),)
    assert state.plan.mesh.sizes == {"tp": 2} and state.plan.mesh.device == "a100x8"
    assert state.plan.actions[1].span and state.plan.actions[1].span.line == 13


def test_settings() -> None:
    """Knobs and axes can be set from outside; setting an axis also sets the knob that sizes it."""
    assert expand_text(GPT2, knobs={"tp": "4"}).axes == {"tp": 4}
    by_mesh = expand_text(GPT2, mesh={"tp": 4})
    assert by_mesh.axes == {"tp": 4} and by_mesh.knobs["tp"].value == 4
    assert "did you mean `tp`" in refusal_of(GPT2, knobs={"ttp": 4}).render()
    assert "no axis `pp`" in refusal_of(GPT2, mesh={"pp": 2}).render()
    assert (
        "set to 2 and its axis to 4" in refusal_of(GPT2, knobs={"tp": 2}, mesh={"tp": 4}).render()
    )
    assert refusal_of(GPT2, mesh={"tp": 3}).diagnostic.code == "S103"


@pytest.mark.parametrize(
    "mesh, world, sizes",
    [
        ("mesh(dp=_, tp=2)", 8, {"dp": 4, "tp": 2}),
        ("mesh(dp=_, tp=2) on h100x64", None, {"dp": 32, "tp": 2}),
        ("mesh(dp=_, tp=2) on h100x64", 4, {"dp": 2, "tp": 2}),
        ("mesh(dp=_, tp=4)", None, {"dp": 2, "tp": 4}),
        ("mesh(dp=2, tp=4)", None, {"dp": 2, "tp": 4}),
    ],
)
def test_the_rest_of_the_ranks(mesh: str, world: int | None, sizes: dict[str, int]) -> None:
    """`_` takes what remains of the job's ranks, else of the machine's, else 2."""
    assert expand_text(f"schedule 1\n{mesh}\n", world=world).axes == sizes


def test_views_fold_axes() -> None:
    """A view has as many ranks as its axes together."""
    text = "schedule 1\nmesh(dp=2, tp=4)\nview cp = 8 of (dp, tp)\nrequire cp == 8\n"
    assert expand_text(text).axes == {"dp": 2, "tp": 4, "cp": 8}
    assert "has 8 ranks, not 4" in refusal_of(text.replace("= 8 of", "= 4 of")).render()


def test_when_takes_one_branch() -> None:
    """The condition is evaluated before any action; without a model both branches are checked."""
    text = step_text(
        "when tp > 1 { lm_head checkpoint() } else { lm_head pad(vocab, multiple=8) }\n"
        "when model.config.n_head == 5 { lm_head pad(vocab, multiple=8) }"
    )
    assert plan_rows(expand_text(text)) == [("checkpoint()", 1, "a")]
    assert expand_text(text, model=False).plan is None
    assert refusal_of(step_text("when tp { }")).diagnostic.code == "S304"


DEFS = """\
schedule 1
mesh(tp=2)

def attention(over: axis, out=R) {
  c_attn  shard(col, over=over, output=out)
}

def block(over: axis, seq: bool = false) {
  at attn { attention(over=over) }
  when seq {
    at mlp { attention(over) }
  }
}

step "a" {
  at transformer.h[0:2] { block(over=tp) }
}
"""


def test_definitions_are_called_like_primitives() -> None:
    """A `def` runs its rows in the caller's scope, with defaults and typed arguments."""
    state = expand_text(DEFS)
    assert plan_rows(state) == [("shard(style=col, over=tp, output=R)", 2, "a")]
    assert state.plan and state.plan.actions[0].primitive.output is R  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "old, new, code, said",
    [
        ("block(over=tp)", "block(ovr=tp)", "S302", "did you mean `over`?"),
        ("block(over=tp)", "block(over=tpp)", "S204", "did you mean `tp`?"),
        ("block(over=tp)", "block()", "S305", "needs `over`"),
        ("block(over=tp)", "block(over=tp, seq=3)", "S304", "`true` or `false`"),
        ("block(over=tp)", "blok(over=tp)", "S301", "did you mean `block`?"),
        ("attention(over=over)", "block(over=over)", "S301", "nor a `def` above this line"),
        ("block(over=tp)", "block(over=tp, seq=true)", "S201", "in this call of `block`"),
        ("def attention", "def shard", "S101", "`shard` is a primitive"),
        ("(over: axis, out", "(over: axsis, out", "S102", "did you mean `axis`?"),
    ],
)
def test_definition_mistakes(old: str, new: str, code: str, said: str) -> None:
    """Calls of definitions are checked like calls of primitives; recursion is refused."""
    refusal = refusal_of(DEFS.replace(old, new))
    assert refusal.diagnostic.code == code and said in refusal.render()


def test_libraries(tmp_path: Path) -> None:
    """`use` imports definitions under a prefix, by a path relative to the file."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "base.sched").write_text(
        "schedule 1\nknob deep: int = 1\ndef norm() {\n  ln_1  checkpoint()\n}\n"
    )
    (tmp_path / "lib" / "my.sched").write_text(
        'schedule 1\nuse "base.sched" as base\n'
        "def half() {\n  at transformer.h[:2] { base.norm() }\n}\n"
    )
    main = 'schedule 1\nuse "lib/my.sched" as my\nstep "a" {\n  my.half()\n}\n'
    state = expand_text(main, name=str(tmp_path / "main.sched"))
    assert plan_rows(state) == [("checkpoint()", 2, "a")]

    def said(schedule: str) -> str:
        return refusal_of(schedule, name=str(tmp_path / "main.sched")).render()

    assert "no such file" in said('schedule 1\nuse "nix.sched"\n')
    assert "there is no primitive `my.hal`" in said(main.replace("my.half()", "my.hal()"))
    assert "has no knob `deeep`" in said(
        main.replace("lib/my.sched", "lib/base.sched").replace("as my", "as my (deeep=1)")
    )
    (tmp_path / "lib" / "base.sched").write_text('schedule 1\nuse "my.sched" as my\n')
    assert "these files use each other" in said(main)


@pytest.mark.parametrize(
    "text, code, said",
    [
        (step_text("lm_head  shrad(col, over=tp)"), "S301", "did you mean `shard`?"),
        (step_text("lm_head  shard(col, over=tpp)"), "S204", "did you mean `over=tp`?"),
        (
            step_text("lm_head shard(col, over=tp)").replace("mesh(tp=tp)", "mesh(dp=tp)"),
            "S204",
            "the mesh has no axis `tp`",
        ),
        (
            step_text("lm_head pad(vocab, multiple=n)").replace(
                "knob tp", "knob n: bool = true\nknob tp"
            ),
            "S304",
            "`n` is true",
        ),
        (step_text("lm_head  shard(rows, over=tp)"), "S303", "choose one of `col`, `row`, `vocab`"),
        (step_text("lm_head  shard(col, block=3, over=tp)"), "S302", "did you mean `blocks`?"),
        (step_text("lm_head  shard(vocab, over=tp)"), "S402", "cannot split 21 evenly 2 ways"),
        (step_text("lm_hed  checkpoint()"), "S201", "did you mean `lm_head`?"),
        (step_text('lm_head  pipeline(order="1F1B", micro=2)'), "S306", "takes no selector"),
        (step_text('at transformer.h.* { pipeline(order="x", micro=2) }'), "S306", "has 4 modules"),
        (step_text("lm_head  pad(vocab)"), "S305", "needs `multiple`"),
        (step_text("verfy(forward)"), "S301", "did you mean `verify`?"),
        (step_text("verify(forwards)"), "S303", "`forward`"),
        ("schedule 1 for Llama\n", "S110", "the model is of class GPT2LMHeadModel"),
        ("schedule 1\nknob a: int = 1\nknob a: int = 2\n", "S101", "first declared here"),
        ("schedule 1\nmesh(a=2)\nmesh(b=2)\n", "S101", "the mesh is declared twice"),
        ("schedule 1\nmesh(a=0)\n", "S111", "1 to 1048576 ranks"),
        ("schedule 1\nmesh(a=_, b=_)\n", "S111", "only one axis may be"),
        ("schedule 1\nmesh(a=_, b=3) on x8\n", "S111", "the other axes take 3 of 8 ranks"),
        ("schedule 1\nknob a: int = 1\nmesh(a=2)\n", "S101", "`a` is a knob and also an axis"),
        ("schedule 1\nknob n: int = 1\nmesh(a=m)\n", "S111", "is `m`"),
        ("schedule 1\nview v of (a, b)\n", "S204", "no axis `a`"),
        ('schedule 1\nstep "a" relax(rngg) {\n}\n', "S303", "did you mean `rng`?"),
        ('schedule 1\nstep "a" {\n}\nstep "a" {\n}\n', "S101", "two steps `a`"),
        ("schedule 1\nlm_head checkpoint()\nmesh(tp=2)\n", "S111", "above the first row"),
        ("schedule 1\nrequire 2\n", "S304", "needs a condition"),
    ],
)
def test_refusals(text: str, code: str, said: str) -> None:
    """Each mistake is refused with its code, its place and a correct form."""
    refusal = refusal_of(text)
    assert [d.code for d in refusal.diagnostics] == [code]
    assert said in refusal.render() and refusal.diagnostic.primary.span


def test_requirement() -> None:
    """A failed `require` shows the value, the knobs, and knob values that would satisfy it."""
    text = GPT2.replace("n_head % tp == 0", "n_head % tp == 2")
    assert (
        refusal_of(text, knobs={"tp": 4}).render()
        == """\
error[S104]: `require` fails
 --> gpt2.sched:8:1
  |
8 | require model.config.n_head % tp == 2
  | ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^ model.config.n_head % tp is 0
  |
  = note: with tp = 4"""
    )
    text = GPT2.replace("n_head % tp == 0", "n_head // tp == 4")
    assert "= help: `tp` may be `1`" in refusal_of(text).render()


def test_all_independent_mistakes() -> None:
    """Every mistake is reported once; mistakes that only follow from others are not."""
    text = """\
schedule 1
knob tp: int = 3 in [1, 2]
mesh(tp=tp)
require tp < 2
step "a" {
  lm_head  shard(cl, over=tp)
  lm_head  chekpoint()
  transformer.wte  shard(vocab, over=tp)
}
"""
    assert [d.code for d in refusal_of(text).diagnostics] == ["S103", "S303", "S301"]
    text = step_text("lm_head shard(cl, over=tp)").replace("mesh(tp=tp)", "mesh(tp=0)")
    assert [d.code for d in refusal_of(text).diagnostics] == ["S111", "S303"]
    text = step_text("lm_head shard(vocab, over=tp)\ntransformer shard(over=tp)\nlm_head pad(x)\n")
    assert [d.code for d in refusal_of(text).diagnostics] == ["S402", "S305"]
    text = step_text("lm_head shard(col, over=tp)\ntransformer.wte shard(vocab, over=tp)")
    assert [d.code for d in refusal_of(text).diagnostics] == ["S402"]


def test_a_refused_row_leaves_no_trace() -> None:
    """A row that is refused at one module is applied to none."""
    state = expand_text(step_text("lm_head checkpoint()"))
    before = state.plan
    with pytest.raises(Refusal):
        expand_text(step_text("lm_head checkpoint()\ntransformer.*  shard(col, over=tp)"))
    assert state.plan is before


def test_a_step_must_allow_what_its_rows_give_up() -> None:
    """A row that changes more than rounding needs the step's `relax`; both places are shown."""
    text = """\
schedule 1
step "kernels" {
  lm_head  replace_kernel(x, rng=philox)
}
"""
    assert (
        refusal_of(text).render()
        == """\
error[S505]: this row changes numerics (`rng`): its step does not allow that
 --> gpt2.sched:3:12
  |
2 | step "kernels" {
  | -------------- allows only rounding
3 |   lm_head  replace_kernel(x, rng=philox)
  |            ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^ results may differ in rng
  |
  = help: allow it: `step "kernels" relax(rng) {`"""
    )
    assert plan_rows(expand_text(text.replace('"kernels" {', '"kernels" relax(rng) {')))


def test_without_a_model() -> None:
    """Without a model, syntax, names, domains and arguments are checked, but not selectors."""
    assert expand_text(GPT2, model=False).plan is None
    assert expand_text(GPT2.replace("transformer.wte", "nix"), model=False).plan is None
    assert refusal_of(GPT2.replace("row", "rows"), model=False).diagnostic.code == "S303"
    assert refusal_of(GPT2.replace("over=tp", "over=pt"), model=False).diagnostic.code == "S204"


def test_the_library_sample_is_whole() -> None:
    """The sample library has all its definitions, and checks without a model."""
    assert set(expand_text(SAMPLES["megatron.sched"], model=False).defs) == {
        "attention",
        "swiglu",
        "decoder_block",
    }


QUICK = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@QUICK
@given(
    st.sampled_from([GPT2, DEFS]).flatmap(lambda t: with_damage(t) | with_swaps(t)), st.booleans()
)
def test_damage_is_refused_or_executed(text: str, model: bool) -> None:
    """A damaged schedule is refused with spans, or is a valid other schedule; nothing else."""
    try:
        expand_text(text, model)
    except Refusal as refusal:
        assert refusal.render().startswith("error[S")
        assert all(d.primary.span for d in refusal.diagnostics)


@pytest.mark.deep
@settings(QUICK, max_examples=3000)
@given(
    st.sampled_from([GPT2, DEFS]).flatmap(lambda t: with_damage(t) | with_swaps(t)), st.booleans()
)
def test_damage_at_length(text: str, model: bool) -> None:
    """The same on many more damaged texts."""
    try:
        expand_text(text, model)
    except Refusal as refusal:
        assert all(d.primary.span for d in refusal.diagnostics)
