"""docs/found.md: its programs print what the page says, with the installed torch."""

import re
import socket
from pathlib import Path

import pytest
import torch

from tests import forks

PAGE = Path(__file__).parents[2] / "docs" / "found.md"


TORCH = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="the page is about 2.13"
)


@TORCH
def test_a_group_of_one_divides_twice(tmp_path: Path) -> None:
    """The page's program prints what stands below it: 1/4 in float32, 1/16 in float64."""
    assert run_example("FSDP2 divides", tmp_path) == ""


@TORCH
def test_a_gradient_of_a_gather_is_laid_otherwise(tmp_path: Path) -> None:
    """The gradient without a gather, and behind one."""
    assert run_example("gloo gives gradients", tmp_path) == ""


@TORCH
def test_what_is_written_into_a_dict_is_lost(tmp_path: Path) -> None:
    """A value that the second layer writes is lost in a copy of the dict."""
    assert run_example("FSDP2 loses", tmp_path) == ""


@TORCH
def test_a_kept_product_is_scaled_twice(tmp_path: Path) -> None:
    """A difference quotient agrees with the plain gradient, not with the checkpoint's."""
    assert run_example("Selective checkpointing", tmp_path) == ""


@TORCH
def test_a_running_sum_of_the_last_dim(tmp_path: Path) -> None:
    """The sum by two names of its dim, and that of a plain tensor."""
    assert run_example("DTensor's running sums", tmp_path) == ""


@TORCH
def test_outputs_of_hooks_are_left_out(tmp_path: Path) -> None:
    """Outputs that hooks collect are None once the model is sharded."""
    transformers = pytest.importorskip("transformers")
    if not transformers.__version__.startswith("5.24."):
        pytest.skip("the page is about 5.24")
    assert run_example("FSDP2 hides a model", tmp_path) == ""


def test_an_activation_is_not_reduced(tmp_path: Path) -> None:
    """Ranks have partial gradients; a difference quotient confirms the sum."""
    transformers = pytest.importorskip("transformers")
    if not transformers.__version__.startswith(("5.23.", "5.24.")):
        pytest.skip("the page is about 5.23 and 5.24")
    assert run_example("Apertus", tmp_path) == ""


def run_example(heading: str, folder: Path) -> str:
    """Run the program below a heading; return its output if it differs from the page, else "".

    Its ranks are forked, not spawned, to keep imports, and use a free port.
    """
    text = PAGE.read_text().partition(f"## {heading}")[2]
    code, expected = (
        re.search(rf"```{kind}\n(.*?)```", text, re.S)[1] for kind in ("python", "text")
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        code = re.sub(r"127\.0\.0\.1:\d+", f"127.0.0.1:{free.getsockname()[1]}", code)
    if not torch.accelerator.is_available():
        code = re.sub(
            r"multiprocessing\.spawn\((.*)\)$",
            r'multiprocessing.start_processes(\1, start_method="fork")',
            code,
            flags=re.M,
        )
    (folder / "played.py").write_text(code)
    result = forks.run(folder / "played.py")
    return "" if result.stdout == expected else result.stdout + result.stderr
