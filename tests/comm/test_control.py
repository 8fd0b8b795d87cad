"""Control messages over a store: what ranks without MPI tell each other."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from scalebench.comm.control import StoreGroup
from scalebench.errors import EngineError

KEY = b"of this launch"


def on_each(ranks, program):
    """Return the results of `program` on `ranks` ranks, threads here, which have a connection each."""
    first = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores = [
        first,
        *(
            dist.TCPStore("127.0.0.1", first.port, timeout=timedelta(seconds=20))
            for _ in range(1, ranks)
        ),
    ]
    worlds = [
        StoreGroup(store, KEY, range(ranks), rank) for rank, store in enumerate(stores)
    ]
    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(program, worlds))
    return found, first


def test_collectives_of_a_store_are_those_of_mpi():
    def program(world):
        gathered = world.gather(world.rank**2)
        half = world.Split(world.rank % 2, -world.rank)
        arrival = world.Ibarrier()
        found = [
            world.bcast("told" if world.rank == 0 else None)
            if arrival.Test()
            else None,
            gathered,
            world.allgather((world.rank, world.size)),
            (half.rank, half.size, half.allgather(world.rank)),
        ]
        world.close()
        return found

    found, store = on_each(5, program)
    assert [each[0] for each in found] == ["told"] * 5
    assert [each[1] for each in found] == [[0, 1, 4, 9, 16], None, None, None, None]
    assert all(each[2] == [(rank, 5) for rank in range(5)] for each in found)
    assert [each[3] for each in found] == [
        (2, 3, [4, 2, 0]), (1, 2, [3, 1]), (1, 3, [4, 2, 0]), (0, 2, [3, 1]), (0, 3, [4, 2, 0]),
    ]  # fmt: skip
    assert store.num_keys() < 5, "what was read is deleted"


def test_a_message_of_somebody_else_is_not_unpickled():
    def program(world):
        if world.rank == 1:
            world._store.set("/1/1", b"\0" * 32 + b"cos\nsystem\n(S'touch pwned'\ntR.")
            return
        with pytest.raises(EngineError, match="not of its ranks"):
            world.gather(None)
        return

    on_each(2, program)
    assert not os.path.exists("pwned")  # noqa: PTH110
