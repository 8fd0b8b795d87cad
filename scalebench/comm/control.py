"""Control messages between the ranks of a launch: by MPI, or by a store on rank 0 where no MPI is launched."""

from __future__ import annotations

import hmac
import os
import pickle
import time
from collections.abc import Sequence
from typing import Any, Protocol

from scalebench.errors import EngineError

_SIGNATURE_BYTES = 32
# in which the launcher notices, and names, the peer whose death broke a connection
_ABORT_DELAY_S = 1.0


class PendingBarrier(Protocol):
    """A barrier that has begun."""

    def Test(self) -> bool: ...  # noqa: N802


class ObjectGroup(Protocol):
    """The ranks of a run, with the names that mpi4py gives to its operations on objects."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def bcast(self, obj: Any) -> Any: ...
    def gather(self, sendobj: Any) -> list[Any] | None: ...
    def allgather(self, sendobj: Any) -> list[Any]: ...
    def Barrier(self) -> None: ...  # noqa: N802


class Control(ObjectGroup, Protocol):
    """The ranks of a launch, of which some work on a run while the others wait."""

    def Ibarrier(self) -> PendingBarrier: ...  # noqa: N802
    def Split(self, color: int, key: int) -> Control: ...  # noqa: N802
    def Abort(self, errorcode: int) -> None: ...  # noqa: N802


class StoreGroup:
    """Implements `Control` over a `torch.distributed.TCPStore`: the group's first rank collects and answers.

    Ranks that wait are asleep: the store wakes them. Others on the network can write
    into the store, too: what was not signed with the launch's `key` is not unpickled.
    """

    def __init__(
        self, store: Any, key: bytes, members: Sequence[int], rank: int, name: str = ""
    ) -> None:
        self._store = store
        self._secret = key
        self._members = list(members)
        self._name = name
        self.rank, self.size = self._members.index(rank), len(members)
        self._operations = 0

    def bcast(self, obj: Any) -> Any:
        """Send `obj` of rank 0 to all ranks."""
        return self._exchange(obj if self.rank == 0 else None)[0]

    def gather(self, sendobj: Any) -> list[Any] | None:
        """Collect the objects of all ranks on rank 0; None on others."""
        self._begin(sendobj)
        return self._collected() if self.rank == 0 else None

    def allgather(self, sendobj: Any) -> list[Any]:
        return self._exchange(sendobj)

    def Barrier(self) -> None:  # noqa: N802
        self._exchange(None)

    def Ibarrier(self) -> _Arrival:  # noqa: N802
        self._begin(None)
        return _Arrival(self)

    def Split(self, color: int, key: int) -> StoreGroup:  # noqa: N802
        """The group of the ranks with this `color`, in the order of their keys."""
        told = self._exchange((color, key, self._members[self.rank]))
        members = [
            rank
            for shade, _, rank in sorted(told, key=lambda each: each[1])
            if shade == color
        ]
        return StoreGroup(
            self._store,
            self._secret,
            members,
            self._members[self.rank],
            self._place(f"{color}"),
        )

    def Abort(self, errorcode: int) -> None:  # noqa: N802
        """End this process; the launcher then ends the others."""
        time.sleep(_ABORT_DELAY_S)
        os._exit(errorcode)

    def close(self) -> None:
        """Wait, on the rank that holds the store, until the others need it no more."""
        self.gather(None)

    def _exchange(self, value: Any) -> list[Any]:
        self._begin(value)
        return self.finish()

    def _begin(self, value: Any) -> None:
        self._operations += 1
        if self.rank:
            self._put(self._place(self.rank), value)
        else:
            self._value = value

    def finish(self) -> list[Any]:
        """Values of all ranks in the operation that has begun."""
        answer = self._place("all")
        if self.rank:
            answered: list[Any] = self._opened(self._store.get(answer))
            return answered
        values = self._collected()
        self._put(answer, values)
        return values

    def _collected(self) -> list[Any]:
        """Collect all values on rank 0. Each rank that has begun this operation has read the answer of the last one."""
        # Keys are deleted once they were read, or the store would grow with each
        # barrier of a run.
        places = [self._place(rank) for rank in range(1, self.size)]
        values = [
            self._value,
            *map(self._opened, self._store.multi_get(places) if places else ()),
        ]
        for place in (*places, self._place("all", self._operations - 1)):
            self._store.delete_key(place)
        return values

    def _place(self, of: int | str, operation: int | None = None) -> str:
        return f"{self._name}/{operation or self._operations}/{of}"

    def _put(self, place: str, value: Any) -> None:
        # Pickled, as mpi4py does, so that both forms of control carry the same objects.
        content = pickle.dumps(value)
        self._store.set(place, self._signature(content) + content)

    def _opened(self, said: bytes) -> Any:
        content = said[_SIGNATURE_BYTES:]
        if not hmac.compare_digest(said[:_SIGNATURE_BYTES], self._signature(content)):
            raise EngineError(
                "a message in the store of this launch is not of its ranks"
            )
        return pickle.loads(content)  # noqa: S301 - signed

    def _signature(self, content: bytes) -> bytes:
        return hmac.digest(self._secret, content, "sha256")


class _Arrival:
    """A barrier that this rank has reached."""

    def __init__(self, group: StoreGroup) -> None:
        self._group = group

    def Test(self) -> bool:  # noqa: N802
        """Sleep until all ranks have arrived, and return True."""
        self._group.finish()
        return True
