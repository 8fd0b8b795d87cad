"""Application of rules, and the registry."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scalebench.analysis import load
from scalebench.analysis.methodology import (
    RULES,
    SEVERITIES,
    TWELVE,
    Evidence,
    Finding,
    check,
    finding,
    rule,
)
from scalebench.errors import ResultsError, UsageError


def test_report_sorts_by_severity_and_lists_ignored_rules(sound, tmp_path):
    sound.change(git_dirty=True, final_metric=None)
    evidence = Evidence(load(sound.write(tmp_path)))
    report = check(evidence, ignore=["dirty-commit"])
    order = [SEVERITIES.index(finding.severity) for finding in report.findings]
    assert order == sorted(order)
    assert report.count("error") == 1
    assert report.ignored == ["dirty-commit"]
    found = {finding.rule for finding in report.findings}
    assert found | set(report.passed) | set(report.ignored) == set(RULES.names())
    assert "dirty-commit" in {finding.rule for finding in check(evidence).findings}


def test_unknown_ignored_rule_is_refused(sound, tmp_path):
    with pytest.raises(
        UsageError, match="unknown rule 'dirty-comit'; did you mean 'dirty-commit'"
    ):
        check(sound.write(tmp_path), ignore=["dirty-comit"])


def test_a_folder_without_records_is_refused(tmp_path):
    with pytest.raises(ResultsError, match=r"holds no runs\.csv"):
        check(tmp_path)


def test_study_without_completed_runs_has_one_error(sound, tmp_path):
    sound.change(status="failed", train_s=None, final_metric=None)
    errors = [
        finding.rule
        for finding in check(sound.write(tmp_path)).findings
        if finding.severity == "error"
    ]
    assert errors == ["failed-runs"]


def test_damaged_provenance_counts_as_missing(sound, tmp_path):
    folder = sound.write(tmp_path)
    for file in (folder / "provenance").iterdir():
        file.write_text('{"host_hash": ')
    assert Evidence(load(folder)).provenance == []
    assert "no-provenance" in {finding.rule for finding in check(folder).findings}


def test_rule_of_another_package_is_applied(sound, tmp_path, monkeypatch):
    RULES.names()
    monkeypatch.setattr(RULES, "_classes", dict(RULES._classes))

    @rule("nobody else used the machine")
    def quiet(evidence):
        yield finding(
            "error",
            f"{len(evidence.runs)} runs beside a build",
            "all",
            "measure at night",
        )

    report = check(sound.write(tmp_path))
    assert report.findings[0] == Finding(
        "error", "quiet", "70 runs beside a build", "all", "measure at night"
    )


def test_twelve_rules_name_existing_rules():
    assert [kept.number for kept in TWELVE] == list(range(1, 13))
    for kept in TWELVE:
        assert set(kept.checked) <= set(RULES.names())
        assert kept.checked or kept.by_construction
    assert set(RULES.names()) <= {name for kept in TWELVE for name in kept.checked} | {
        "unequal-steps",
        "small-test-set",
    }


def test_page_lists_every_rule():
    page = (Path(__file__).parents[3] / "docs" / "checking.md").read_text(
        encoding="utf-8"
    )
    assert [name for name in RULES.names() if f"`{name}`" not in page] == []


def test_example_rule_of_the_page_works(sound, tmp_path, monkeypatch):
    page = (Path(__file__).parents[3] / "docs" / "checking.md").read_text(
        encoding="utf-8"
    )
    (block,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    RULES.names()
    monkeypatch.setattr(RULES, "_classes", dict(RULES._classes))
    exec(block, {})
    sound.change(
        started_utc=lambda row: f"2026-11-{22 + row.repetition}T08:57:31.557+00:00"
    )
    found = [
        finding.what
        for finding in check(sound.write(tmp_path)).findings
        if finding.rule == "quiet-nights"
    ]
    assert found == ["7 runs on a Sunday"]
