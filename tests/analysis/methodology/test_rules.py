"""Each rule finds its violation in a doctored study, and nothing in a sound one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scalebench.analysis.methodology import RULES, check
from scalebench.records.progress import Planned
from scalebench.records.provenance import name_of
from tests.doctored import Doctored, described

# rule, severity, text of the finding, change of the study
CASES: list[tuple[str, str, str, Callable[[Doctored], Any]]] = []


def case(
    rule: str, severity: str, said: str
) -> Callable[[Callable[[Doctored], Any]], Callable[[Doctored], Any]]:
    def add(doctor: Callable[[Doctored], Any]) -> Callable[[Doctored], Any]:
        CASES.append((rule, severity, said, doctor))
        return doctor

    return add


def native(row):
    return row.execution == "native"


def on_nodes(study, nodes):
    """The measured runs used `nodes`."""
    facts = described(nodes=nodes)
    study.provenance.append(facts)
    study.change(native, provenance=name_of(facts))


@case("speedup-base", "warning", "no completed run of serial at 1 worker (native)")
def serial_is_missing(study):
    study.drop(lambda row: row.strategy == "serial" and native(row))


@case("speedup-base", "note", "native mpi speedups are over serial on one worker, ")
def nothing_is_wrong_but_the_base_is_to_be_said(study):
    pass


@case(
    "trimmed-memory",
    "warning",
    "by dask workers with MALLOC_TRIM_THRESHOLD_=65536, which slows torch",
)
def dask_trims_memory(study):
    study.change(native, launcher="dask", malloc_trim_bytes=65536)


@case("retrained-blocks", "warning", " that were trained again, as a worker died")
def a_worker_died(study):
    study.change(native, launcher="processes", blocks_retrained=2)


@case(
    "untuned",
    "note",
    "all strategies share lr 0.1 at every worker count: none was tuned",
)
def nothing_is_wrong_but_that_it_was_not_tuned_is_to_be_said(study):
    pass


def tuned(study, **best):
    """All runs have the value of the best of three trials, which are the same for all points."""
    study.study |= {
        "tune": {
            "over": {"lr": [0.01, 1.0]},
            "trials": 3,
            "metric": "time_to_target",
            "validation": 0.2,
        }
    }
    study.change(tuned='{"lr": 0.1}')
    first = next(
        row
        for row in study.rows
        if row.strategy == "allreduce" and row.execution == "virtual"
    )
    values = {0: 0.01, 1: 0.1, 2: 1.0}
    study.rows = [
        first.model_copy(
            update={
                "run_id": f"allreduce-w1-t{trial}-virtual", "trial": trial, "tuned": f'{{"lr": {lr}}}', "lr": lr,
                "target_metric": 0.9, "time_to_target_s": best.get(f"t{trial}"), "final_metric": 0.8,
            }
        )
        for trial, lr in values.items()
    ] + study.rows  # fmt: skip


@case(
    "tuning-edge",
    "warning",
    "the best lr is the least or the largest that was tried (1.0) at 1 of 1 point",
)
def the_best_value_is_the_largest(study):
    tuned(study, t1=0.5, t2=0.4)


@case(
    "reduction-base",
    "error",
    "nothing to measure any reduction against: no completed run of allreduce",
)
def allreduce_is_missing(study):
    study.drop(lambda row: row.strategy == "allreduce")


@case("reduction-base", "error", "on engine mpi at 4 workers (native)")
def allreduce_is_on_another_engine_at_four_workers(study):
    study.change(
        lambda row: row.strategy == "allreduce" and native(row) and row.workers == 4,
        engine="gloo",
    )


@case(
    "reduction-base",
    "error",
    "ddp at 1 worker (native) is oversubscribed and so no baseline",
)
def the_only_baseline_is_oversubscribed(study):
    study.change(lambda row: row.strategy == "allreduce", strategy="ddp")
    study.change(lambda row: row.strategy == "ddp", oversubscribed=True)


@case("reduction-base", "warning", "what synchronising less often saves against")
def only_ddp_is_left_to_compare_with(study):
    study.change(lambda row: row.strategy == "allreduce", strategy="ddp")


@case(
    "weak-baseline",
    "warning",
    "allreduce is slower than ddp, by up to 100 % of ddp's time at 4 workers",
)
def ddp_is_twice_as_fast_as_allreduce(study):
    more = [
        row.model_copy(
            update={
                "strategy": "ddp",
                "run_id": f"ddp-{row.run_id}",
                "train_s": row.train_s / 2,
            }
        )
        for row in study.rows
        if row.strategy == "allreduce" and row.workers == 4
    ]
    study.rows += more


@case("superlinear", "warning", "efficiency is up to 2.0")
def two_workers_are_four_times_as_fast(study):
    times = {
        row.repetition: row.train_s
        for row in study.rows
        if row.strategy == "serial" and native(row)
    }
    study.change(
        lambda row: native(row) and row.workers == 2 and row.strategy == "allreduce",
        train_s=lambda row: times[row.repetition] / 2,
    )


@case(
    "superlinear",
    "warning",
    "efficiency is up to 3.20 without an interval (allreduce, 2 workers)",
)
def a_single_run_is_more_than_ideal(study):
    (base,) = [
        row.train_s
        for row in study.rows
        if row.strategy == "serial" and native(row) and row.repetition == 0
    ]
    study.change(
        lambda row: native(row) and row.repetition > 0, status="failed", error="lost"
    )
    study.change(
        lambda row: native(row) and row.workers == 2 and row.strategy == "allreduce",
        train_s=lambda row: base / 3.2,
    )


@case(
    "mixed-configurations",
    "error",
    "batch_policy is per_worker (60 runs), global (10 runs)",
)
def two_batch_policies(study):
    study.change(lambda row: row.workers == 4 and native(row), batch_policy="global")


@case("mixed-configurations", "error", "lr is 0.1 (65 runs), 0.5 (5 runs)")
def two_learning_rates(study):
    study.change(
        lambda row: row.workers == 4 and native(row) and row.strategy == "allreduce",
        lr=0.5,
    )


@case("mixed-configurations", "error", "dataset_sha256 is")
def the_data_changed_on_the_way(study):
    study.change(dataset_sha256="a")
    study.change(lambda row: row.repetition == 4, dataset_sha256="b")


@case(
    "mixed-executions",
    "warning",
    "no one execution covers all worker counts of allreduce: a curve",
)
def the_lower_half_is_native_and_the_upper_virtual(study):
    study.drop(
        lambda row: row.strategy == "allreduce" and native(row) == (row.workers == 4)
    )


@case(
    "mixed-executions",
    "note",
    "times of 2 kinds: native at 1, 2, 4 workers, virtual at 1, 2, 4 workers",
)
def both_executions_at_all_counts(study):
    pass


@case("reduced-batch", "warning", "batch_per_worker is 5 rather than 8")
def a_shard_is_smaller_than_the_batch(study):
    study.change(lambda row: row.workers == 4, batch_per_worker=5, batch_global=20)


@case(
    "unequal-steps",
    "warning",
    "epoch_average takes 50 at 2 workers where the baselines take 113",
)
def averaging_takes_fewer_steps(study):
    study.change(
        lambda row: row.strategy == "epoch_average" and row.workers == 2,
        steps_per_epoch=50,
    )


@case("falling-steps", "note", "steps per epoch fall from 113 at 1 worker to 28 at 4")
def strong_scaling_at_a_fixed_batch_per_worker(study):
    study.change(
        scaling="strong", n_train=900, steps_per_epoch=lambda row: 113 // row.workers
    )


@case(
    "few-steps", "warning", "as few as 4 steps between synchronisations: at most 75 %"
)
def four_steps_an_epoch(study):
    study.change(
        lambda row: row.strategy == "epoch_average", optimizer_steps=24, syncs=6
    )


@case(
    "few-steps", "warning", "as few as 0.8 steps between synchronisations: at most 0 %"
)
def one_step_an_epoch_and_a_last_average(study):
    study.change(
        lambda row: row.strategy == "epoch_average", optimizer_steps=4, syncs=5
    )


@case("few-steps", "warning", "as few as 1 step between synchronisations")
def one_step_an_epoch(study):
    study.change(
        lambda row: row.strategy == "epoch_average", optimizer_steps=5, syncs=5
    )


@case("few-runs", "warning", "7 native cells of one run")
def one_repetition(study):
    study.drop(lambda row: row.repetition > 0)


@case("spread", "warning", "vary by more than 10 %")
def times_vary(study):
    study.change(
        lambda row: native(row) and row.workers == 2,
        train_s=lambda row: row.train_s * 1.2**row.repetition,
    )


def averaging_natively_on_two(row):
    return row.strategy == "epoch_average" and row.workers == 2 and native(row)


@case(
    "odd-runs",
    "warning",
    "in 1 of 7 native cells the mean time lies outside the median's interval",
)
def one_run_in_twelve_took_fifty_times_as_long(study):
    study.repeat(averaging_natively_on_two, [1 + n / 1000 for n in range(11)] + [50.0])


@case("two-groups", "warning", "the times of 1 of 7 native cells fall into two groups")
def the_machine_had_two_states(study):
    study.repeat(averaging_natively_on_two, [1 + n % 2 + n / 1000 for n in range(20)])


@case("drift", "warning", "native times moved by +")
def the_machine_grew_slower(study):
    last = max(row.run_order for row in study.rows)
    study.change(native, train_s=lambda row: row.train_s * (1 + row.run_order / last))


@case(
    "runs-apart",
    "warning",
    "1 native ratio lost pairs to runs that were not made side by side: 1 without such rounds",
)
def a_run_of_the_last_count_was_made_again_at_an_unknown_time(study):
    def last(row):
        return (
            native(row)
            and row.strategy == "epoch_average"
            and (row.workers, row.repetition) == (4, 2)
        )

    study.drop(
        lambda row: native(row) and row.strategy == "serial" and row.repetition == 2
    )
    study.change(last, attempt=2)


@case("virtual-error", "warning", "virtual times are off native ones by")
def real_runs_take_twice_as_long(study):
    study.change(native, train_s=lambda row: 2 * row.train_s)


@case("virtual-error", "note", "no native point checks the virtual times")
def no_native_runs(study):
    study.drop(native)


@case(
    "unsettled",
    "note",
    "whether time is saved against allreduce is open in 1 of 2 native comparisons",
)
def averaging_takes_as_long_as_allreduce(study):
    times = {
        row.repetition: row.train_s
        for row in study.rows
        if row.strategy == "allreduce" and row.workers == 2 and native(row)
    }
    study.change(
        averaging_natively_on_two,
        train_s=lambda row: times[row.repetition] * (1 + (-1) ** row.repetition / 50),
    )


@case("metric", "error", "70 runs of 70 without a metric")
def no_metric(study):
    study.change(final_metric=None)


@case("metric", "note", "modelled times have no metric")
def modelled_times(study):
    study.change(lambda row: not native(row), execution="modelled", final_metric=None)


@case("metric", "error", "15 runs of 70 without a metric")
def one_strategy_without_a_metric(study):
    study.change(
        lambda row: row.strategy == "epoch_average" and native(row), final_metric=None
    )


@case(
    "metric-cost",
    "warning",
    "accuracy is worse than that of allreduce by more than 0.01, by up to 0.1",
)
def averaging_learns_less(study):
    study.change(
        lambda row: row.strategy == "epoch_average" and row.workers == 4,
        final_metric=lambda row: row.final_metric - 0.1 - 1e-4 * row.repetition,
    )


@case("time-to-target", "warning", "no target metric is stated")
def no_target(study):
    study.change(target_metric=None, time_to_target_s=None)


@case("time-to-target", "note", "15 runs of 70 never reached 0.9")
def the_target_is_not_reached(study):
    study.change(
        lambda row: row.strategy == "epoch_average" and native(row),
        time_to_target_s=None,
    )


@case(
    "small-test-set",
    "note",
    "accuracies are over 50 test samples: a standard error of 2.3 percentage points",
)
def fifty_test_samples(study):
    study.change(n_test=50)


def averaging_at_four(row):
    return row.strategy == "epoch_average" and native(row) and row.workers == 4


@case(
    "at-chance",
    "warning",
    "5 runs of 70 end at chance level, with accuracy 0.101 where one answer to everything",
)
def nothing_was_learned(study):
    study.change(chance_metric=0.1)
    study.change(averaging_at_four, final_metric=0.101, best_metric=0.12)


@case(
    "at-chance",
    "warning",
    "5 runs of 70 end with less than half of what they once had learned, with accuracy 0.4",
)
def what_was_learned_is_lost(study):
    study.change(chance_metric=0.1)
    study.change(averaging_at_four, final_metric=0.4, best_metric=0.9)


@case(
    "at-chance",
    "warning",
    "with r2 -0.050 where one answer to everything reaches 0.000",
)
def a_regression_worse_than_the_mean(study):
    study.change(metric_name="r2", chance_metric=0.0)
    study.change(averaging_at_four, final_metric=-0.05, best_metric=0.01)


@case("clock-resolution", "error", "5 completed runs without a positive training time")
def the_clock_saw_no_time_pass(study):
    study.change(lambda row: row.strategy == "serial" and native(row), train_s=0.0)


@case("clock-resolution", "warning", "all times are multiples of 10.0 ms")
def times_were_rounded(study):
    study.change(native, train_s=lambda row: round(row.train_s, 2))


@case("short-runs", "warning", "took less than 100 ms, the shortest")
def runs_of_a_few_milliseconds(study):
    study.change(native, train_s=lambda row: row.train_s / 100)


@case("warm-up", "warning", "35 runs without warm-up steps")
def no_warm_up(study):
    study.change(native, warmup_steps=0)


@case(
    "warm-up",
    "warning",
    "the first epoch is slower than the later ones by +50 % (median) in 35 of 35 runs",
)
def too_short_a_warm_up(study):
    study.epochs = {
        run: [
            row.model_copy(update={"epoch_s_max": row.epoch_s_max * 1.5})
            if row.epoch == 0
            else row
            for row in epochs
        ]
        for run, epochs in study.epochs.items()
    }


@case(
    "oversubscribed", "warning", "2 cells with more workers than the machine can feed"
)
def more_workers_than_cores(study):
    study.change(lambda row: native(row) and row.workers == 4, oversubscribed=True)


def of_a_missed_pace(study):
    """All native runs are paced, and those of one worker missed the pace."""
    study.change(lambda row: native(row) and row.workers == 1, paced_overrun=0.5)
    study.change(native, execution="paced")


@case("oversubscribed", "warning", "3 cells with steps slower than the stated pace")
def a_pace_was_not_kept(study):
    of_a_missed_pace(study)


@case(
    "disturbed",
    "warning",
    "2 cells disturbed in all runs, as other programs took more than 25 % of the cores",
)
def others_took_the_cores(study):
    study.change(
        others_load=lambda row: 0.3 if native(row) and row.workers == 2 else 0.02
    )


@case(
    "busy-machine",
    "warning",
    "10 % or more of the cores in 2 of 7 measured cells: 20 % (median), up to 20 %",
)
def others_used_the_machine(study):
    study.change(
        others_load=lambda row: 0.2 if native(row) and row.workers == 2 else 0.02
    )


@case(
    "busy-machine",
    "warning",
    "7 of 7 virtual cells when they were calibrated: 12 % (median)",
)
def others_used_the_machine_while_it_was_calibrated(study):
    study.change(others_load=lambda row: 0.02 if native(row) else 0.12)


@case(
    "mixed-commits",
    "error",
    "runs of 2 commits: 0000000000 (63 runs), 1111111111 (7 runs)",
)
def half_way_the_code_changed(study):
    study.change(lambda row: native(row) and row.repetition == 4, git_commit="1" * 40)


@case("mixed-commits", "error", "runs of 2 commits")
def some_rows_have_no_commit(study):
    study.change(lambda row: row.repetition == 4, git_commit=None)


@case("dirty-commit", "warning", "70 runs of a checkout with uncommitted changes")
def uncommitted_changes(study):
    study.change(git_dirty=True)


@case(
    "mixed-machines",
    "error",
    "measured on 2 machines: cafe (Model 1, 4 cores), f00d (Model 2, 8 cores)",
)
def two_machines(study):
    study.change(lambda row: row.repetition == 4, host_hash="f00d")
    study.provenance.append(
        described("f00d", cpu={"model": "Model 2", "usable_cores": 8})
    )


@case("mixed-machines", "warning", "measured on 2 machines of one kind")
def two_equal_nodes(study):
    study.change(lambda row: row.repetition == 4, host_hash="f00d")
    study.provenance.append(described("f00d"))


@case(
    "mixed-machines",
    "error",
    "measured on 2 machines: cafe (Model 1, 4 cores), f00d (Model 2, 8 cores)",
)
def one_job_on_nodes_of_two_kinds(study):
    on_nodes(
        study,
        {
            "cafe": described(),
            "f00d": described("f00d", cpu={"model": "Model 2", "usable_cores": 8}),
        },
    )


@case(
    "mixed-machines",
    "error",
    "measured on 2 machines: cafe (Model 1, 4 cores), f00d (not described)",
)
def a_row_names_a_machine_that_its_file_does_not(study):
    study.change(native, provenance=name_of(study.provenance[0]))
    study.change(lambda row: native(row) and row.repetition == 4, host_hash="f00d")


@case("mixed-packages", "error", "2 sets of packages: torch 2.13.0 / 2.12.0")
def another_torch(study):
    study.change(lambda row: row.repetition == 4, packages_hash="f00d")
    study.provenance.append(
        described(packages="f00d") | {"packages": {"torch": "2.12.0"}}
    )


@case("mixed-packages", "warning", "2 sets of packages: rich absent / 15.0")
def another_package_beside(study):
    study.change(lambda row: row.repetition == 4, packages_hash="f00d")
    study.provenance.append(
        described(packages="f00d") | {"packages": {"torch": "2.13.0", "rich": "15.0"}}
    )


@case("mixed-packages", "warning", "provenance/ does not say which differ")
def another_environment_that_nothing_describes(study):
    study.change(lambda row: row.repetition == 4, packages_hash="f00d")


@case("no-provenance", "warning", "describes the machine and packages of 70 runs")
def provenance_was_deleted(study):
    study.provenance = []


@case("no-provenance", "warning", "describes the machine and packages of 10 runs")
def the_file_that_some_rows_name_was_deleted(study):
    """Another file of the same host and packages does not describe their nodes."""
    study.change(
        lambda row: native(row) and row.workers == 4, provenance="0123456789ab"
    )


@case("no-provenance", "warning", "study.yaml is missing")
def the_study_was_deleted(study):
    study.study = {}


@case(
    "no-provenance",
    "warning",
    "no calibration.json that can be read: nothing says what 35 virtual runs cost",
)
def the_calibration_was_deleted(study):
    study.calibration = None


@case(
    "no-provenance",
    "warning",
    "no calibration.json that can be read: nothing says what 35 virtual runs cost",
)
def the_calibration_is_empty(study):
    study.calibration = {}


@case("frequency-scaling", "warning", "the processors' governor is powersave")
def the_clock_rate_follows_the_load(study):
    study.provenance = [described(cpu={"usable_cores": 4, "governor": "powersave"})]


@case("frequency-scaling", "warning", "the processors' governor is ondemand")
def the_clock_rate_of_another_node_follows_the_load(study):
    on_nodes(
        study,
        {
            "f00d": described(
                "f00d",
                cpu={"model": "Model 1", "usable_cores": 4, "governor": "ondemand"},
            )
        },
    )


@case(
    "failed-runs",
    "warning",
    "2 runs of other cells in no statistic (1 diverged, 1 timeout)",
)
def two_runs_failed(study):
    cell = [
        row.run_id
        for row in study.rows
        if row.strategy == "epoch_average" and row.workers == 4 and native(row)
    ]
    study.change(lambda row: row.run_id == cell[0], status="diverged", train_s=None)
    study.change(lambda row: row.run_id == cell[1], status="timeout", train_s=None)


@case("failed-runs", "error", "no run of 1 cell was completed (5 diverged)")
def a_cell_failed(study):
    study.change(
        lambda row: (
            row.strategy == "epoch_average" and row.workers == 4 and native(row)
        ),
        status="diverged",
        train_s=None,
    )


@case(
    "failed-runs",
    "error",
    "(5 diverged): the curves go on without them; 1 run of other cells in no statistic",
)
def a_cell_failed_and_one_run_of_another(study):
    a_cell_failed(study)
    study.change(
        lambda row: row.run_id == study.rows[0].run_id, status="timeout", train_s=None
    )


@case(
    "retried-runs", "warning", "1 run completed at a later attempt (1 diverged before)"
)
def a_diverged_run_was_tried_again(study):
    tried = study.rows[3].model_copy(update={"status": "diverged", "train_s": None})
    study.rows[3] = study.rows[3].model_copy(update={"attempt": 2})
    study.rows.insert(3, tried)


@case(
    "retried-runs",
    "warning",
    "1 run completed at a later attempt (without a row of what came before)",
)
def the_row_of_a_failed_attempt_was_deleted(study):
    study.rows[3] = study.rows[3].model_copy(update={"attempt": 2})


@case("retried-runs", "note", "1 run completed at a later attempt (1 timeout before)")
def a_run_was_made_again_after_its_time_was_up(study):
    tried = study.rows[3].model_copy(update={"status": "timeout", "train_s": None})
    study.rows[3] = study.rows[3].model_copy(update={"attempt": 2})
    study.rows.insert(3, tried)


@case("unfinished", "error", "1 run of 71 planned never made")
def killed_before_the_last_run(study):
    study.unmade = [Planned("the-last-one", "hash", "native mpi")]


@case("missing-epochs", "warning", "epochs of 2 completed runs are missing (")
def epochs_of_two_runs_were_cut_off(study):
    for row in study.rows[:2]:
        study.epochs[row.run_id] = study.epochs[row.run_id][:-1]


@case(
    "still-wide",
    "note",
    "intervals of 1 of 14 points are wider than the 10 % of the time that was asked for",
)
def one_point_is_still_wide_at_the_most(study):
    study.study["until"] = {"ci_width": 0.1, "at_least": 3, "at_most": 5}
    study.change(
        lambda row: (
            native(row) and row.strategy == "epoch_average" and row.workers == 4
        ),
        train_s=lambda row: row.train_s * (1 + 0.05 * row.repetition),
    )


@pytest.mark.parametrize(
    ("rule", "severity", "said", "doctor"),
    CASES,
    ids=[case[3].__name__ for case in CASES],
)
def test_rule_finds_its_violation(sound, tmp_path, rule, severity, said, doctor):
    doctor(sound)
    others = set(RULES.names()) - {rule}
    own = check(sound.write(tmp_path), ignore=others).findings
    matching = [
        finding
        for finding in own
        if finding.severity == severity and said in finding.what
    ]
    assert len(matching) == 1, own
    assert matching[0].where
    assert matching[0].fix


def test_a_sound_study_breaks_no_rule(sound, tmp_path):
    report = check(sound.write(tmp_path))
    assert [(finding.severity, finding.rule) for finding in report.findings] == [
        ("note", "mixed-executions"),  # what the text has to say
        ("note", "speedup-base"),
        ("note", "speedup-base"),
        ("note", "untuned"),
    ]


def test_baseline_within_noise_is_not_weak(sound, tmp_path):
    """ddp is faster in the mean, by 2 %, and slower in two of five rounds: the interval holds 1."""
    factors = (0.90, 1.08, 0.92, 1.06, 0.95)
    sound.rows += [
        row.model_copy(
            update={
                "strategy": "ddp",
                "run_id": f"ddp-{row.run_id}",
                "run_order": 1000 + row.run_order,
                "train_s": row.train_s * factors[row.repetition],
            }
        )
        for row in sound.rows
        if row.strategy == "allreduce" and row.workers == 4 and native(row)
    ]
    report = check(sound.write(tmp_path))
    assert "weak-baseline" in report.passed


def test_variant_beside_plain_allreduce_is_not_weak(sound, tmp_path):
    def slower(row, strategy, factor, options="{}"):
        new = {
            "strategy": strategy,
            "strategy_options": options,
            "train_s": row.train_s * factor,
        }
        return row.model_copy(
            update={**new, "run_id": f"{strategy}-{factor}-{row.run_id}"}
        )

    plain = [row for row in sound.rows if row.strategy == "allreduce"]
    sound.rows += [slower(row, "ddp", 1.2) for row in plain]
    sound.rows += [
        slower(row, "allreduce", 2.0, '{"compression": "powersgd"}') for row in plain
    ]
    assert "weak-baseline" in check(sound.write(tmp_path)).passed
    sound.drop(lambda row: row.strategy == "allreduce" and row.strategy_options == "{}")
    found = [
        finding
        for finding in check(sound.write(tmp_path / "alone")).findings
        if finding.rule == "weak-baseline"
    ]
    assert found


@pytest.mark.parametrize(
    ("other", "advice"), [("diverged", "lower the learning rate"), ("timeout", "retry")]
)
def test_diverged_runs_are_not_retried(sound, tmp_path, other, advice):
    cell = [
        row.run_id
        for row in sound.rows
        if row.strategy == "epoch_average" and row.workers == 4 and native(row)
    ]
    sound.change(lambda row: row.run_id == cell[0], status="diverged", train_s=None)
    sound.change(lambda row: row.run_id == cell[1], status=other, train_s=None)
    (found,) = [
        finding
        for finding in check(sound.write(tmp_path)).findings
        if finding.rule == "failed-runs"
    ]
    assert advice in found.fix


def test_single_disturbed_run_is_not_a_busy_machine(sound, tmp_path):
    sound.change(others_load=lambda row: 0.4 if row.repetition == 0 else 0.0)
    assert not [
        finding
        for finding in check(sound.write(tmp_path)).findings
        if finding.rule == "busy-machine"
    ]


def test_equal_nodes_of_one_job_are_accepted(sound, tmp_path):
    on_nodes(sound, {host: described(host) for host in ("cafe", "f00d")})
    assert not [
        finding
        for finding in check(sound.write(tmp_path)).findings
        if finding.rule == "mixed-machines"
    ]


def fix_of(folder, rule):
    (found,) = [
        one
        for one in check(folder).findings
        if one.rule == rule and one.severity == "warning"
    ]
    return found.fix


@pytest.mark.parametrize(
    ("strategies", "advice"),
    [
        (["serial", "allreduce", "epoch_average"], "let serial complete"),
        (["allreduce", "epoch_average"], "add serial to the study's strategies"),
    ],
)
def test_only_a_base_that_the_study_lacks_is_to_be_added(
    sound, tmp_path, strategies, advice
):
    serial_is_missing(sound)
    sound.study["strategies"] = strategies
    (fix,) = [
        one.fix
        for one in check(sound.write(tmp_path)).findings
        if one.rule == "speedup-base" and one.what.startswith("no speedup")
    ]
    assert fix.startswith(advice)


def test_base_that_missed_its_pace_is_not_used(sound, tmp_path):
    of_a_missed_pace(sound)
    said = [
        one.what
        for one in check(sound.write(tmp_path)).findings
        if one.rule == "speedup-base"
    ]
    assert not [what for what in said if what.startswith("paced")]
    assert [
        what for what in said if what.startswith("virtual speedups are over serial")
    ]


@pytest.mark.parametrize(
    ("study", "option"),
    [
        ({}, "--repetitions 7"),
        ({"until": {"ci_width": 0.05}}, "--set until.at_least=7"),
    ],
)
def test_fix_names_the_option_of_the_study(sound, tmp_path, study, option):
    """`repetitions` and `until` are refused together."""
    sound.drop(lambda row: row.repetition > 2 or not native(row))
    sound.study |= study
    assert fix_of(sound.write(tmp_path), "few-runs").startswith(option)


def test_fix_names_a_target_that_every_run_of_the_base_reached(sound, tmp_path):
    sound.change(
        target_metric=None,
        time_to_target_s=None,
        final_metric=lambda row: 0.418 + 0.01 * row.repetition,
    )
    assert "(--set target_metric=0.41 --new)" in fix_of(
        sound.write(tmp_path), "time-to-target"
    )


def test_every_rule_has_a_case():
    assert {rule for rule, *_ in CASES} == set(RULES.names())
