"""Rules for trace files, of the Trace Event Format and of Perfetto's importer."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any

KEYS = {
    "M": {"ph", "name", "pid", "tid", "args"},
    "X": {"ph", "name", "cat", "pid", "tid", "ts", "dur"},
    "i": {"ph", "s", "name", "pid", "tid", "ts"},
}


def broken_rules(document: dict[str, Any]) -> list[str]:
    """Return the violations in a trace file; times are compared in whole nanoseconds, as viewers hold them."""
    found = []
    laps = defaultdict(list)
    named = {
        (e["pid"], e["tid"])
        for e in document["traceEvents"]
        if e["name"] == "thread_name"
    }
    for event in document["traceEvents"]:
        if event["ph"] not in KEYS or set(event) != KEYS[event["ph"]]:
            found.append(f"not an event: {event}")
            continue
        if (
            event["pid"] <= 0
            or event["tid"] <= 0
            or (event["pid"], event["tid"]) not in named
        ):
            found.append(f"in no named lane: {event}")
        times = [event[key] for key in ("ts", "dur") if key in event]
        if any(
            time < 0 or abs(time * 1000 - round(time * 1000)) > 1e-3 for time in times
        ):
            found.append(f"negative, or between two nanoseconds: {event}")
        if event["ph"] == "X":
            begin, length = (round(time * 1000) for time in times)
            laps[event["tid"]].append((begin, begin + length, event["name"]))
            if length == 0:
                found.append(f"takes no time: {event}")
    for lane, own in laps.items():
        found += [
            f"overlap in lane {lane}: {one}, {other}"
            for one, other in pairwise(own)
            if other[0] < one[1]
        ]
    return found
