"""Laws of a study's records."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from scalebench.analysis import ratios
from scalebench.analysis.laws import scaling_laws, series_of, write_extrap
from scalebench.analysis.laws.render import title
from scalebench.errors import ResultsError, UsageError
from tests.facts import in_order, naming, together
from tests.law_factory import BYTES
from tests.records_factory import run_row

COUNTS = (1, 2, 4, 8, 16)


def rows(strategy="epoch_average", counts=COUNTS, s=0.05, repetitions=3, **columns):
    """Runs that follow Amdahl's law with the serial share `s`, with their bytes."""
    found = []
    for repetition in range(repetitions):
        for n in counts:
            values = {
                "strategy": strategy,
                "workers": n,
                "repetition": repetition,
                "train_s": (1 + 0.01 * (repetition - 1)) * (s + (1 - s) / n),
                "optimizer_steps": 800 // n,
                "syncs": 6 if n > 1 else 0,
                "bytes_sent_per_worker": 6 * BYTES if n > 1 else 0.0,
                "execution": "native",
                "engine": "mpi",
                "batch_per_worker": 8,
            }
            values |= columns
            run_id = "-".join(
                str(values[name])
                for name in ("execution", "engine", "strategy", "batch_per_worker")
            )
            found.append(
                run_row(**{"run_id": f"{run_id}-w{n}-r{repetition}", **values})
            )
    return found


def laws(results, **options):
    return {
        (one.series.key.execution, one.series.key.engine, one.series.key.label): one
        for one in scaling_laws(results, **options)
    }


def serial_share(scaling):
    return next(
        one.value for parameter, one in scaling.parameters if parameter.name == "s"
    )


def test_efficiency_uses_the_base_of_ratios(study):
    """The base of horovod is `serial` of its execution, here twice as fast as horovod on one worker."""
    found = rows("serial", (1,), s=0.0) + rows(
        "horovod", s=0.05, engine="horovod", train_s=None
    )
    found = [
        row
        if row.train_s
        else row.model_copy(update={"train_s": 2 * (0.05 + 0.95 / row.workers)})
        for row in found
    ]
    results = study(rows=found + rows(execution="virtual", engine="virtual"))
    native, virtual = (
        laws(results, efficiency=0.3)[key]
        for key in (
            ("native", "horovod", "horovod"),
            ("virtual", "virtual", "epoch_average"),
        )
    )
    shown = (
        ratios(results)
        .query("baseline == 'serial' and label == 'horovod'")
        .set_index("workers")["efficiency"]
    )
    base = native.series.base
    for workers, efficiency in shown.items():
        seconds = native.best.fit.seconds(np.array([float(workers)]))[0]
        assert np.exp(base.log_seconds) / (workers * seconds) == pytest.approx(
            efficiency, rel=1e-6
        )
    worth = native.advice.worth.workers
    assert (
        max(n for n, efficiency in shown.items() if efficiency >= 0.3)
        <= worth
        < min(n for n, efficiency in shown.items() if efficiency < 0.3)
    )
    assert (
        laws(results, efficiency=0.6)[
            "native", "horovod", "horovod"
        ].advice.worth.workers
        == 0
    )
    assert virtual.series.base is None
    assert any(
        together(note, "serial", "1 worker", "virtual") for note in virtual.notes
    )


def test_executions_and_engines_are_separate_series(study):
    parts = {
        ("native", "mpi"): 0.05,
        ("native", "gloo"): 0.1,
        ("virtual", "virtual"): 0.2,
    }
    results = study(
        rows=[
            row
            for (execution, engine), s in parts.items()
            for row in rows(s=s, execution=execution, engine=engine)
        ]
    )
    found = laws(results)
    assert list(found) == [
        ("native", "gloo", "epoch_average"),
        ("native", "mpi", "epoch_average"),
        ("virtual", "virtual", "epoch_average"),
    ]
    for (execution, engine, _), scaling in found.items():
        assert scaling.best.fit.law.name == "amdahl"
        assert serial_share(scaling) == pytest.approx(
            parts[execution, engine], rel=1e-6
        )
        assert len(scaling.series.at) == 15


def test_oversubscribed_runs_are_left_out(study):
    fair = rows()
    crowded = rows(counts=(32, 64), oversubscribed=True, train_s=77.0)
    slow_pace = rows(counts=(24,), execution="native", paced_overrun=0.5, train_s=99.0)
    (alone,), (among,) = (
        scaling_laws(study(rows=fair)),
        scaling_laws(study(rows=fair + crowded + slow_pace)),
    )
    assert among.series.counts.tolist() == list(COUNTS)
    np.testing.assert_array_equal(
        among.best.fit.coefficients, alone.best.fit.coefficients
    )
    assert together(among.notes[0], "oversubscribed", "left out", "24, 32, 64 workers")
    assert among.advice == alone.advice


@pytest.mark.parametrize(
    ("runs", "refusal"),
    [
        (
            rows(counts=(1, 2, 4)),
            ("3 worker counts (1, 2, 4)", "a law wants 4"),
        ),
        (
            rows(counts=(2,)),
            ("1 worker count (2)", "a law wants 4"),
        ),
        (
            rows(oversubscribed=True),
            ("0 worker counts", "oversubscribed"),
        ),
        (
            rows(counts=(1, 2, 4, 8), repetitions=1),
            ("4 runs", "too few", "laws"),
        ),
    ],
)
def test_below_four_counts_there_is_no_law(study, runs, refusal):
    (scaling,) = scaling_laws(study(rows=runs))
    assert in_order(scaling.refusal, *refusal)
    assert scaling.candidates == ()
    assert scaling.advice is None


def test_four_counts_have_a_law_without_intervals(study):
    (scaling,) = scaling_laws(study(rows=rows(counts=(1, 2, 4, 8))))
    assert scaling.best.fit.law.name == "amdahl"
    assert all(np.isnan([one.low, one.high]).all() for _, one in scaling.parameters)
    assert any(
        in_order(note, "no intervals", "5 worker counts", "4") for note in scaling.notes
    )


@pytest.mark.parametrize(
    ("counts", "said"), [((1, 2, 4, 8, 16), True), ((1, 2, 4, 8, 16, 32), False)]
)
def test_five_counts_have_no_extrapolated_band(study, counts, said):
    (scaling,) = scaling_laws(study(rows=rows(counts=counts)))
    assert said == any(
        in_order(note, "no band", "16 workers", "6 worker counts", "5")
        for note in scaling.notes
    )


def test_reduced_batches_are_left_out(study):
    small = rows(counts=(32,), batch_per_worker=4, train_s=9.0)
    (scaling,) = scaling_laws(study(rows=rows() + small))
    assert scaling.series.counts.tolist() == list(COUNTS)
    assert any(
        in_order(note, "batch than 8", "left out", "32 workers")
        for note in scaling.notes
    )


def two_batches(policy):
    """A study at two batches, each with its own law and a serial run of its own time."""
    found = []
    for batch, s, alone in ((8, 0.05, 1.5), (16, 0.2, 3.0)):
        own = {
            "batch_policy": policy,
            "batch_per_worker": batch,
            "batch_global": batch,
            "epochs": 6,
        }
        found += rows("serial", (1,), **own, train_s=alone) + rows(s=s, **own)
    return found


@pytest.mark.parametrize("policy", ["per_worker", "global"])
def test_each_batch_has_its_law_and_its_base(study, policy):
    small, large = scaling_laws(study(rows=two_batches(policy)))
    for scaling, batch, s, alone in ((small, 8, 0.05, 1.5), (large, 16, 0.2, 3.0)):
        assert scaling.series.batch == batch
        assert scaling.series.counts.tolist() == list(COUNTS)
        assert len(scaling.series.at) == 15
        assert serial_share(scaling) == pytest.approx(s, rel=1e-6)
        assert np.exp(scaling.series.base.log_seconds) == pytest.approx(alone)
        assert not any("another batch" in note for note in scaling.notes)
    kind = "batch 8 per worker" if policy == "per_worker" else "global batch 8"
    assert title(small).startswith(
        f"epoch_average, {kind}, native mpi: 5 worker counts"
    )


def test_one_batch_is_not_in_the_title(study):
    (scaling,) = scaling_laws(study(rows=rows()))
    assert scaling.series.batch == 8
    assert "batch" not in title(scaling)


def test_serial_at_another_batch_is_no_base(study):
    (scaling,) = scaling_laws(
        study(rows=rows() + rows("serial", (1,), batch_per_worker=16))
    )
    assert scaling.series.base is None
    assert any("serial ran at another batch than 8" in note for note in scaling.notes)


def test_a_law_is_followed_as_long_as_a_worker_has_a_batch(study):
    (scaling,) = scaling_laws(study(rows=rows(n_train=800)))
    assert scaling.advice is not None
    assert scaling.advice.limit == 100
    (few,) = scaling_laws(study(rows=rows(n_train=100_000)))
    assert few.advice is not None
    assert few.advice.limit == 256  # 16 times the largest


def test_weak_scaling_follows_gustafson(study):
    runs = [
        row.model_copy(
            update={
                "scaling": "weak",
                "train_s": 1 / (0.7 + 0.3 / row.workers),
                "n_train": 80 * row.workers,
            }
        )
        for row in rows()
    ]
    (scaling,) = scaling_laws(study(rows=runs))
    assert scaling.best.fit.law.name == "gustafson"
    assert serial_share(scaling) == pytest.approx(0.3)


def test_poor_fit_has_a_note(study):
    wild = [
        row.model_copy(update={"train_s": 5.0 if row.workers == 4 else row.train_s})
        for row in rows()
    ]
    (scaling,) = scaling_laws(study(rows=wild))
    assert any(
        note.startswith("no law fits well") and "at 4 workers" in note
        for note in scaling.notes
    )


@pytest.mark.parametrize(("execution", "said"), [("native", True), ("virtual", False)])
def test_shared_noise_has_a_note(study, execution, said):
    """Draws of a calibration differ as a whole by construction, without a note."""
    engine = "mpi" if execution == "native" else "virtual"
    drifting = [
        row.model_copy(update={"execution": execution, "engine": engine})
        for row in rows()
    ]
    (scaling,) = scaling_laws(study(rows=drifting))
    assert (
        any("and the intervals are wider for it" in note for note in scaling.notes)
        == said
    )


def test_bad_forecast_has_a_note(study):
    surprise = [
        row.model_copy(update={"train_s": 0.5 if row.workers == 16 else row.train_s})
        for row in rows()
    ]
    (scaling,) = scaling_laws(study(rows=surprise))
    assert any(
        in_order(note, "not to be trusted", "fitted without 16")
        for note in scaling.notes
    )


def test_serial_has_no_law(study):
    results = study(rows=rows() + rows("serial", counts=(1,)))
    assert [one.key.label for one in series_of(results)] == ["epoch_average"]
    with pytest.raises(ResultsError, match="no completed run of a strategy but serial"):
        scaling_laws(study(rows=rows("serial", counts=(1,))))


def test_strategies_are_chosen_by_name_or_label(study):
    results = study(
        rows=rows()
        + [
            row.model_copy(
                update={"strategy_options": '{"every": 2}', "run_id": f"{row.run_id}-2"}
            )
            for row in rows(s=0.01)
        ]
        + rows("allreduce", s=0.3)
    )
    assert len(scaling_laws(results)) == 3
    assert [
        one.series.key.label
        for one in scaling_laws(results, strategies=["epoch_average"])
    ] == [
        "epoch_average",
        "epoch_average(every=2)",
    ]
    assert len(scaling_laws(results, strategies=["epoch_average(every=2)"])) == 1
    with pytest.raises(UsageError, match=r"'allreduc'.*did you mean 'allreduce'"):
        scaling_laws(results, strategies=["allreduc"])


@pytest.mark.parametrize("efficiency", [0, -0.5, 1.01, float("nan")])
def test_an_efficiency_is_a_share(study, efficiency):
    with pytest.raises(UsageError, match="above 0 and is at most 1"):
        scaling_laws(study(rows=rows()), efficiency=efficiency)


def read_lines(file: Path):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_extrap_gets_every_repetition_once(study, tmp_path):
    results = study(
        rows=rows() + rows("allreduce", s=0.3) + rows(counts=(32,), oversubscribed=True)
    )
    (file,) = write_extrap(series_of(results), tmp_path / "times.jsonl")
    assert file == tmp_path / "times.jsonl"
    lines = read_lines(file)
    # two metrics of each strategy and worker count, as Extra-P's reader wants them
    assert len(lines) == 20
    assert lines[0] == {
        "params": {"workers": 1},
        "callpath": "allreduce",
        "metric": "train_s",
        "value": pytest.approx([0.99, 1.0, 1.01]),
    }
    assert {line["params"]["workers"] for line in lines} == set(COUNTS)
    times = [line for line in lines if line["metric"] == "train_s"]
    costs = [line for line in lines if line["metric"] == "worker_s"]
    for time, cost in zip(times, costs, strict=True):
        assert (cost["callpath"], cost["params"]) == (time["callpath"], time["params"])
        assert cost["value"] == pytest.approx(
            [time["params"]["workers"] * value for value in time["value"]]
        )


def test_extrap_gets_no_two_executions_engines_or_sets_of_counts_in_one_file(
    study, tmp_path
):
    results = study(
        rows=rows()
        + rows("allreduce", counts=(1, 2, 4, 8))
        + rows("ddp", engine="gloo")
        + rows(execution="virtual", engine="virtual")
        + rows("horovod", engine="horovod", counts=(1, 2))
    )
    files = write_extrap(series_of(results), tmp_path / "times.jsonl")
    assert sorted(file.name for file in files) == [
        "times-native-gloo.jsonl",
        "times-native-mpi-at-1-2-4-8-16.jsonl",
        "times-native-mpi-at-1-2-4-8.jsonl",
        "times-virtual.jsonl",
    ]
    for file in files:
        points = {}
        for line in read_lines(file):
            points.setdefault(line["callpath"], set()).add(line["params"]["workers"])
        assert len(set(map(frozenset, points.values()))) == 1


def test_extrap_refuses_empty_or_unwritable_files(study, tmp_path):
    with pytest.raises(
        ResultsError,
        match=naming("Extra-P", "no strategy", "4 worker counts"),
    ):
        write_extrap(
            series_of(study(rows=rows(counts=(1, 2)))), tmp_path / "times.jsonl"
        )
    with pytest.raises(ResultsError, match=r"cannot write .*--extrap"):
        write_extrap(series_of(study(rows=rows())), tmp_path / "none" / "times.jsonl")
