"""`scalebench recalibrate`: new times for finished virtual runs; and calibrations beside other programs."""

from __future__ import annotations

import re
from pathlib import Path
from unittest.mock import Mock

import pytest

from scalebench.analysis import load
from scalebench.calibration.calibration_file import (
    Calibration,
    Measurement,
    read_calibration,
)
from scalebench.calibration.steps_under_load import MeasuredTables
from scalebench.errors import DisturbedError
from scalebench.records.store import Store
from scalebench.study.load import load_study
from tests.conftest import needs_mpi, runs_made
from tests.records_factory import keep_study, run_row

RUN = ("run", "--quiet", "--dataset", "wine", "--epochs", "2", "--execution", "virtual", "--jobs", "1",
       "--repetitions", "1", "--workers", "1,2", "--strategy", "serial", "--strategy", "epoch_average",
       "--name", "mine")  # fmt: skip
MINE = Path("results/mine")


@pytest.fixture
def machine(tmp_path, monkeypatch, machine, invoke):
    """A machine whose steps take `factor` times as long as the fixture's, of which `taken` cores are busy."""
    monkeypatch.chdir(tmp_path)

    class Machine:
        factor, taken, quiet, disturbed, measured = 1.0, None, True, (), 0

        def calibration(self):
            """A file with these numbers."""
            tables = [table.scaled(self.factor) for table in machine.tables]
            path = tmp_path / f"{self.factor:g}.json"
            path.write_text(
                Calibration(
                    key="made up", tables=tables, engines=machine.engines
                ).model_dump_json()
            )
            return path

        def steps(self, run, folder, sizes, node_workers, budget, device):
            if budget.quiet and not self.quiet:
                raise DisturbedError(
                    "the steps could not be measured: leave out --require-quiet"
                )
            self.measured += 1
            update = {"others_load": self.taken, "disturbed": not self.quiet}
            tables = [
                table.scaled(self.factor).model_copy(update=update)
                for table in machine.tables
            ]
            return MeasuredTables(tables, 1e-3, [])

        def engines(self, *_, **__):
            entries = [
                entry.model_copy(update={"disturbed": entry.engine in self.disturbed})
                for entry in machine.engines.entries
            ]
            return machine.engines.model_copy(update={"entries": entries})

    here = Machine()
    monkeypatch.setattr("scalebench.calibration.charging.measure_steps", here.steps)
    monkeypatch.setattr(
        "scalebench.calibration.engine_measurement.measure_engine_costs", here.engines
    )
    return here


def rows():
    return load(MINE).completed.set_index("run_id").sort_index()


def times(frame, strategy):
    return frame.loc[frame["strategy"] == strategy, "train_s"].to_numpy()


def losses():
    return load(MINE).epochs.sort_values(["run_id", "epoch"])["train_loss"].tolist()


def runs_charged(said):
    """The virtual runs that were charged anew, and those that were trained again."""
    pattern = r"^(\d+) virtual runs? charged anew .*?(?:, (\d+) runs? trained|; )"
    ((anew, again),) = re.findall(pattern, said, re.MULTILINE)
    return int(anew), int(again or 0)


@needs_mpi
@pytest.mark.parametrize("given", [True, False], ids=["by a file", "by a measurement"])
def test_recalibrated_runs_get_new_times_and_keep_their_results(machine, invoke, given):
    invoke(*RUN)
    before, lost = rows(), losses()
    machine.factor = 2.0
    said = invoke(
        "recalibrate",
        "results/mine",
        "--jobs",
        "1",
        *(("--calibration", machine.calibration()) if given else ()),
    )
    assert runs_charged(said) == (len(before), 0)
    assert "results in results/mine/" in said
    assert machine.measured == (1 if given else 2)
    after = rows()
    assert times(after, "serial") == pytest.approx(2 * times(before, "serial"))
    averaged = times(after, "epoch_average") / times(before, "epoch_average")
    assert ((averaged > 1.5) & (averaged <= 2.0 + 1e-9)).all(), (
        "steps take twice as long, messages do not"
    )
    assert (after["attempt"] == before["attempt"] + 1).all()
    for metric in ("final_metric", "final_train_metric"):
        assert after[metric].notna().all()
        assert after[metric].tolist() == before[metric].tolist()
    assert losses() == lost
    for column in ("syncs", "bytes_sent_per_worker", "optimizer_steps"):
        assert after[column].tolist() == before[column].tolist()
    assert read_calibration(MINE / "calibration.json").tables[0].batches[
        0
    ].forward_s == pytest.approx([6e-4])
    invoke(*RUN)  # goes on by the new calibration, and has nothing to do
    assert rows()["train_s"].tolist() == after["train_s"].tolist()


def test_runs_whose_arithmetic_depends_on_time_are_trained_again(machine, invoke):
    words = (*RUN, "--strategy", "asp")
    invoke(*words)
    before = rows()
    machine.factor = 2.0
    said = invoke(
        "recalibrate",
        "results/mine",
        "--calibration",
        machine.calibration(),
        "--jobs",
        "1",
    )
    asynchronous = int((before["strategy"] == "asp").sum())
    assert asynchronous > 0
    assert runs_charged(said) == (len(before) - asynchronous, asynchronous)
    assert (times(rows(), "asp") > 1.5 * times(before, "asp")).all()


def test_run_that_fails_when_it_is_charged_anew_changes_nothing(
    machine, invoke, monkeypatch
):
    invoke(*RUN)
    before = (MINE / "runs.csv").read_bytes()
    broken = Mock(side_effect=ValueError("broken"))
    monkeypatch.setattr("scalebench.virtual.pool.time", broken)
    machine.factor = 2.0
    said = invoke(
        "recalibrate",
        "results/mine",
        "--calibration",
        machine.calibration(),
        "--jobs",
        "1",
        code=2,
    )
    assert "broken" in said
    assert "nothing was changed" in said
    assert (MINE / "runs.csv").read_bytes() == before


def test_recalibrated_study_names_the_calibration_that_charges_it(machine, invoke):
    first = machine.calibration()
    machine.factor = 2.0
    second = machine.calibration()
    invoke(*RUN, "--calibration", first.name)
    invoke("recalibrate", "results/mine", "--calibration", second.name)
    after = rows()["train_s"].tolist()
    assert load_study(MINE / "study.yaml", {}, []).calibration == Path(second.name)
    # goes on by the new calibration, and has nothing to do
    invoke(*RUN, "--calibration", second.name)
    assert rows()["train_s"].tolist() == after
    refused = invoke(*RUN, "--calibration", first.name, code=2)
    assert re.search(r"another study .*calibration .*2\.json.* 1\.json", refused), (
        "nothing about a changed file"
    )


def test_times_of_another_machine_are_refused_beside_real_runs(machine, invoke):
    invoke(*RUN, "--execution", "virtual")
    found = read_calibration(machine.calibration())
    of = {
        "dtype": "float32",
        "optimizer": "sgd",
        "threads_per_worker": 1,
        "cpu": "Z80",
        "cores": 1,
        "torch": "1.0",
    }
    model = str(load_study(MINE / "study.yaml", {}, []).model)
    other = found.model_copy(update={"measured": Measurement(model=model, **of)})
    Path("other.json").write_text(other.model_dump_json())
    invoke("recalibrate", "results/mine", "--jobs", "1", "--calibration", "other.json")
    text = (MINE / "study.yaml").read_text()
    (MINE / "study.yaml").write_text(
        text.replace("execution: virtual", "execution: auto")
    )
    before = (MINE / "runs.csv").read_bytes()
    assert "of another machine" in invoke(
        "recalibrate",
        "results/mine",
        "--jobs",
        "1",
        "--calibration",
        "other.json",
        code=2,
    )
    assert (MINE / "runs.csv").read_bytes() == before


def test_study_with_a_calibration_is_charged_as_on_a_cluster_that_states_its_steps(
    machine, invoke
):
    invoke(*RUN, "--calibration", machine.calibration().name)
    invoke(
        "recalibrate",
        "results/mine",
        "--jobs",
        "1",
        "--cluster",
        "juwels-booster",
        "--device-step-time",
        "0.025",
    )
    study = load_study(MINE / "study.yaml", {}, [])
    assert (study.cluster, study.calibration) == ("juwels-booster", None)


def test_check_recommends_recalibrate_for_a_disturbed_calibration(machine, invoke):
    machine.taken = 0.5
    invoke(*RUN)
    named = "`scalebench recalibrate`, on a machine that nobody else uses"
    ignored = ("check", "results/mine", "--ignore", "reduction-base")
    assert named in " ".join(invoke(*ignored).split())
    machine.taken = 0.0
    invoke("recalibrate", "results/mine", "--jobs", "1")
    assert "scalebench recalibrate" not in invoke(*ignored)


def test_disturbed_recalibration_changes_nothing_where_quiet_is_required(
    machine, invoke
):
    invoke(*RUN)
    before = (MINE / "runs.csv").read_bytes(), (MINE / "calibration.json").read_bytes()
    machine.quiet, machine.factor = False, 2.0
    said = invoke(
        "recalibrate", "results/mine", "--jobs", "1", "--require-quiet", code=1
    )
    assert re.search(r"error: .*steps .*leave out --require-quiet", said)
    assert before == (
        (MINE / "runs.csv").read_bytes(),
        (MINE / "calibration.json").read_bytes(),
    )
    first = rows()
    assert set(first["calibration"]) == {"quiet"}
    invoke("recalibrate", "results/mine", "--jobs", "1")
    assert times(rows(), "serial") == pytest.approx(2 * times(first, "serial"))
    assert set(rows()["calibration"]) == {"disturbed"}


def test_study_without_virtual_runs_is_refused(machine, invoke):
    native = {"execution": "native", "engine": "mpi", "strategy": "serial"}
    with Store(MINE) as store:
        store.append(run_row(study="mine", **native))
    keep_study(MINE, {"name": "mine", "execution": "native", "strategies": ["serial"]})
    before = (MINE / "runs.csv").read_bytes()
    said = invoke("recalibrate", "results/mine", "--jobs", "1", code=2)
    assert re.search(r"results/mine .*no completed virtual run.*`scalebench run`", said)
    assert len(said.strip().splitlines()) == 1
    assert (MINE / "runs.csv").read_bytes() == before
    assert machine.measured == 0


def test_study_is_simulated_by_a_disturbed_calibration_unless_quiet_is_required(
    machine, invoke
):
    machine.quiet = False
    said = invoke(*RUN, "--require-quiet", code=1)
    assert "leave out --require-quiet" in said
    assert len((MINE / "runs.csv").read_text().splitlines()) == 1, "the header alone"
    invoke(*RUN)
    assert set(rows()["strategy"]) == {"serial", "epoch_average"}
    assert set(rows()["calibration"]) == {"disturbed"}


@needs_mpi
def test_only_strategies_on_disturbed_engines_are_marked(machine, invoke):
    machine.disturbed = ("horovod",)
    words = (*RUN, "--strategy", "horovod")
    assert "horovod could not be measured" in " ".join(
        invoke(*words, "--require-quiet", code=1).split()
    )
    invoke(*words)
    marked = rows()[rows()["calibration"] == "disturbed"]
    assert set(zip(marked["strategy"], marked["workers"], strict=True)) == {
        ("horovod", 2)
    }
    assert set(rows()["strategy"]) == {"serial", "epoch_average", "horovod"}


def test_other_jitter_and_cluster_make_another_study_of_the_folder_and_keep_the_earlier_one(
    machine, invoke
):
    invoke(
        *RUN, "--set", "virtual.jitter=lognormal", "--set", "virtual.jitter_sigma=0.3"
    )
    first, lost, charged = rows(), losses(), read_calibration(MINE / "calibration.json")
    machine.factor = 5.0
    said = invoke("recalibrate", "results/mine", "--jobs", "1", "--jitter", "none")
    assert runs_charged(said) == (len(first), 0)
    assert "results/mine/earlier/1/" in said
    assert read_calibration(MINE / "calibration.json") == charged, (
        "it charges them again"
    )
    steady = rows()
    alike = [
        "strategy",
        "workers",
        "repetition",
        "final_metric",
        "syncs",
        "bytes_sent_per_worker",
    ]
    assert (
        steady[alike].reset_index(drop=True).equals(first[alike].reset_index(drop=True))
    )
    assert (steady["train_s"].to_numpy() != first["train_s"].to_numpy()).all()
    assert losses() == lost
    assert load_study(MINE / "study.yaml", {}, []).virtual.jitter == "none"
    assert sorted(load(MINE / "earlier" / "1").completed["train_s"]) == sorted(
        first["train_s"]
    )
    assert runs_made(invoke("run", "results/mine/study.yaml")) == (0, 3)
    invoke(
        "recalibrate",
        "results/mine",
        "--jobs",
        "1",
        "--cluster",
        "juwels-booster",
        "--device-step-time",
        "0.02",
    )
    assert set(rows()["cluster"]) == {"juwels-booster"}
    steps = steady.loc[steady["strategy"] == "serial", "optimizer_steps"].to_numpy(
        dtype=float
    )
    assert times(rows(), "serial") == pytest.approx(0.02 * steps, rel=0.05), (
        "the last batch is smaller"
    )
    assert not (MINE / "calibration.json").exists(), "it charges nothing"
    assert runs_made(invoke("run", "results/mine/study.yaml")) == (0, 3)
    assert "results/mine/earlier/3/" in invoke(
        "recalibrate", "results/mine", "--jobs", "1", "--jitter", "lognormal"
    )
    assert "jitter_sigma" in invoke(
        "recalibrate",
        "results/mine",
        "--jobs",
        "1",
        "--jitter",
        "normal",
        "--jitter-sigma",
        "2",
        code=2,
    )


@needs_mpi
@pytest.mark.thorough
def test_native_rows_stay_beside_other_virtual_ones(machine, invoke):
    words = [word for word in RUN if word not in ("--execution", "virtual")]
    invoke(*words, "--workers", "1")
    native = rows()[rows()["execution"] == "native"]
    invoke(
        "recalibrate",
        "results/mine",
        "--jobs",
        "1",
        "--cluster",
        "juwels-booster",
        "--device-step-time",
        "0.02",
    )
    assert rows()[rows()["execution"] == "native"].equals(native)
    assert runs_made(invoke("run", "results/mine/study.yaml")) == (0, len(rows()))


def test_groups_of_another_size_are_trained_again(machine, invoke):
    words = [*RUN[:-6], "--workers", "8", "--strategy", "allreduce", "--strategy", "post_local_sgd: {subgroup: 0}",
             "--name", "mine"]  # fmt: skip
    invoke(*words, "--cluster", "juwels-booster", "--device-step-time", "0.02")
    said = invoke("recalibrate", "results/mine", "--jobs", "1", "--cluster", "dgx-h100")
    assert runs_charged(said) == (1, 1), "of eight workers a node, not four"
