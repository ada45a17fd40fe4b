"""What the page of findings says of torch is what the torch that is installed does."""

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
    assert played("FSDP2 divides", tmp_path) == ""


@TORCH
def test_a_gradient_of_a_gather_is_laid_otherwise(tmp_path: Path) -> None:
    """The same gradient without the gather, and behind it."""
    assert played("gloo gives gradients", tmp_path) == ""


@TORCH
def test_what_is_written_into_a_dict_is_lost(tmp_path: Path) -> None:
    """The second layer's value is in a copy of the dict."""
    assert played("FSDP2 loses", tmp_path) == ""


@TORCH
def test_a_kept_product_is_scaled_twice(tmp_path: Path) -> None:
    """A difference quotient agrees with the plain gradient, not with the checkpoint's."""
    assert played("Selective checkpointing", tmp_path) == ""


@TORCH
def test_a_running_sum_of_the_last_dim(tmp_path: Path) -> None:
    """The same sum by two names of its dim, and that of the plain tensor."""
    assert played("DTensor's running sums", tmp_path) == ""


@TORCH
def test_outputs_of_hooks_are_left_out(tmp_path: Path) -> None:
    """What hooks collect of a model is None once the model is sliced."""
    transformers = pytest.importorskip("transformers")
    if not transformers.__version__.startswith("5.24."):
        pytest.skip("the page is about 5.24")
    assert played("FSDP2 hides a model", tmp_path) == ""


def test_an_activation_is_not_reduced(tmp_path: Path) -> None:
    """Ranks have terms of the gradient of one rank, which a difference quotient confirms."""
    transformers = pytest.importorskip("transformers")
    if not transformers.__version__.startswith(("5.23.", "5.24.")):
        pytest.skip("the page is about 5.23 and 5.24")
    assert played("Apertus", tmp_path) == ""


def played(heading: str, folder: Path) -> str:
    """What the program below a heading prints, where that is not what stands below it.

    Here its ranks are forked, not spawned: they have what it has imported; and their port is free.
    """
    text = PAGE.read_text().partition(f"## {heading}")[2]
    code, said = (re.search(rf"```{kind}\n(.*?)```", text, re.S)[1] for kind in ("python", "text"))
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
    done = forks.run(folder / "played.py")
    return "" if done.stdout == said else done.stdout + done.stderr
