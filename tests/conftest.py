"""What all tests share: one warm pool of ranks for the whole session."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

from schedlang.runtime.launch import Pool

settings.register_profile("busy", deadline=None)  # several ranks may share a core with the tests
settings.load_profile("busy")

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
