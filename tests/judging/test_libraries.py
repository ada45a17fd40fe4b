"""Programs of `examples/judge`: each equals its original, where its library is installed."""

import ast
import importlib.util
import io
import re
import tokenize
from pathlib import Path

import pytest

import schedlang

PROGRAMS = Path(__file__).parents[2] / "examples" / "judge"
NEEDS = {
    "decoder/megatron_tp": ("megatron.core",),
    "decoder/torch_by_hand": (),
    "decoder/torch_fsdp1": (),
    "decoder/torch_tp_fsdp2": (),
    "llama/accelerate_ddp": ("transformers", "accelerate"),
    "llama/accelerate_fsdp2": ("transformers", "accelerate"),
    "llama/accelerate_saved": ("transformers", "accelerate"),
    "llama/deepspeed_zero": ("transformers", "deepspeed"),
    "llama/transformers_saved": ("transformers",),
    "llama3/torchtitan_tp_fsdp": ("torchtitan",),
    "llama_gqa/megatron_tp": ("megatron.core", "transformers"),
    "llama_lora/peft_ddp": ("transformers", "peft"),
    "llama_lora/peft_fsdp2": ("transformers", "peft"),
    "llama_lora/peft_tp": ("transformers", "accelerate", "peft"),
    "mixtral/megatron_ep": ("megatron.core", "transformers"),
    "qwen3/transformers_fsdp": ("transformers", "accelerate"),
    "qwen3/transformers_tp": ("transformers", "accelerate"),
    "qwen3_moe/transformers_ep": ("transformers", "accelerate"),
}
OWN_ENVIRONMENT = {"deepspeed", "megatron.core", "peft", "torchtitan"}
ORDINARY = {  # one program per library; others are marked deep
    *("decoder/megatron_tp", "llama/deepspeed_zero", "llama3/torchtitan_tp_fsdp"),
    "llama_lora/peft_ddp",
}
DROPOUTS = {"llama": 2, "llama_lora": 10, "qwen3": 2} | dict.fromkeys(
    ("decoder", "llama3", "llama_gqa", "mixtral", "qwen3_moe"), 0
)
OTHER_SETTINGS = [  # a setting of a program, and another one that its page or comment names
    ("decoder/torch_fsdp1", "NAMES = True", "NAMES = False"),
    ("llama/deepspeed_zero", "STAGE = 3", "STAGE = 1"),
    ("llama/deepspeed_zero", "STAGE = 3", "STAGE = 2"),
]


def count_lines(path: Path) -> int:
    """Count lines of code, without docstrings and comments."""
    text = path.read_text()
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    rows = {
        row
        for token in tokens
        if token.string.strip() and token.type != tokenize.COMMENT
        for row in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.FunctionDef)) and ast.get_docstring(node):
            docstring = node.body[0]
            rows -= set(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return len(rows)


def test_the_page_counts_their_lines() -> None:
    """docs/found.md and docs/judge.md list each program with its ranks and lines."""
    docs = PROGRAMS.parents[1] / "docs"
    pages = [(docs / page).read_text() for page in ("found.md", "judge.md")]
    for name in NEEDS:
        path = (PROGRAMS / name).with_suffix(".py")
        world = re.search(r"^world = (\d+)$", path.read_text(), re.M)
        assert world, name
        row = f"| `{name}` | {world[1]} | {count_lines(path)} |"
        assert all(row in page for page in pages), row


def test_each_example_is_listed() -> None:
    """Every example is listed in this test."""
    programs = {path for path in PROGRAMS.glob("*/*.py") if path.name != "original.py"}
    assert sorted(NEEDS) == sorted(f"{path.parent.name}/{path.stem}" for path in programs)
    installed = (PROGRAMS.parents[1] / "tests" / "judging" / "requirements.txt").read_text()
    for package in OWN_ENVIRONMENT:  # CI installs it and judges one program
        assert any(package in NEEDS[name] for name in ORDINARY), package
        assert f"{package.replace('.', '-')}==" in installed, package


def marks_of(name: str, ordinary: bool = True) -> list[pytest.MarkDecorator]:
    """Return the marks of a program whose library needs its own environment."""
    if OWN_ENVIRONMENT.isdisjoint(NEEDS[name]):
        return []
    return [pytest.mark.others, *([] if ordinary and name in ORDINARY else [pytest.mark.deep])]


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks_of(name)) for name in NEEDS])
def test_the_program_equals_its_original(name) -> None:
    """Each library's program has the gradients, steps and dropout of its original."""
    assert_equal(name, (PROGRAMS / name).with_suffix(".py"))


@pytest.mark.parametrize(
    "name, given, other",
    [pytest.param(*one, marks=marks_of(one[0], False)) for one in OTHER_SETTINGS],
)
def test_another_setting_equals_it_too(name, given, other, tmp_path) -> None:
    """A program with another setting equals its original too."""
    text = (PROGRAMS / name).with_suffix(".py").read_text()
    assert text.count(given) == 1
    changed = tmp_path / "program.py"
    changed.write_text(text.replace(given, other))
    assert_equal(name, changed)


def assert_equal(name: str, program: Path) -> None:
    """Judge a program, or skip where its packages are not installed."""
    for package in NEEDS[name]:
        if importlib.util.find_spec(package.partition(".")[0]) is None:  # a broken install fails
            pytest.skip(f"{package} is not installed: tests/judging/requirements.txt")
    folder = name.partition("/")[0]
    report = schedlang.verify_program(program, model=PROGRAMS / folder / "original.py")
    assert report.ok, str(report)
    assert not any("its part of the whole" in gap.condition for gap in report.gaps), report.gaps
    if name.endswith("_saved"):
        loaded = {row.name for row in report.rows if row.kind == "loaded state"}
        assert {"exp_avg of model.norm.weight", "model.norm.weight"} <= loaded, loaded
        assert any(row.kind == "step after loading" for row in report.rows)
    dropped = {row.name for row in report.rows if row.kind == "dropout"}
    assert len(dropped) == DROPOUTS[folder], dropped
