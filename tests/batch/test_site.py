"""Facts of a site: where they are looked for, and what is refused."""

from __future__ import annotations

import pytest
import yaml
from click.testing import CliRunner

from scalebench.batch import site as rooms
from scalebench.batch.site import Site, SiteError, site_for, site_template
from scalebench.cli.main import main
from scalebench.study.validation import parse_duration
from tests.facts import together


@pytest.mark.parametrize(
    ("written", "seconds"),
    [("00:10:00", 600), ("1-12:00:00", 129600), (90, 90), ("24:00:00", 86400)],
)
def test_durations_are_read_as_schedulers_write_them(written, seconds):
    assert parse_duration(written) == seconds
    assert (
        Site.model_validate(yaml.safe_load(f"max_time: {written}")).max_time == seconds
    )


@pytest.mark.parametrize("written", ["soon", "2:30", "00:00:00", "", "-5", 0, True])
def test_durations_that_are_none_are_refused(written):
    with pytest.raises(ValueError, match="expected a time"):
        parse_duration(written)


def test_the_file_beside_the_study_counts_before_the_users_and_the_machines(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert site_for(tmp_path) == (Site(), None)
    own = tmp_path / "config" / "scalebench" / "site.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("account: mine\n")
    assert site_for(tmp_path) == (Site(account="mine"), own)
    beside = tmp_path / "site.yaml"
    beside.write_text("partition: fast\n")
    assert site_for(tmp_path) == (Site(partition="fast"), beside)
    given = tmp_path / "given.yaml"
    given.write_text("nodes: 3\n")
    assert site_for(tmp_path, given) == (Site(nodes=3), given)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("acount: x\n", "unknown key 'acount'; did you mean 'account'?"),
        ("cores: 4\n", "unknown key 'cores'; did you mean 'cores_per_node'?"),
        (
            "scheduler: cron\n",
            "key 'scheduler': expected 'slurm', 'pbs' or 'lsf', got 'cron'",
        ),
        ("nodes: 0\n", "key 'nodes': expected"),
        (
            "max_time: soon\n",
            "expected a time such as 02:30:00 or 1-12:00:00, got 'soon'",
        ),
        ('setup: ["a\\nb"]\n', "expected one line of text"),
        ('account: "a\\nb"\n', "expected one line of text"),
        ("- a\n", "expected a mapping"),
    ],
)
def test_a_bad_file_is_one_line_that_names_file_and_key(tmp_path, text, said):
    (tmp_path / "site.yaml").write_text(text)
    with pytest.raises(SiteError) as error:
        site_for(tmp_path)
    assert said in str(error.value)
    assert str(tmp_path / "site.yaml") in str(error.value)
    assert "\n" not in str(error.value)


def test_template_has_every_key_and_is_read_as_what_is_known():
    text = site_template(
        {"scheduler": "slurm", "partition": "p", "nodes": 3}, ["doctor: Slurm: 22.05"]
    )
    assert Site.model_validate(yaml.safe_load(text)) == Site(
        scheduler="slurm", partition="p", nodes=3
    )
    every = "".join(line.removeprefix("# ") for line in text.splitlines(True)[3:])
    assert set(yaml.safe_load(every)) == set(Site.model_fields)
    Site.model_validate(yaml.safe_load(every))


def test_init_writes_what_is_found_here(clients, tmp_path, monkeypatch):
    monkeypatch.setattr(rooms, "site_files", lambda place: [place / "site.yaml"])
    clients.write("srun", "exit 1")
    done = CliRunner().invoke(
        main, ["init", str(tmp_path), "--site"], standalone_mode=False
    )
    assert together(done.output, "site.yaml", "scalebench submit")
    site, _ = site_for(tmp_path)
    assert (site.scheduler, site.partition, site.nodes, site.cores_per_node) == (
        "slurm",
        "p",
        3,
        2,
    )
    assert site.max_time == 86400
    assert site.launcher in ("mpirun", "srun")
