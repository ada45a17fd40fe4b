"""The programs of `examples/judge` equal their originals, where a library is installed."""

import ast
import importlib.util
import io
import re
import tokenize
from pathlib import Path

import pytest

import schedlang

JUDGED = Path(__file__).parents[2] / "examples" / "judge"
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
APART = {"deepspeed", "megatron.core", "peft", "torchtitan"}
ORDINARY = {  # one of each of these libraries; others are deep
    *("decoder/megatron_tp", "llama/deepspeed_zero", "llama3/torchtitan_tp_fsdp"),
    "llama_lora/peft_ddp",
}
DROPOUTS = {"llama": 2, "llama_lora": 10, "qwen3": 2} | dict.fromkeys(
    ("decoder", "llama3", "llama_gqa", "mixtral", "qwen3_moe"), 0
)
OTHERWISE = [  # a setting of a program, and another that its page or its comment names
    ("decoder/torch_fsdp1", "NAMES = True", "NAMES = False"),
    ("llama/deepspeed_zero", "STAGE = 3", "STAGE = 1"),
    ("llama/deepspeed_zero", "STAGE = 3", "STAGE = 2"),
]


def lines(path: Path) -> int:
    """What a user writes: lines with code, without docstrings and comments."""
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
            first = node.body[0]
            rows -= set(range(first.lineno, (first.end_lineno or 0) + 1))
    return len(rows)


def test_the_page_counts_their_lines() -> None:
    """Pages of findings and of seconds list each program, with its ranks and the lines of it."""
    docs = JUDGED.parents[1] / "docs"
    pages = [(docs / page).read_text() for page in ("found.md", "judge.md")]
    for name in NEEDS:
        path = (JUDGED / name).with_suffix(".py")
        world = re.search(r"^world = (\d+)$", path.read_text(), re.M)
        assert world, name
        row = f"| `{name}` | {world[1]} | {lines(path)} |"
        assert all(row in page for page in pages), row


def test_each_example_is_listed() -> None:
    """No example is left out of this test."""
    found = {path for path in JUDGED.glob("*/*.py") if path.name != "original.py"}
    assert sorted(NEEDS) == sorted(f"{path.parent.name}/{path.stem}" for path in found)
    installed = (JUDGED.parents[1] / "tests" / "judging" / "requirements.txt").read_text()
    for package in APART:  # one is judged by CI, which installs it
        assert any(package in NEEDS[name] for name in ORDINARY), package
        assert f"{package.replace('.', '-')}==" in installed, package


def marks(name: str, ordinary: bool = True) -> list[pytest.MarkDecorator]:
    """Where a program's libraries are installed apart, it is run with those of `others`."""
    if APART.isdisjoint(NEEDS[name]):
        return []
    return [pytest.mark.others, *([] if ordinary and name in ORDINARY else [pytest.mark.deep])]


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in NEEDS])
def test_the_program_equals_its_original(name) -> None:
    """What a library makes of a model computes its gradients and trains as it does, and drops."""
    equals(name, (JUDGED / name).with_suffix(".py"))


@pytest.mark.parametrize(
    "name, given, other", [pytest.param(*one, marks=marks(one[0], False)) for one in OTHERWISE]
)
def test_another_setting_equals_it_too(name, given, other, tmp_path) -> None:
    """The same program with another of its settings."""
    text = (JUDGED / name).with_suffix(".py").read_text()
    assert text.count(given) == 1
    changed = tmp_path / "program.py"
    changed.write_text(text.replace(given, other))
    equals(name, changed)


def equals(name: str, program: Path) -> None:
    """Judge it, where what it needs is installed."""
    for package in NEEDS[name]:
        if importlib.util.find_spec(package.partition(".")[0]) is None:  # a broken one fails
            pytest.skip(f"{package} is not installed: tests/judging/requirements.txt")
    folder = name.partition("/")[0]
    report = schedlang.verify_program(program, model=JUDGED / folder / "original.py")
    assert report.ok, str(report)
    assert not any("its part of the whole" in gap.condition for gap in report.gaps), report.gaps
    if name.endswith("_saved"):
        loaded = {row.name for row in report.rows if row.kind == "loaded state"}
        assert {"exp_avg of model.norm.weight", "model.norm.weight"} <= loaded, loaded
        assert any(row.kind == "step after loading" for row in report.rows)
    dropped = {row.name for row in report.rows if row.kind == "dropout"}
    assert len(dropped) == DROPOUTS[folder], dropped
