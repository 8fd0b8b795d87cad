import time

import pytest

from scalebench.records.durations import durations_in, timed


def test_what_a_command_took_is_kept_beside_the_records(tmp_path):
    with timed(tmp_path, "plot"):
        time.sleep(0.02)
    with timed(tmp_path, "report"):
        pass
    assert 0.02 <= durations_in(tmp_path)["plot"] < 5
    assert 0 <= durations_in(tmp_path)["report"] < 5


def test_a_study_that_goes_on_adds_up_and_figures_drawn_again_do_not(tmp_path):
    (tmp_path / "durations.json").write_text('{"run": 100, "plot": 100}')
    with timed(tmp_path, "run", added=True), timed(tmp_path, "plot"):
        time.sleep(0.01)
    known = durations_in(tmp_path)
    assert 100 < known["run"] < 105
    assert known["plot"] < 5


def test_what_fails_is_not_timed_and_no_folder_is_made(tmp_path):
    with pytest.raises(KeyError), timed(tmp_path, "plot"):
        raise KeyError
    with timed(tmp_path / "nothing", "plot"):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"run": "long", "plot": -1, "report": NaN}', "[" * 5000])
def test_a_damaged_file_tells_nothing_and_is_written_anew(tmp_path, text):
    (tmp_path / "durations.json").write_text(text)
    assert durations_in(tmp_path) == {}
    with timed(tmp_path, "plot"):
        pass
    assert list(durations_in(tmp_path)) == ["plot"]
