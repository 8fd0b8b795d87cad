"""Facts of the study, its machines, and the commands that repeat it."""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from scalebench.analysis import Results, environment, tuning_trials
from scalebench.comm import engines
from scalebench.figures.drawing.caption import describe_machines
from scalebench.formatting import counted, metric_word
from scalebench.records.provenance import redact
from scalebench.report.comparison import EXECUTIONS_IN_WORDS
from scalebench.study.cell import EXECUTIONS, strategy_rank

RECORDS = ("runs.csv", "epochs.csv", "study.yaml", "calibration.json")
_LISTS = ("nodes", "packages", "environment")  # facts that are shown folded
_DEEPEST = 4  # levels of nested facts
_IDENTITY = ("host_hash", "packages_hash", "git_commit")

Fact = tuple[str, str]


def study_facts(results: Results) -> tuple[Fact, ...]:
    """Return model, data, training settings and number of runs."""
    # Failed runs tell what was planned where none was completed.
    runs = results.completed if len(results.completed) else results.runs
    last = runs.iloc[-1]
    counts = sorted(int(count) for count in runs["workers"].unique())
    batch = "per worker" if last["batch_policy"] == "per_worker" else "global"
    sizes = sorted(
        {int(size) for size in runs[f"batch_{last['batch_policy']}"].dropna()},
        reverse=True,
    )
    measured = pd.notna(last["metric_name"])
    facts = {
        "strategies": ", ".join(sorted(set(runs["label"].unique()), key=strategy_rank)),
        "workers": ", ".join(map(str, counts)),
        "scaling": f"{last['scaling']}: samples per {'epoch' if last['scaling'] == 'strong' else 'worker'} fixed",
        "batch": f"{' or '.join(map(str, sizes))} {batch}, at every worker count"
        if sizes
        else "",
        "model": f"{last['model']}{_counted(last['parameters'], ' ({:,} parameters)')}, {last['dtype']}",
        "data": f"{last['dataset']}{_counted(last['n_train'], ', {:,} training samples')}"
        f"{_counted(last['n_test'], ', {:,} held out')}; partition {last['partition']}, shuffle {last['shuffle']}",
        "training": f"{counted(int(last['epochs']), 'epoch')}, {tuning_trials.optimizer_in_words(results, last)}",
        "tuning": tuning_trials.tuning_in_words(results)
        or "none: all strategies share these values",
        "metric": f"{metric_word(last['metric_name'])} of the consensus model on held-out data"
        if measured
        else "none",
        "repetitions": f"{runs['repetition'].nunique()}, each a whole run with its seed",
        "executions": "; ".join(_executions(runs)),
        "machines": describe_machines(results) if len(results.completed) else "",
        "step times": environment.stated_in_words(results),
        "runs": f"{len(results.completed):,} completed, {len(results.failed):,} not",
        "made": _period(results.runs["started_utc"].dropna()),
    }
    return tuple((name, text) for name, text in facts.items() if text)


def machines(
    rows: pd.DataFrame, provenance: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return number of rows in runs.csv, hardware and packages of each launch environment, a file in provenance/."""
    found = []
    for place, facts in enumerate(provenance, start=1):
        # rows of other writers: matched by host, packages and commit
        own = rows["provenance"].isna()
        for name in _IDENTITY:
            own &= rows[name].fillna("") == str(facts.get(name) or "")
        own |= rows["provenance"].fillna("") == facts["provenance"]
        plain = {
            name: value
            for name, value in facts.items()
            if name not in (*_LISTS, "provenance")
        }
        lists = [(name, list(_flat(facts[name]))) for name in _LISTS if facts.get(name)]
        runs = int(own.sum())
        found.append(
            {
                "name": f"Environment {place}",
                "runs": runs,
                "facts": list(_flat(plain)),
                "lists": lists,
            }
        )
    return found


def rerun_of(results: Results, provenance: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the commands that run the study again, the study, and the checksums of its records."""
    folder, runs = results.folder, results.runs
    file = folder / "study.yaml"
    study = (
        redact(file.read_text(errors="replace"), names=False) if file.is_file() else ""
    )
    commits = sorted(runs["git_commit"].dropna().unique())
    remarks = []
    # A study that went on after an update is of several programs.
    if len(commits) > 1:
        remarks.append(
            f"The runs were made by {len(commits)} commits of scalebench; the commands name the last run's."
        )
    if runs["git_dirty"].fillna(False).any():
        remarks.append(
            "The checkout had changes that are not in the commit: these numbers cannot be made exactly."
        )
    if _calibrated(results):
        remarks.append(
            "Virtual times follow from calibration.json, which lies beside the records: charged by it, virtual rows "
            "come out the same, bit for bit on one machine and build of torch. Without it the machine is measured anew."
        )
    files = {
        "data set": "dataset_sha256",
        "model's file": "model_sha256",
        "initial weights": "init_weights_sha256",
    }
    files |= {"cluster's file": "cluster_sha256", "strategy's file": "strategy_sha256"}
    records = [folder / name for name in RECORDS if (folder / name).is_file()]
    checksums = [
        (path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in records
    ]
    for name, column in files.items():
        checksums += [(name, digest) for digest in runs[column].dropna().unique()]
    return {
        "commands": "\n".join(_commands(results, provenance)),
        "study": study,
        "study_link": f"data:application/yaml;base64,{base64.b64encode(study.encode()).decode()}",
        "checksums": checksums,
        "remarks": remarks,
    }


def _commands(results: Results, provenance: list[dict[str, Any]]) -> Iterator[str]:
    commit = results.runs["git_commit"].iloc[-1]
    # Runs of an installed package have no commit.
    if isinstance(commit, str):
        yield f"git checkout {shlex.quote(commit)}   # of scalebench"
        yield 'pip install -c constraints.txt "scalebench[mpi] @ ."'
    else:
        packages = [
            facts["packages"]
            for facts in provenance
            if isinstance(facts.get("packages"), dict)
        ]
        versions = sorted(
            str(each["scalebench"]) for each in packages if "scalebench" in each
        )
        yield f"pip install {shlex.quote(f'scalebench[mpi]=={versions[-1]}' if versions else 'scalebench[mpi]')}"
    # Horovod is built by a command of its own, which a study without it does not need.
    used = [
        engines.named(name)
        for name in engines.NAMES
        if (results.runs["engine"] == name).any()
    ]
    yield from (engine.added_by for engine in used if engine.added_by)
    yield f"scalebench run study.yaml{' --calibration calibration.json' if _calibrated(results) else ''}"
    yield "scalebench report"


def _calibrated(results: Results) -> bool:
    return (
        bool((results.runs["execution"] == "virtual").any())
        and (results.folder / "calibration.json").is_file()
    )


def _executions(runs: pd.DataFrame) -> Iterator[str]:
    for execution in [
        name for name in EXECUTIONS if name in set(runs["execution"].unique())
    ]:
        own = runs[runs["execution"] == execution]
        engines = sorted(set(own["engine"].unique()) - {execution})
        through = f" through {', '.join(engines)}" if engines else ""
        yield f"{execution} ({EXECUTIONS_IN_WORDS[execution]}) on {own['cluster'].iloc[-1]}{through}"


def _period(started: pd.Series[str]) -> str:
    times = sorted({text[:16].replace("T", " ") for text in started})
    return f"{' to '.join(times[:: max(1, len(times) - 1)])} UTC" if times else ""


def _counted(number: Any, words: str) -> str:
    return "" if pd.isna(number) else words.format(int(number))


def _flat(facts: Any, path: tuple[str, ...] = ()) -> Iterator[Fact]:
    """Flatten nested facts to `cpu model: ...`, without unknown ones."""
    name = " ".join(path).replace("_", " ")
    if isinstance(facts, Mapping) and len(path) < _DEEPEST:
        for key, value in facts.items():
            yield from _flat(value, (*path, str(key)))
    elif isinstance(facts, bool):
        yield name, "yes" if facts else "no"
    elif isinstance(facts, list):
        yield from [(name, "; ".join(_plain(item) for item in facts))] if facts else []
    elif facts is not None:
        yield name, _plain(facts)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
