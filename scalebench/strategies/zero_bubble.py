"""The order of micro-batches in which weights' gradients fill the bubble of a pipeline: ZB-V.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, arXiv 2401.10241,
section 6.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat

from scalebench.strategies.base import Move

_FIRST, _SECOND = 0, 1  # chunk of a stage: on the way forth, and on the way back


def zero_bubble(stage: int, stages: int, micro_batches: int) -> Iterator[Move]:
    """Yield the moves of stage k of m, which holds chunks k and 2 m - 1 - k of the layers.

    F, I, W: forward pass, gradients of the inputs, gradients of the weights, of the
    next micro-batch of chunk a or b.

        warm-up     Fa 2 (m - k) - 1 times;  Fb Fa k times;  Fb Ib Wb m - k times
        steady      Fa Ia Wa Fb Ib Wb until all micro-batches have begun and have been through chunk b
        cool-down   Ia Ib k times;  Ia Wa m - k times;  the Wb and Wa that are left

    The bubble vanishes where F, I and W take equally long. The order is that of 2 m - 1
    micro-batches at least, without the moves of those that there are not.
    """
    count = max(micro_batches, 2 * stages - 1)
    done = dict.fromkeys(["Fa", "Fb", "Ia", "Ib", "Wa", "Wb"], 0)

    def next_of(*kinds: str) -> Iterator[Move]:
        for kind in kinds:
            place = done[kind]
            done[kind] += 1
            if place < micro_batches:
                yield _move(kind, place)

    ahead = stages - stage
    warm_up = chain(
        repeat(("Fa",), 2 * ahead - 1),
        repeat(("Fb", "Fa"), stage),
        repeat(("Fb", "Ib", "Wb"), ahead),
    )
    for kinds in warm_up:
        yield from next_of(*kinds)
    while done["Fb"] < done["Fa"] or done["Fa"] < count:
        if done["Fa"] < count:
            yield from next_of("Fa")
        yield from next_of("Ia", "Wa", "Fb", "Ib", "Wb")
    for kinds in chain(repeat(("Ia", "Ib"), stage), repeat(("Ia", "Wa"), ahead)):
        yield from next_of(*kinds)
    for kind in ("b", "a"):
        while done[f"W{kind}"] < done[f"I{kind}"]:
            yield from next_of(f"W{kind}")


def _move(kind: str, place: int) -> Move:
    chunk = _FIRST if kind[1] == "a" else _SECOND
    if kind[0] == "F":
        return Move(True, place, chunk)
    return Move(False, place, chunk, "inputs" if kind[0] == "I" else "weights")
