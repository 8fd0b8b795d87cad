"""A folder holds one study."""

from __future__ import annotations

import pytest

from scalebench.errors import ResultsError
from scalebench.records.study_file import changes, keep_study, with_a_folder_of_its_own
from scalebench.study.load import load_study
from tests.facts import naming


def study(**values):
    return load_study(None, {"name": "mine", **values}, [])


def test_more_points_are_the_same_study_and_another_rate_is_not(tmp_path):
    keep_study(tmp_path, study())
    keep_study(tmp_path, study(workers="1..4", repetitions=9))
    with pytest.raises(
        ResultsError,
        match=naming("another study", "lr was 0.06, is 0.5", "--new"),
    ):
        keep_study(tmp_path, study(lr=0.5))
    assert changes(tmp_path, study(workers="1..4", repetitions=9)) == []


def test_tasks_on_a_scheduler_elsewhere_are_the_same_study_and_another_backend_is_not(
    tmp_path,
):
    keep_study(
        tmp_path, study(tasks={"backend": "dask", "scheduler": "tcp://node1:8786"})
    )
    keep_study(
        tmp_path, study(tasks={"backend": "dask", "scheduler": "tcp://node2:8786"})
    )
    assert "node2" in (tmp_path / "study.yaml").read_text()
    with pytest.raises(
        ResultsError, match=r"tasks was {'backend': 'dask'}, is {'backend': 'ray'}"
    ):
        keep_study(tmp_path, study(tasks={"backend": "ray", "scheduler": "node1:6379"}))


def test_of_many_keys_that_changed_it_is_said_how_many_are_not_shown(tmp_path):
    keep_study(tmp_path, study())
    four = {"lr": 0.5, "epochs": 7, "scaling": "weak", "dtype": "float64"}
    with pytest.raises(ResultsError, match=r"is \w+\); use --new") as refused:
        keep_study(tmp_path, study(**four))
    assert all(f"{key} was" in str(refused.value) for key in four)
    with pytest.raises(ResultsError, match=r"; and 2 more\); use --new"):
        keep_study(tmp_path, study(**four, warmup_steps=3, shuffle="global"))


def test_a_changed_study_gets_the_next_free_folder_and_goes_on_there_the_next_time(
    tmp_path,
):
    keep_study(tmp_path / "mine", study())
    assert with_a_folder_of_its_own(tmp_path, study(repetitions=7)).name == "mine"
    second = with_a_folder_of_its_own(tmp_path, study(lr=0.5))
    assert second.name == "mine-2"
    keep_study(tmp_path / "mine-2", second)
    assert with_a_folder_of_its_own(tmp_path, study(lr=0.5)).name == "mine-2"
    assert with_a_folder_of_its_own(tmp_path, study(lr=0.25)).name == "mine-3"


def test_the_longest_name_still_gets_a_number(tmp_path):
    name = 80 * "x"
    keep_study(tmp_path / name, study(name=name))
    second = with_a_folder_of_its_own(tmp_path, study(name=name, lr=0.5))
    keep_study(tmp_path / second.name, second)
    assert load_study(tmp_path / second.name / "study.yaml", {}, []) == second


def test_a_kill_while_it_is_written_leaves_the_old_one(tmp_path, monkeypatch):
    keep_study(tmp_path, study())
    before = (tmp_path / "study.yaml").read_bytes()

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        keep_study(tmp_path, study(repetitions=9))
    assert (tmp_path / "study.yaml").read_bytes() == before
