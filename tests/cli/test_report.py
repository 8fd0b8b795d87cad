"""Options of `scalebench report`; tests/report covers the page."""

from __future__ import annotations

import pytest

from scalebench.cli.main import main
from tests.facts import together


def test_output_must_end_in_html(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main.main(
            ["report", "results/mine", "--output", "page.txt"], prog_name="scalebench"
        )
    assert end.value.code == 2
    assert together(capsys.readouterr().err, "page.txt", "expected", ".html")
    assert not (tmp_path / "page.txt").exists()
