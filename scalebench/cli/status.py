"""`scalebench status [RESULTS]`: the progress of a study, in an instant even for large records.

Of a submitted study it prints the jobs: records first, the scheduler's word beside
them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

from scalebench.cli.options import json_option, results_argument, study_folder
from scalebench.errors import UsageError
from scalebench.formatting import counted, roughly

# neither pandas nor torch in this command, which may be called in a loop
from scalebench.records.folder import is_submitted

if TYPE_CHECKING:
    from scalebench.batch.standing import ShardStanding
    from scalebench.records.lock import Owner
    from scalebench.records.progress import Progress

_SHOWN = 5  # failed runs


@click.command()
@results_argument
@json_option
@click.option(
    "--watch",
    is_flag=True,
    help="Go on until no job of a submitted study runs or waits.",
)
@click.option(
    "--poll",
    type=click.IntRange(min=1),
    default=30,
    show_default=True,
    metavar="SECONDS",
    help="Time between two questions to the scheduler, of all commands together.",
)
def status(results: Path | None, as_json: bool, watch: bool, poll: int) -> int:
    """Say what of the study in RESULTS (of several the newest; default: results/) is done and left.

    The expected time is that of the finished runs of the same execution and engine.

    Of a study that was submitted, say for each job what is done by its own records, and
    why the rest is not: running, waiting or failed, as the scheduler says. With --watch
    the exit code is 0 if all runs are done, 1 if some failed, and 3 if some are left
    without a job.
    """
    folder = study_folder(results)
    if is_submitted(folder):
        return _watch_jobs(folder, as_json=as_json, watch=watch, poll_s=poll)
    if watch:
        raise UsageError(
            f"--watch: {folder} was not submitted as jobs; scalebench run shows its own progress"
        )
    # here and below: records cost more than `--help` may take
    from scalebench.records.lock import owner_of
    from scalebench.records.progress import progress_of

    progress = progress_of(folder)
    owner = owner_of(folder)
    if as_json:
        click.echo(json.dumps(_facts(progress, owner), indent=2))
    else:
        for line in _lines(progress, owner, folder):
            click.echo(line)
    return 0


def _facts(progress: Progress, owner: Owner | None) -> dict[str, object]:
    return {
        "study": progress.study,
        "planned": progress.planned,
        "done": progress.done,
        "failed": [asdict(failure) for failure in progress.failures],
        "remaining": dict(progress.remaining),
        "most_to_come": progress.most_to_come,
        "left_s": progress.left_s,
        "doubled": progress.repeated,
        "other_data": progress.other_data,
        "without_epochs": list(progress.without_epochs),
        "writer": asdict(owner) if owner else None,
    }


def _lines(progress: Progress, owner: Owner | None, folder: Path) -> Iterator[str]:
    """Yield what is done, what is wrong with it, who goes on with it, and the next step."""
    from scalebench.records.progress import lost_epochs

    left = progress.remaining.total()
    yield (
        f"{progress.study}: {progress.done} of {counted(progress.planned, 'run')} done, "
        f"{len(progress.failures)} failed, {left} remaining"
    )
    yield from _expected(progress)
    for failure in progress.failures[:_SHOWN]:
        yield f"{failure.status}: {failure.run_id}: {failure.error}"
    if len(progress.failures) > _SHOWN:
        yield f"... and {len(progress.failures) - _SHOWN} more, in {folder / 'runs.csv'}"
    if progress.without_epochs:
        yield f"{lost_epochs(progress.without_epochs)}: the command that made the study runs them again"
    if progress.other_data:
        yield (
            f"{counted(progress.other_data, 'row')} of other data than the latest (dataset_sha256): in no table or "
            "figure; give each data set a study name of its own"
        )
    if owner:
        yield f"running: {owner}"
    elif left:
        yield "not running; the command that began it goes on with it"
    # a command that is running may be making them again
    if progress.failures and not owner:
        yield f"to run the failed ones again: scalebench run {folder} --retry"


def _expected(progress: Progress) -> list[str]:
    if not progress.remaining:
        return []
    lines = []
    if progress.left_s is not None:
        paces = ", ".join(
            f"{progress.seconds_per_run[group]:.2g} s per {group} run"
            for group in progress.remaining
            if group in progress.seconds_per_run
        )
        lines.append(f"about {roughly(progress.left_s)} left ({paces})")
    for group, count in progress.without_estimate.items():
        lines.append(f"no time known yet for {counted(count, f'{group} run')}")
    if progress.most_to_come:
        lines.append(
            f"up to {progress.most_to_come} more may follow, until each interval is as narrow as asked"
        )
    return lines


def _watch_jobs(folder: Path, *, as_json: bool, watch: bool, poll_s: float) -> int:
    """Print the standing of each shard; with `watch` again whenever it changed, until no job runs or waits."""
    from scalebench.batch import standing, submission

    shown: list[ShardStanding] = []
    while True:
        # read again at each look: another command may submit more
        found = standing.standings(
            folder, submission.read_submission(folder), poll_s=poll_s
        )
        # a log of a watched study has a line for each change
        if found != shown:
            shown = found
            if as_json:
                click.echo(json.dumps(_facts_of_jobs(folder, found)))
            else:
                _print_jobs(folder, found)
        if not watch:
            return 0
        # unknown: a scheduler that does not answer now may do so at the next look
        if not any(each.state in ("running", "pending", "unknown") for each in found):
            return _exit_code_of_jobs(found)
        time.sleep(poll_s)


def _exit_code_of_jobs(found: Sequence[ShardStanding]) -> int:
    from scalebench.cli.run_common import RUNS_LEFT

    if any(each.failed for each in found):
        return 1
    return 0 if all(each.state == "done" for each in found) else RUNS_LEFT


def _facts_of_jobs(folder: Path, found: Sequence[ShardStanding]) -> dict[str, object]:
    shards = [
        {
            "shard": each.shard.number,
            "workers": each.shard.workers,
            "executions": each.shard.executions,
            "nodes": each.shard.nodes,
            "job": each.job,
            "state": each.state,
            "why": each.why,
            "planned": len(each.shard.run_ids),
            "done": each.done,
            "failed": each.failed,
        }
        for each in found
    ]
    return {
        "study": folder.name,
        "planned": sum(len(each.shard.run_ids) for each in found),
        "done": sum(each.done for each in found),
        "remaining": sum(each.left for each in found),
        "shards": shards,
    }


def _print_jobs(folder: Path, found: Sequence[ShardStanding]) -> None:
    # Tables are imported here: the status of a study without jobs is there in an
    # instant.
    from scalebench.measured import Measured
    from scalebench.tables.screen import print_results
    from scalebench.tables.table import COUNT, Column, Table

    columns: list[Column[ShardStanding]] = [
        Column("shard", lambda each: Measured(each.shard.number), COUNT),
        Column("workers", _workers, left=True),
        Column("nodes", lambda each: Measured(each.shard.nodes), COUNT),
        Column("done", lambda each: f"{each.done}/{len(each.shard.run_ids)}"),
        Column("job", lambda each: each.job, left=True),
        Column(
            "state",
            lambda each: f"{each.state}: {each.why}" if each.why else each.state,
            left=True,
        ),
    ]
    planned = sum(len(each.shard.run_ids) for each in found)
    done = sum(each.done for each in found)
    failed = sum(each.failed for each in found)
    title = f"{folder.name}: {done} of {counted(planned, 'run')} done, {failed} failed, {planned - done - failed} left"
    print_results(Table.of(title, columns, found), *_next(folder, found))


def _workers(each: ShardStanding) -> str:
    shard = each.shard
    at = ", ".join(map(str, shard.workers))
    at += f", repetition {shard.repetition + 1}" if shard.repetition is not None else ""
    return f"{at} (virtual)" if shard.is_simulated else at


def _next(folder: Path, found: Sequence[ShardStanding]) -> list[str]:
    """Return the command that leads on."""
    if any(each.state in ("failed", "stopped", "not submitted") for each in found):
        return [
            f"to submit what is left again: scalebench submit {folder}; --time HH:MM:SS gives its jobs more time"
        ]
    if all(each.state == "done" for each in found):
        return [
            f"all runs are done; scalebench collect {folder} merges them where the last job did not, "
            f"scalebench plot {folder} draws them"
        ]
    return []
