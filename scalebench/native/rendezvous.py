"""The meeting of the ranks of a launch that no MPI joins: they find rank 0 by a file in the folder of the launch."""

from __future__ import annotations

import json
import os
import platform
import secrets
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from scalebench.comm.control import StoreGroup
from scalebench.comm.torch_dist import (
    LOOPBACK,
    STORE,
    first_answering,
    listen,
    listening_address,
    own_addresses,
)
from scalebench.errors import EngineError
from scalebench.native.heartbeat import Heartbeat

FILE = "rendezvous.json"
_FOREVER = timedelta(days=365)  # a run's limit is the launching command's to keep
_LOOK_S = 0.05


def meet(
    folder: Path, heart: Heartbeat, rank: int, size: int, *, one_node: bool = False
) -> StoreGroup:
    """Connect the `size` ranks of a launch, whose files lie in `folder`; `one_node`: all are known to be on one.

    Raises:
        EngineError: no address of rank 0's host can be reached from here, or rank 0 cannot listen at MASTER_PORT.
    """
    stated, port = (
        os.environ.get("MASTER_ADDR"),
        int(os.environ.get("MASTER_PORT") or 0),
    )
    heart.wait_for(0 if rank else None)
    path = folder / FILE
    if rank == 0:
        address = listening_address(one_node=one_node)
        try:
            store = listen(address, port, _FOREVER)
        except OSError as error:
            raise EngineError(
                f"cannot listen at port {port} of {address or platform.node()}: {os.strerror(error.errno or 0)}; set "
                "MASTER_PORT to a free one, or to nothing for one that the system chooses"
            ) from None
        addresses = (
            [address] if address else [stated] if stated else list(own_addresses())
        )
        told: dict[str, Any] = {
            "host": platform.node(),
            "port": store.port,
            "addresses": addresses,
        }
        told["on_all"] = not address
        told["key"] = secrets.token_hex()
        _write_for_this_user(path, json.dumps(told))
    else:
        while not path.exists():
            time.sleep(_LOOK_S)
        told = json.loads(path.read_text())
        is_here = told["host"] == platform.node()
        addresses = [LOOPBACK] if is_here and told["on_all"] else told["addresses"]
        address = first_answering(addresses, told["port"], told["host"])[0]
        store = STORE(address, told["port"], timeout=_FOREVER)
    heart.wait_for(None)
    world = StoreGroup(store, bytes.fromhex(told["key"]), range(size), rank)
    world.Barrier()
    return world


def _write_for_this_user(path: Path, text: str) -> None:
    fresh = path.with_suffix(".new")
    fresh.touch(mode=0o600, exist_ok=False)
    fresh.write_text(text)
    fresh.replace(path)
