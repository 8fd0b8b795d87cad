"""Rendezvous of ranks without an MPI, as `srun --mpi=none` starts them, at a TCP store of rank 0.

Rank 0 listens at a port, as torch.distributed's does; the launch's folder tells the others where. MASTER_ADDR and
MASTER_PORT take precedence over the addresses of its host and over a port of the system's choice.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from scalebench.native.addresses import first_answering, own_addresses
from scalebench.native.control import StoreGroup
from scalebench.native.heartbeat import Heartbeat

FILE = "rendezvous.json"
_FOREVER = timedelta(days=365)  # a run's limit is the launching command's to keep
_LOOK_S = 0.05


def meet(folder: Path, heart: Heartbeat, rank: int, size: int) -> StoreGroup:
    """Connect the `size` ranks of a launch, whose files lie in `folder`.

    Raises:
        EngineError: no address of rank 0's host can be reached from here.
    """
    stated, port = os.environ.get("MASTER_ADDR"), int(os.environ.get("MASTER_PORT", "0"))
    heart.wait_for(0 if rank else None)
    path = folder / FILE
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=_FOREVER)  # type: ignore[attr-defined]
        addresses = [stated] if stated else list(own_addresses())
        told: dict[str, Any] = {"host": platform.node(), "port": store.port, "addresses": addresses}
        told["key"] = secrets.token_hex()
        _write_for_this_user(path, json.dumps(told))
    else:
        while not path.exists():
            time.sleep(_LOOK_S)
        told = json.loads(path.read_text())
        here = told["host"] == platform.node()
        addresses = ["127.0.0.1"] if here else told["addresses"]
        address = first_answering(addresses, told["port"], told["host"])[0]
        store = dist.TCPStore(address, told["port"], timeout=_FOREVER)  # type: ignore[attr-defined]
    heart.wait_for(None)
    world = StoreGroup(store, bytes.fromhex(told["key"]), range(size), rank)
    world.Barrier()
    return world


def _write_for_this_user(path: Path, text: str) -> None:
    fresh = path.with_suffix(".new")
    fresh.touch(mode=0o600, exist_ok=False)
    fresh.write_text(text)
    fresh.replace(path)
