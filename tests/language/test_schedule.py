"""The `Schedule` object: recording rows, undo, steps, knobs, and that Python and text are equal."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import Source
from schedlang.ir.placement import R, S
from schedlang.ir.primitive import registry
from schedlang.language.printer import fmt
from schedlang.schedule import Schedule, create_schedule, load
from tests.language.test_expand import GPT2
from tests.toy_primitives import GPT2LMHeadModel, only_toys

MODEL = GPT2LMHeadModel()


@pytest.fixture(autouse=True)
def _toys() -> Iterator[None]:
    with only_toys():
        yield


@pytest.fixture
def sch() -> Schedule:
    return create_schedule(MODEL)


def tensor_parallel() -> Schedule:
    """The tensor-parallel GPT-2 sample, written in Python."""
    sch = create_schedule(MODEL)
    tp = sch.knob("tp", 2, choices=[1, 2, 4])
    sch.mesh(tp=tp, on="a100x8")
    sch.require(sch.model.config.n_head % tp == 0)
    with sch.step("tensor parallel"):
        sch["transformer.wte"].pad("vocab", multiple=8)
        with sch.at("transformer.h.*") as h:
            h["attn.c_attn"].shard("col", blocks=3, over="tp")
            h["attn.c_proj"].shard("row", over="tp")
            h["mlp.c_fc"].shard("col", over="tp")
            h["mlp.c_proj"].shard("row", over="tp")
        sch.row("verify", "forward", "backward")
    return sch


def load_text(tmp_path: Path, text: str) -> Schedule:
    """The schedule loaded from a file with this text."""
    (tmp_path / "x.sched").write_text(text)
    return load(tmp_path / "x.sched", MODEL)


def test_python_and_text_are_one_language(tmp_path: Path) -> None:
    """A program in Python prints as the text of the same program, and both plan equally."""
    sch = tensor_parallel()
    assert sch.to_sched() == "".join(
        line.split("  #")[0].rstrip() + "\n"
        for line in GPT2.splitlines()
        if not line.startswith("#")
    ).replace("Model\n\n\n", "Model\n\n")
    assert load_text(tmp_path, sch.to_sched()).plan() == sch.plan()


def test_a_text_is_loaded_as_its_file_is(tmp_path: Path) -> None:
    """`load` takes a text of several lines or a path; a missing path is refused."""
    (tmp_path / "x.sched").write_text(GPT2)
    loaded = [load(source, GPT2LMHeadModel()) for source in (GPT2, tmp_path / "x.sched")]
    assert loaded[0].to_sched() == loaded[1].to_sched()
    for missing in ("no.sched", "a/" * 3000 + "x.sched"):
        with pytest.raises(Refusal, match="S000"):
            load(missing, GPT2LMHeadModel())


def test_text_comes_back_as_it_was(tmp_path: Path) -> None:
    """A schedule made from text prints as its canonical form, comments included."""
    loose = GPT2.replace("attn.c_proj  shard(row, over=tp)", "attn.c_proj shard( row,over=tp )")
    assert load_text(tmp_path, loose).to_sched() == fmt(Source("x", loose)) == GPT2


def test_many_ways_to_say_it(tmp_path: Path, sch: Schedule) -> None:
    """Everything that Python can record prints as text with the same plan."""
    micro = sch.knob("micro", 4, range=(1, 8))
    mode = sch.knob("mode", "full", choices=["none", "full"])
    sch.mesh(dp="_", tp=2)
    sch.view("all", of=("dp", "tp"), size=4)
    sch.require(micro * 2 >= sch.model.config.n_layer)
    sch.require("micro % tp == 0")
    sch.require(1 - (micro - 1) <= 0)
    sch.require((micro - 1) * 2 + 10 // (micro * 1) == 8)
    with sch.step("a", relax=["rng"]):
        if mode == "full":
            sch["transformer.h[::2]"].checkpoint(save=["linear", "x.y"])
        with sch.at("**:Linear", where="out_features > 8", except_="lm_head") as layers:
            layers.shard("col", over="tp", output=S(-1), weight=S("out", blocks=(4, 4)), bias=R)
        sch["lm_head"].replace_kernel("sdpa", rng="philox")
        sch.pipeline(order="1F1B", micro=micro * 2)
    with sch.step("b"), sch.at("transformer.h.0") as h, h.at("attn", "mlp") as inner:
        inner["c_proj"].do(registry()["shard"](style="row", over="all", tensors=(("x", R),)))
    reloaded = load_text(tmp_path, sch.to_sched())
    assert reloaded.plan() == sch.plan()
    assert len(sch.plan().actions) == 5
    assert reloaded.to_sched() == sch.to_sched()


def test_the_model_is_not_touched(sch: Schedule) -> None:
    """Planning leaves parameters and attributes of the model unchanged."""
    before = {name: value.clone() for name, value in MODEL.state_dict().items()}
    keys = set(vars(MODEL))
    tensor_parallel()
    assert set(vars(MODEL)) == keys
    assert all((MODEL.state_dict()[name] == value).all() for name, value in before.items())


def test_a_refusal_changes_nothing(sch: Schedule) -> None:
    """A refused call leaves plan and text unchanged, and names the line of Python."""
    sch.mesh(tp=2)
    sch["lm_head"].checkpoint()
    plan, text = sch.plan(), sch.to_sched()
    with pytest.raises(Refusal) as caught:
        sch["transformer.*"].shard("col", over="tp")
    message = caught.value.render()
    assert 'sch["transformer.*"].shard("col", over="tp")' in message
    assert "test_schedule.py" in message and "cannot split 21" in message
    assert sch.plan() is plan and sch.to_sched() == text


@pytest.mark.parametrize(
    "call, said",
    [
        (lambda s: s["lm_hed"].checkpoint(), "did you mean `lm_head`?"),
        (lambda s: s["lm_head"].chekpoint(), "did you mean `checkpoint`?"),
        (lambda s: s["lm_head"].checkpoint(save=3), "this is 3"),
        (lambda s: s["lm_head"].checkpoint(save=object()), "has no form in a schedule"),
        (lambda s: s["lm_head"].pad("out", multiple=float("nan")), "cannot be written"),
        (lambda s: s["h.*..x"], "1 | h.*..x"),
        (lambda s: s.mesh(tp=0), "an axis must have 1 to"),
        (lambda s: s.require(s.model.config.n_head == 5), "`require` fails"),
        (lambda s: s.require(False), "`require` fails"),
        (lambda s: s.require("n_head == 5"), "unknown name `n_head`"),
        (lambda s: s.set(tpp=3), "no knob `tpp`"),
        (lambda s: s.undo(to="nix"), "there is no step `nix`"),
        (lambda s: s.why("lm_hed"), "did you mean `lm_head`?"),
        (lambda s: s.use("nix.sched"), "no such file"),
        (lambda s: s.expect("time < 3ms"), "`time` is not a measure of a plan"),
    ],
)
def test_mistakes(sch: Schedule, call: Any, said: str) -> None:
    """Each mistake in Python is refused with the same message as in text."""
    with pytest.raises(Refusal) as caught:
        call(sch)
    assert said in caught.value.render()


def test_a_step_is_all_or_nothing(sch: Schedule) -> None:
    """An exception in a step's block removes the whole step; a caught refusal keeps the other
    rows."""
    sch.mesh(tp=2)
    plan = sch.plan()
    with pytest.raises(ZeroDivisionError), sch.step("a"):
        sch["lm_head"].checkpoint()
        raise ZeroDivisionError
    assert sch.plan() is plan and "step" not in sch.to_sched()
    with sch.step("a"):
        with pytest.raises(Refusal):
            sch["lm_head"].shard("cool", over="tp")
        sch["lm_head"].checkpoint()
    assert len(sch.plan().actions) == 1


def test_undo() -> None:
    """`undo` removes the last row, or everything from the start of a step."""
    sch = tensor_parallel()
    with sch.step("memory"):
        sch["transformer.h.0"].checkpoint()
        sch["transformer.h.1"].checkpoint()
    sch.undo()
    assert [a.sites for a in sch.plan().actions[-1:]] == [("transformer.h.0",)]
    sch.undo()
    assert "memory" not in sch.to_sched()
    assert sch.plan() == tensor_parallel().plan()
    sch.undo(to="tensor parallel")
    assert sch.plan().actions == () and "knob tp" in sch.to_sched()
    with sch.step("x"), pytest.raises(Refusal, match="inside an open step"):
        sch.undo()


def test_set_plans_again() -> None:
    """Setting a knob plans everything again; a refused setting changes nothing."""
    sch = tensor_parallel()
    sch.set(tp=4)
    assert sch.plan().mesh.sizes == {"tp": 4} and dict(sch.plan().decisions) == {"tp": 4}
    plan = sch.plan()
    with pytest.raises(Refusal, match="cannot be 3"):
        sch.set(tp=3)
    assert sch.plan() is plan


def test_knobs_count_as_their_values(sch: Schedule) -> None:
    """A knob behaves as its value in Python, follows settings, and prints as its name."""
    n = sch.knob("n", 2)
    assert n + 1 == 3 and list(range(n)) == [0, 1] and int(n) == 2 and f"{n}" == "2"
    sch["transformer.h[:n]"].checkpoint()
    sch["lm_head"].pad("vocab", multiple=n * 4)
    assert "pad(vocab, multiple=n * 4)" in sch.to_sched()
    sch.set(n=3)
    assert n == 3 and len(sch.plan().actions[0].sites) == 3


def test_why(tmp_path: Path) -> None:
    """`why` names the row, its place, its step and the selectors that led to the module."""
    sch = load_text(tmp_path, GPT2)
    text = sch.why("transformer.h.3.mlp.c_fc.weight")
    assert text.splitlines()[0] == "transformer.h.3.mlp.c_fc.weight   float32[32, 8]"
    assert 'x.sched:15   shard(col, over=tp)   step "tensor parallel", selected by' in text
    assert "`transformer.h.*` then `mlp.c_fc`" in text
    assert "verify" not in text
    assert "test_schedule.py" in tensor_parallel().why("transformer.wte")


def test_diff() -> None:
    """`diff` compares two schedules by their actions."""
    old, new = tensor_parallel(), tensor_parallel()
    assert not old.diff(new) and str(old.diff(new)) == "no difference"
    new.undo()
    new.set(tp=4)
    with new.step("memory"):
        new["transformer.h.*"].checkpoint()
    difference = old.diff(new)
    assert [(c.sign, c.name) for c in difference.changes] == [("-", "verify"), ("+", "checkpoint")]
    text = str(difference)
    assert "+ transformer.h.*" in text and "x4" in text and "tp 2 -> 4" in text
    json.dumps(difference.to_json())


def test_record() -> None:
    """`to_json` has the decisions and the rows."""
    record: Any = json.loads(json.dumps(tensor_parallel().to_json()))
    assert record["decisions"] == {"tp": 2}
    row = record["actions"][1]
    assert row["do"] == "shard" and row["args"] == {"style": "col", "over": "tp", "blocks": 3}
    assert len(row["at"]) == 4 and row["from"][0].endswith("test_schedule.py")


def test_definitions_from_python(sch: Schedule, tmp_path: Path, monkeypatch: Any) -> None:
    """Definitions of a library are called like primitives."""
    (tmp_path / "my.sched").write_text("schedule 1\ndef keep() {\n  attn  checkpoint()\n}\n")
    monkeypatch.chdir(tmp_path)
    sch.use("my.sched", as_="my")
    sch["transformer.h[:2]"].my.keep()
    assert sch.plan().actions[0].sites == ("transformer.h.0.attn", "transformer.h.1.attn")
    assert load_text(tmp_path, sch.to_sched()).plan() == sch.plan()


def test_verbs_are_offered_where_one_types(sch: Schedule) -> None:
    """`dir` lists every primitive, on the schedule and on a cursor."""
    assert set(registry()) <= set(dir(sch)) and set(registry()) <= set(dir(sch["transformer.h.*"]))


def test_modules_of_a_cursor(sch: Schedule) -> None:
    """A cursor lists the modules that it selects."""
    assert sch["transformer.h.0.mlp.*"].modules == (
        "transformer.h.0.mlp.c_fc",
        "transformer.h.0.mlp.c_proj",
    )


TOP = ["transformer.h.*", "transformer.h[1:3]", "transformer.h[:n]", "lm_head", "nix"]
INNER = ["attn", "mlp.{c_fc,c_proj}", "attn.c_attn?", "ln_1", "nix?"]
CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("shard", ("col",), {"over": "tp"}),
    ("shard", ("row",), {"over": "dp", "blocks": (4, 4), "output": S("seq")}),
    ("shard", (), {"over": ("dp", "tp"), "weight": R}),
    ("checkpoint", (), {"save": ["linear", "a.b", "two words"]}),
    ("pad", ("vocab",), {"multiple": -8}),
    ("replace_kernel", ("sdpa",), {"rng": "philox"}),
    ("pipeline", (), {"order": "1F1B", "micro": 4}),
    ("verify", ("forward",), {"rtol": 1e-05}),
]
CALL = st.sampled_from(CALLS)
ROW = st.tuples(st.sampled_from([None, *TOP]), CALL)
SCOPE = st.tuples(
    st.sampled_from(TOP[:3]),
    st.lists(st.tuples(st.sampled_from([None, *INNER]), CALL), min_size=1, max_size=4),
)
STEP = st.tuples(st.sampled_from(["a", "b", "c d"]), st.lists(SCOPE | ROW, min_size=1, max_size=4))


def add_row(scope: Any, row: Any) -> None:
    """Add one row; a refused one must leave no trace, which the final comparison shows."""
    path, (name, args, keywords) = row
    with suppress(Refusal):
        getattr(scope[path] if path else scope, name)(*args, **keywords)


def add_steps(sch: Schedule, steps: Any) -> None:
    """Add the steps with their scopes and rows."""
    for name, body in steps:
        with suppress(Refusal), sch.step(name, relax=["rng"] if name == "a" else []):
            for path, inner in body:
                if isinstance(inner, tuple):
                    add_row(sch, (path, inner))
                    continue
                with suppress(Refusal), sch.at(path) as scope:
                    for row in inner:
                        add_row(scope, row)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(STEP, min_size=1, max_size=3))
def test_whatever_python_builds_text_says(tmp_path: Path, steps: Any) -> None:
    """For any program the text plans equally and prints itself, also after each `undo`."""
    sch = create_schedule(MODEL)
    sch.knob("n", 2, range=(0, 4))
    sch.mesh(dp=2, tp=4)
    add_steps(sch, steps)
    reloaded = load_text(tmp_path, sch.to_sched())
    assert reloaded.plan() == sch.plan()
    assert reloaded.to_sched() == sch.to_sched() == fmt(Source("x", sch.to_sched()))
    for _ in range(len(sch.plan().actions)):
        sch.undo()
        assert load_text(tmp_path, sch.to_sched()).plan() == sch.plan()
