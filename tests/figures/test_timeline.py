"""Timelines as figures and trace files; one was recorded by Horovod 0.28.1 (two ranks, two tensors, three rounds)."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from docs._generate.timelines import OPTIONS, draw_pages, timeline_of
from scalebench.comm.base import Capability
from scalebench.errors import ResultsError
from scalebench.export import write_chrome
from scalebench.figures.traced_run import draw_timeline
from scalebench.strategies import registry
from scalebench.training.outcome import Lane, Lap, Timeline, read_horovod
from tests.figures.trace_rules import broken_rules

RECORDED = Path(__file__).with_name("horovod-0.28.1-timeline.json")
LAPS = [
    Lap("data", 0.0, 0.1), Lap("forward", 0.1, 0.2), Lap("backward", 0.2, 0.4), Lap("update", 0.4, 0.5),
    Lap("forward", 0.5, 0.6), Lap("backward", 0.6, 0.8), Lap("waiting", 0.8, 0.9), Lap("communication", 0.9, 1.0),
]  # fmt: skip


def drawn(
    tmp_path: Path, timeline: Timeline, **values: object
) -> list[tuple[str, str, float, float]]:
    files = draw_timeline(timeline, tmp_path / "timeline", ("svg",), **values)  # type: ignore[arg-type]
    with files[-1].open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["lane", "activity", "begin_s", "end_s"]
    return [
        (lane, activity, float(begin), float(end))
        for lane, activity, begin, end in rows[1:]
    ]


def test_compute_of_a_step_is_one_bar(tmp_path: Path) -> None:
    rows = drawn(
        tmp_path, Timeline("t", "virtual", "about", [Lane("worker 0", LAPS, [1.0])])
    )
    assert [row[1:] for row in rows] == [
        ("data", 0.0, 0.1), ("compute", 0.1, 0.5), ("compute", 0.5, 0.8), ("waiting", 0.8, 0.9),
        ("communication", 0.9, 1.0),
    ]  # fmt: skip


def test_window_cuts_bars(tmp_path: Path) -> None:
    rows = drawn(
        tmp_path,
        Timeline("t", "virtual", "about", [Lane("worker 0", LAPS)]),
        window=(0.3, 0.85),
    )
    assert [row[1:] for row in rows] == [
        ("compute", 0.3, 0.5),
        ("compute", 0.5, 0.8),
        ("waiting", 0.8, 0.85),
    ]


def test_trace_file_has_laps_in_microseconds(tmp_path: Path) -> None:
    write_chrome(
        Timeline("t", "virtual", "about", [Lane("worker 0", LAPS, [1.0])]),
        tmp_path / "t.trace.json",
    )
    events = json.loads((tmp_path / "t.trace.json").read_text())["traceEvents"]
    laps = [(e["name"], e["cat"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert laps[3] == ("update", "compute", 4e5, 1e5)
    assert len(laps) == len(LAPS)
    assert [(e["name"], e["ts"]) for e in events if e["ph"] == "i"] == [
        ("end of epoch 1", 1e6)
    ]


def test_laps_below_a_nanosecond_are_left_out(tmp_path: Path) -> None:
    laps = [
        Lap("communication", 0.0, 0.1),
        Lap("waiting", 0.1, 0.1 + 1e-10),
        Lap("communication", 0.1, 0.2),
    ]
    write_chrome(
        Timeline("t", "native", "about", [Lane("tensor", laps)]),
        tmp_path / "t.trace.json",
    )
    document = json.loads((tmp_path / "t.trace.json").read_text())
    assert [
        event["name"] for event in document["traceEvents"] if event["ph"] == "X"
    ] == ["communication"] * 2
    assert broken_rules(document) == []


@pytest.mark.parametrize("name", registry.names())
def test_trace_file_of_every_strategy_is_valid(tmp_path: Path, name: str) -> None:
    """Perfetto drops a lap that overlaps the next one of its lane by a nanosecond."""
    timeline = timeline_of(name)
    write_chrome(timeline, tmp_path / "t.trace.json")
    document = json.loads((tmp_path / "t.trace.json").read_text())
    assert broken_rules(document) == []
    drawn = sum(len(lane.laps) for lane in timeline.lanes)
    assert sum(event["ph"] == "X" for event in document["traceEvents"]) == drawn > 40
    lanes = [
        event["args"]["name"]
        for event in document["traceEvents"]
        if event["name"] == "thread_name"
    ]
    workers = (
        ["worker 0"] if name == "serial" else [f"worker {rank}" for rank in range(4)]
    )
    served = Capability.SERVER in registry.create(name, {}).requires
    assert lanes == workers + ["server"] * served


def test_server_lane_has_one_lap_per_request() -> None:
    """12 steps of four workers; worker 0 shares the server's node and reaches it in zero time."""
    *workers, server = timeline_of("asp").lanes
    assert {lap.activity for lap in server.laps} == {"serving"}
    assert len(server.laps) == 3 * sum(
        lap.activity == "forward" for lap in workers[2].laps
    )
    waits = [
        lap for worker in workers for lap in worker.laps if lap.activity == "waiting"
    ]
    assert all(
        any(
            lap.begin_s < busy.end_s and busy.begin_s < lap.end_s
            for busy in server.laps
        )
        for lap in waits[:-4]
    )


def test_horovod_timeline_gives_one_lane_per_tensor() -> None:
    lanes = read_horovod(RECORDED)
    assert [lane.name for lane in lanes] == [
        "Horovod: allreduce.a",
        "Horovod: allreduce.b",
    ]
    first = lanes[0].laps[0]
    # NEGOTIATE_ALLREDUCE, microseconds 8141 to 16054 in the file
    assert first == Lap("waiting", 0.008141, 0.016054)
    for lane in lanes:
        assert [lap.activity for lap in lane.laps] == ["waiting", "communication"] * 3


def test_horovod_timeline_is_shifted_to_run_start() -> None:
    origin = (
        json.loads(RECORDED.read_text())[0]["args"]["start_time_since_epoch_in_micros"]
        / 1e6
    )
    later = read_horovod(RECORDED, began_unix_s=origin + 0.020)
    # earlier events are left out
    assert later[0].laps[0].begin_s == pytest.approx(0.040088 - 0.020, abs=1e-6)


def test_truncated_horovod_timeline_is_read(tmp_path: Path) -> None:
    whole = RECORDED.read_text()
    cut = tmp_path / "cut.json"
    cut.write_text(whole[: whole.index('{"name": "process_name", "ph": "M", "pid": 2')])
    assert [len(lane.laps) for lane in read_horovod(cut)] == [2]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<html>",
        "[",
        "[1, 2]",
        '{"traceEvents": []}',
        '"a]"',
        '[{"ph": "M", "pid": 0, "args": 3}]',
        '[{"ph": "M", "pid": 0}, {"ph": "B"}]',
        '[{"ph": "B", "pid": 1, "ts": 2}]',
        '[{"ph": "B", "pid": 1, "name": "n", "ts": "2"}]',
        '[{"ph": "B", "pid": [1], "name": "n", "ts": 2}]',
        '[{"ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros": "now"}}]',
    ],
)
def test_invalid_horovod_timeline_is_refused_with_its_name(
    tmp_path: Path, text: str
) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(ResultsError, match=r"other\.json is no timeline of Horovod"):
        read_horovod(tmp_path / "other.json", began_unix_s=1.0)


def test_asynchronous_workers_do_not_wait_for_the_slow_one() -> None:
    def waited(name: str) -> list[float]:
        lanes = timeline_of(name).lanes
        return [
            sum(
                lap.end_s - lap.begin_s
                for lap in lane.laps[:-2]
                if lap.activity == "waiting"
            )
            for lane in lanes
        ]

    synchronous, asynchronous = waited("epoch_average"), waited("epoch_async")
    assert synchronous[2] == 0
    # six steps, half a millisecond each
    assert min(synchronous[0], synchronous[1], synchronous[3]) > 2e-3
    assert max(asynchronous) < 0.5e-3  # for access to the shared model only


def test_pages_draw_the_same_bytes_again(tmp_path: Path) -> None:
    draw_pages(tmp_path / "a", ["allreduce"])
    draw_pages(tmp_path / "b", ["allreduce"])
    first, second = (
        tmp_path / name / "timelines" / "allreduce.png" for name in ("a", "b")
    )
    assert first.read_bytes() == second.read_bytes()
    assert set(OPTIONS) <= set(registry.names())
