"""Division of a study into shards, and what each of them asks for."""

from __future__ import annotations

import pytest

from scalebench.batch.schedulers.slurm import Slurm
from scalebench.batch.shards import (
    allocation_for,
    divide,
    limits_of,
    only_virtual,
    part_of,
    require_nodes,
)
from scalebench.batch.site import Site, SiteError
from scalebench.errors import StudyError, UsageError
from scalebench.launch.hosts import Allocation, this_host
from scalebench.launch.planning import plan_study
from scalebench.study.load import load_study
from tests.conftest import needs_mpi
from tests.facts import naming, together

FOUR = Allocation.asked(4, 2)
KEYS = {
    "dataset": "wine",
    "workers": "1,2,4,6",
    "strategies": ["serial", "allreduce"],
    "execution": "native",
    "engine": "gloo",
    "repetitions": 2,
}


def planned(allocation=FOUR, **keys):
    return plan_study(load_study(None, KEYS | keys, []), allocation)


def divided(plan, grouping="nodes", by_repetition=False, allocation=FOUR):
    return divide(
        plan,
        allocation,
        grouping,
        by_repetition=by_repetition,
        limit_s=lambda runs: 60 * len(runs),
    )


def shapes(shards):
    return [
        (shard.nodes, shard.workers, shard.executions, shard.repetition)
        for shard in shards
    ]


NATIVE, VIRTUAL = ["native"], ["virtual"]


@needs_mpi
def test_counts_of_equally_many_nodes_share_a_job_and_the_largest_comes_first():
    plan = planned()
    assert shapes(divided(plan)) == [
        (3, [6], NATIVE, None),
        (2, [4], NATIVE, None),
        (1, [1, 2], NATIVE, None),
    ]
    assert shapes(divided(plan, "count")) == [
        (3, [6], NATIVE, None), (2, [4], NATIVE, None), (1, [2], NATIVE, None), (1, [1], NATIVE, None),
    ]  # fmt: skip
    assert shapes(divided(plan, "all")) == [(3, [1, 2, 4, 6], NATIVE, None)]
    assert [shard.number for shard in divided(plan)] == [1, 2, 3]


@needs_mpi
@pytest.mark.parametrize("grouping", ["nodes", "count", "all"])
@pytest.mark.parametrize("by_repetition", [False, True])
def test_every_run_is_in_one_shard_and_keeps_its_name_and_place(
    grouping, by_repetition
):
    if grouping == "all" and by_repetition:
        pytest.skip("not applicable: refused")
    plan = planned(execution="auto")
    whole = {run.run_id: run for run in plan.sweep.runs}
    shards = divided(plan, grouping, by_repetition)
    names = [name for shard in shards for name in shard.run_ids]
    assert sorted(names) == sorted(whole)
    here = this_host()
    made = [run for shard in shards for run in part_of(plan, shard, here).sweep.runs]
    assert {run.run_id: run for run in made} == whole
    assert part_of(plan, shards[0], here).allocation == here != plan.allocation


@needs_mpi
def test_virtual_runs_are_one_shard_on_one_node():
    *real, virtual = divided(
        planned(execution="auto", workers="1,2,4,64"), by_repetition=True
    )
    assert shapes([virtual]) == [(1, [1, 2, 4, 64], VIRTUAL, None)]
    assert virtual.is_simulated
    assert {shard.executions[0] for shard in real} == {"native"}


@needs_mpi
def test_an_array_has_the_repetitions_of_each_shape():
    assert shapes(divided(planned(workers="2,4"), by_repetition=True)) == [
        (2, [4], NATIVE, 0), (2, [4], NATIVE, 1), (1, [1, 2], NATIVE, 0), (1, [1, 2], NATIVE, 1),
    ]  # fmt: skip


@needs_mpi
def test_studies_that_decide_as_they_go_are_one_job():
    growing = plan_study(
        load_study(None, KEYS | {"repetitions": None}, ["until.ci_width=5%"]), FOUR
    )
    with pytest.raises(
        StudyError, match=r"until: later runs depend on earlier ones .* use --group all"
    ):
        divided(growing)
    (shard,) = divided(growing, "all")
    assert part_of(growing, shard, this_host()).sweep.further == growing.sweep.further
    with pytest.raises(UsageError, match="leave one out"):
        divided(planned(), "all", by_repetition=True)


@needs_mpi
def test_a_shard_whose_runs_are_no_longer_planned_is_refused():
    largest = divided(planned())[0]
    with pytest.raises(
        StudyError, match=r"shard 1 \(6 workers, native, 3 nodes\): 2 runs of it"
    ):
        part_of(planned(epochs=2), largest, this_host())


@needs_mpi
def test_servers_get_a_node_where_there_is_one():
    plan = planned(strategies=["asp"], engine="auto", workers="2,4")
    assert [shard.nodes for shard in divided(plan)] == [3, 2], (
        "4 workers and 2 workers with a server each"
    )


@pytest.mark.parametrize(
    ("site", "options", "nodes", "slots"),
    [
        (Site(cores_per_node=4), (None, None), 3, 4),
        (Site(cores_per_node=4, nodes=2), (None, None), 2, 4),
        (Site(cores_per_node=4), (None, 2), 4, 2),
        (Site(), (None, 6), 2, 6),
        (Site(cores_per_node=4, gpus_per_node=2), (None, None), 3, 4),
    ],
)
def test_allocation_is_as_large_as_the_largest_runs_need(
    monkeypatch, site, options, nodes, slots
):
    monkeypatch.setenv("PATH", "")
    asked = allocation_for(load_study(None, KEYS, []), site, Slurm(), *options)
    assert (len(asked.hosts), asked.hosts[0].slots, asked.is_here) == (
        nodes,
        slots,
        False,
    )


def test_a_worker_takes_a_gpu_where_the_engine_computes_there(monkeypatch):
    monkeypatch.setenv("PATH", "")
    site = Site(cores_per_node=64, gpus_per_node=2)
    on_gpus = load_study(None, KEYS | {"engine": "nccl"}, [])
    asked = allocation_for(on_gpus, site, Slurm(), None, None)
    assert (asked.hosts[0].slots, asked.hosts[0].gpus, asked.gpus) == (2, 2, 8)
    assert (
        allocation_for(load_study(None, KEYS, []), site, Slurm(), None, None).gpus == 0
    ), "gloo asks for none"


def test_a_partition_that_is_too_small_is_named_with_the_counts(clients):
    study = load_study(None, KEYS | {"workers": "2,8,16"}, [])
    with pytest.raises(SiteError) as error:
        allocation_for(study, Site(), Slurm(), None, None)
    said = str(error.value)
    assert together(
        said, "partition p", "3 nodes of 2 workers", "8, 16 workers", "--workers 2"
    )
    assert (
        len(
            allocation_for(
                study.model_copy(update={"execution": "auto"}),
                Site(),
                Slurm(),
                None,
                None,
            ).hosts
        )
        == 3
    )


def test_more_nodes_than_the_partition_has_are_refused_whatever_was_stated(clients):
    study = load_study(None, KEYS | {"workers": "2,8,16"}, [])
    site = Site(partition="p", nodes=50)
    with pytest.raises(SiteError, match="partition p has at most 3 nodes of 2 workers"):
        allocation_for(study, site, Slurm(), None, None)
    # the partition may be among the options
    assert len(allocation_for(study, Site(nodes=50), Slurm(), None, None).hosts) == 9


def test_cores_that_nobody_says_are_asked_for(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(
        SiteError,
        match=r"the cores of a node are unknown.*cores_per_node in site\.yaml",
    ):
        allocation_for(load_study(None, KEYS, []), Site(), Slurm(), None, None)


@needs_mpi
def test_time_limits_are_stated_or_estimated_with_a_margin_and_bounded_by_the_site(
    monkeypatch,
):
    plan = planned()
    assert limits_of(plan, FOUR, Site(), 77)(plan.sweep.runs) == 77
    monkeypatch.setattr("scalebench.batch.shards.kept_step", lambda plan: 10.0)
    few, many = plan.sweep.runs[:1], plan.sweep.runs
    estimated = limits_of(plan, FOUR, Site(), None)
    assert 600 < estimated(few) < estimated(many)
    assert estimated(many) % 300 == 0
    assert limits_of(plan, FOUR, Site(max_time=900), None)(many) == 900
    assert limits_of(plan, FOUR, Site(), None, 1200)(many) == 1200
    assert limits_of(plan, FOUR, Site(max_time=900), None, 1200)(many) == 900


def test_counts_that_no_job_holds_are_noted_where_they_have_virtual_runs(clients):
    study = load_study(None, KEYS | {"workers": "2,8,16", "execution": "auto"}, [])
    asked = allocation_for(study, Site(), Slurm(), None, None)
    assert only_virtual(study, asked) == [
        "virtual runs alone at 8, 16 workers: a job has at most 3 nodes of 2 workers"
    ]
    assert only_virtual(study.model_copy(update={"workers": [2, 6]}), asked) == []


def test_nodes_that_were_stated_are_named_as_what_to_change(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(
        SiteError,
        match=naming("2 nodes", "2 workers", "6 workers", "--nodes"),
    ):
        allocation_for(
            load_study(None, KEYS | {"workers": "6"}, []),
            Site(cores_per_node=2),
            Slurm(),
            2,
            None,
        )


@needs_mpi
def test_a_shard_is_refused_in_a_job_of_fewer_nodes(monkeypatch):
    large, middle, small = divided(planned())
    here = Allocation.asked(2, 2)
    require_nodes(large, here)  # by hand, outside of jobs
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    with pytest.raises(
        StudyError,
        match=r"shard 1 .*: it was planned for 3 nodes, and mpirun reaches 2 in this job",
    ):
        require_nodes(large, here)
    require_nodes(middle, here)
    require_nodes(small, here)
