"""Ranks that torchrun restarts with the store of the former ranks join each other."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tests import forks

JOIN = """
import os, time
import torch.distributed as dist
from schedlang.runtime.comm import agreement, world

init = dist.init_process_group

def join_late(*args, **options):
    time.sleep(0.5 * (os.environ["RANK"] == "1"))  # the other reads before this one writes
    init(*args, **options)

dist.init_process_group = join_late
agreement.join_world(60.0)
print(world.all_gather_object(os.getpid())[int(os.environ["RANK"])] == os.getpid(), flush=True)
os._exit(0)
"""


def test_a_second_round_in_the_store_of_the_first() -> None:
    """The second round does not connect to addresses of the first, whose processes are gone."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60))
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
    job |= {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for attempt in ("0", "1"):
        round_ = {"TORCHELASTIC_RESTART_COUNT": attempt, "GROUP_WORLD_SIZE": "1"}
        environs = ({**os.environ, **job, **round_, "RANK": str(rank)} for rank in range(2))
        ranks: list[Any] = [forks.start_python("-c", JOIN, env=environ) for environ in environs]
        try:
            outputs = [rank.communicate(timeout=100) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        assert [output.strip() for output, _ in outputs] == ["True", "True"], outputs
