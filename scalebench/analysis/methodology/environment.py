"""Rules about machine, code and packages (Hoefler and Belli 2015, rule 9)."""

from __future__ import annotations

from collections.abc import Iterator

from scalebench.analysis.environment import DECISIVE, calibration_in, changed_packages, hardware, machines_of
from scalebench.analysis.methodology import Evidence, Finding, finding, rule
from scalebench.formatting import counted, listed
from scalebench.study.spec import SIMULATED


@rule("all runs were made by one commit of scalebench")
def mixed_commits(evidence: Evidence) -> Iterator[Finding]:
    """Runs of two versions of the code are two experiments."""
    commits = evidence.runs["git_commit"]
    if commits.nunique() > 1 or (commits.isna().any() and commits.notna().any()):
        counts = commits.fillna("no commit").str[:10].value_counts()
        yield finding(
            "error",
            f"runs of {len(counts)} commits: "
            + listed((f"{commit} ({counted(int(count), 'run')})" for commit, count in counts.items()), 4),
            evidence.runs[commits != commits.mode().iloc[0]],
            "run the whole study at one commit, or one study for each",
        )


@rule("the checkout that ran had no changes beside its commit")
def dirty_commit(evidence: Evidence) -> Iterator[Finding]:
    """A commit does not identify the code of a checkout with uncommitted changes."""
    dirty = evidence.runs[evidence.runs["git_dirty"].fillna(False).astype(bool)]
    if len(dirty):
        yield finding(
            "warning",
            f"{counted(len(dirty), 'run')} of a checkout with uncommitted changes: no commit says what ran",
            dirty,
            "commit, then run the study anew (--new)",
        )


@rule("all measured runs of a study were made on one machine, or on equal ones")
def mixed_machines(evidence: Evidence) -> Iterator[Finding]:
    """Times of different machines are not comparable; virtual times do not depend on the machine."""
    runs = evidence.measured
    machines = machines_of(runs, evidence.provenance)
    kinds = {host: hardware(facts) if facts else None for host, facts in machines.items()}
    alike = None not in kinds.values() and len(set(kinds.values())) == 1
    several = runs["host_hash"].nunique() > 1
    if len(kinds) > 1 and (several or not alike):  # equal nodes of one job are fine
        what = "machines of one kind" if alike else "machines"
        yield finding(
            "warning" if alike else "error",
            f"measured on {len(kinds)} {what}: "
            + listed((f"{host} ({kind or 'not described'})" for host, kind in kinds.items()), 4),
            runs[runs["host_hash"] != runs["host_hash"].mode().iloc[0]] if several else runs,
            "measure the whole study on one machine, or say that the nodes are equal and how that was checked",
        )


@rule("all runs used the same package versions")
def mixed_packages(evidence: Evidence) -> Iterator[Finding]:
    """Versions of libraries affect times and metrics."""
    runs = evidence.runs
    hashes = list(runs["packages_hash"].dropna().unique())
    if len(hashes) < 2:
        return
    changed = changed_packages(evidence.provenance, hashes)
    decisive = [name for name in changed if name in DECISIVE]
    what = [f"{name} {' / '.join(versions)}" for name, versions in changed.items()]
    yield finding(
        "error" if decisive else "warning",
        f"{len(hashes)} sets of packages: " + (listed(what, 6) if what else "provenance/ does not say which differ"),
        runs[runs["packages_hash"] != runs["packages_hash"].mode().iloc[0]],
        "run the whole study in one environment (constraints.txt pins it)",
    )


@rule("the resolved study, the machine and packages of every run and the calibration are on record")
def no_provenance(evidence: Evidence) -> Iterator[Finding]:
    """Study, machine, packages and calibration are needed to repeat a study."""
    if not evidence.results.study:
        yield finding(
            "warning",
            "study.yaml is missing: what was run is known only as far as the rows tell",
            str(evidence.results.folder),
            "keep the whole folder that `scalebench run` wrote",
        )
    runs = evidence.runs
    unknown = runs[~runs["provenance"].isin({facts["provenance"] for facts in evidence.provenance})]
    if len(unknown):
        yield finding(
            "warning",
            f"nothing in provenance/ describes the machine and packages of {counted(len(unknown), 'run')}",
            unknown,
            "keep the whole folder that `scalebench run` wrote",
        )
    charged = runs[runs["execution"].isin(SIMULATED) & (runs["cluster"] == "this-machine")]
    if len(charged) and calibration_in(evidence.results.folder) is None:
        yield finding(
            "warning",
            f"no calibration.json that can be read: nothing says what {counted(len(charged), 'virtual run')} cost, nor "
            "gives the same times again",
            charged,
            "keep the whole folder that `scalebench run` wrote",
        )


@rule("measured runs had processors at a fixed clock rate, as far as the machine says")
def frequency_scaling(evidence: Evidence) -> Iterator[Finding]:
    """With a governor other than `performance` the clock rate follows the load, and times depend on earlier load."""
    governors = {
        str(facts["cpu"]["governor"])
        for facts in machines_of(evidence.measured, evidence.provenance).values()
        if facts and (facts.get("cpu") or {}).get("governor")
    } - {"performance"}
    if governors:
        yield finding(
            "warning",
            f"the processors' governor is {listed(sorted(governors))}: clock rates follow the load",
            evidence.measured,
            "cpupower frequency-set -g performance, or state the governor",
        )


@rule("no worker of a dask scheduler gave the memory of each step back to the kernel")
def trimmed_memory(evidence: Evidence) -> Iterator[Finding]:
    """dask sets a variable with which torch asks the kernel for the memory of every step anew."""
    slowed = evidence.runs[evidence.runs["malloc_trim_bytes"].notna()]
    if len(slowed):
        variable = f"MALLOC_TRIM_THRESHOLD_={slowed['malloc_trim_bytes'].min():.0f}"
        yield finding(
            "warning",
            f"{counted(len(slowed), 'run')} by dask workers with {variable}, which slows torch",
            slowed,
            "leave it out of distributed.nanny.pre-spawn-environ where the scheduler's workers are started",
        )


@rule("every block of tasks was trained once")
def retrained_blocks(evidence: Evidence) -> Iterator[Finding]:
    """The time of a run holds what a worker that died had done of its block."""
    again = evidence.runs[evidence.runs["blocks_retrained"].fillna(0) > 0]
    if len(again):
        blocks = counted(int(again["blocks_retrained"].sum()), "block")
        yield finding(
            "warning",
            f"{counted(len(again), 'run')} with {blocks} that were trained again, as a worker died: times hold both",
            again,
            "run them again (scalebench run --new), or leave them out of comparisons",
        )
