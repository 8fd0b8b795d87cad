import time

import pytest

from scalebench.records.folder import durations_in, timed


def test_durations_are_stored_by_command(tmp_path):
    with timed(tmp_path, "plot"):
        time.sleep(0.02)
    with timed(tmp_path, "report"):
        pass
    assert 0.02 <= durations_in(tmp_path)["plot"] < 90
    assert 0 <= durations_in(tmp_path)["report"] < 90


def test_added_durations_accumulate_and_others_are_replaced(tmp_path):
    (tmp_path / "durations.json").write_text('{"run": 100, "plot": 100}')
    with timed(tmp_path, "run", added=True), timed(tmp_path, "plot"):
        time.sleep(0.01)
    known = durations_in(tmp_path)
    assert 100 < known["run"] < 190
    assert known["plot"] < 90


def test_failed_command_and_missing_folder_store_nothing(tmp_path):
    with pytest.raises(KeyError), timed(tmp_path, "plot"):
        raise KeyError
    with timed(tmp_path / "nothing", "plot"):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text", ["", "[1]", "{", '{"run": "long", "plot": -1, "report": NaN}', "[" * 5000]
)
def test_damaged_file_is_empty_and_replaced(tmp_path, text):
    (tmp_path / "durations.json").write_text(text)
    assert durations_in(tmp_path) == {}
    with timed(tmp_path, "plot"):
        pass
    assert list(durations_in(tmp_path)) == ["plot"]
