"""Jobs of a submitted study as `scalebench status` prints them: records first, the scheduler's word beside them."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

from scalebench.cli.run_common import RUNS_LEFT
from scalebench.formatting import counted
from scalebench.measured import Measured
from scalebench.tables.screen import print_results
from scalebench.tables.table import COUNT, Column, Table

if TYPE_CHECKING:
    from scalebench.batch.standing import ShardStanding


def watch_jobs(folder: Path, *, as_json: bool, watch: bool, poll_s: float) -> int:
    """Print the standing of each shard; with `watch` again whenever it changed, until no job runs or waits."""
    from scalebench.batch.standing import standings
    from scalebench.batch.submission import read_submission

    shown: list[ShardStanding] = []
    while True:
        found = standings(folder, read_submission(folder), poll_s=poll_s)
        if found != shown:
            shown = found
            if as_json:
                click.echo(json.dumps(_facts(folder, found)))
            else:
                _print(folder, found)
        if not watch:
            return 0
        if not any(each.state in ("running", "pending", "unknown") for each in found):
            return _exit_code(found)
        time.sleep(poll_s)


def _exit_code(found: Sequence[ShardStanding]) -> int:
    if any(each.failed for each in found):
        return 1
    return 0 if all(each.state == "done" for each in found) else RUNS_LEFT


def _facts(folder: Path, found: Sequence[ShardStanding]) -> dict[str, object]:
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


def _print(folder: Path, found: Sequence[ShardStanding]) -> None:
    columns: list[Column[ShardStanding]] = [
        Column("shard", lambda each: Measured(each.shard.number), COUNT),
        Column("workers", _workers, left=True),
        Column("nodes", lambda each: Measured(each.shard.nodes), COUNT),
        Column("done", lambda each: f"{each.done}/{len(each.shard.run_ids)}"),
        Column("job", lambda each: each.job, left=True),
        Column("state", lambda each: f"{each.state}: {each.why}" if each.why else each.state, left=True),
    ]
    planned, done = sum(len(each.shard.run_ids) for each in found), sum(each.done for each in found)
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
        return [f"to submit what is left again: scalebench submit {folder}"]
    if all(each.state == "done" for each in found):
        return [f"all runs are done; scalebench collect {folder} merges them where the last job did not"]
    return []
