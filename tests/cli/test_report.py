"""`scalebench report`, as far as the command line goes; tests/report looks at the page."""

from __future__ import annotations

import pytest

from scalebench.cli.main import main


def test_a_page_is_called_html(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main.main(["report", "results/mine", "--output", "page.txt"], prog_name="scalebench")
    assert end.value.code == 2
    assert "page.txt: expected a name that ends in .html" in capsys.readouterr().err
    assert not (tmp_path / "page.txt").exists()
