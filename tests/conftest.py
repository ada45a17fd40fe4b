"""What all tests share: one warm pool of ranks for the whole session."""

from collections.abc import Iterator

import pytest

from schedlang.runtime.launch import Pool

# imported once, before the ranks are forked
PRELOAD = (
    *("torch", "torch.distributed", "cloudpickle", "schedlang.passes.prove"),
    *("transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama"),
)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Local ranks, started by the first test that runs some; a job that dies leaves new ones."""
    with Pool(preload=PRELOAD) as pool:
        yield pool
