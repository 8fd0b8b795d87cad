"""Pipelines that others measured, predicted from a row of few devices, and plans that PipeDream committed."""

from __future__ import annotations

from functools import cache
from itertools import combinations, pairwise
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalebench.errors import ResultsError
from scalebench.validation.pipelines import (
    find_plans,
    is_pipelines,
    is_plans,
    predict_pipelines,
    read_pipelines,
    read_plans,
    read_profile,
)
from scalebench.validation.prediction_errors import skill, with_errors

PUBLISHED = Path(__file__).parents[2] / "experiments" / "published" / "pipelines.csv"

PLANS = Path(__file__).parents[2] / "experiments" / "published" / "pipedream.csv"


def errors_of(series):
    table = read_pipelines(PUBLISHED)
    return with_errors(predict_pipelines(table[table["series"] == series]))


def test_resnet_is_predicted_better_than_by_the_bubble():
    """GOAL: 12 % in the mean, and 60 % better than the formula of the bubble."""
    assert is_pipelines(PUBLISHED)
    errors = errors_of("torchgpipe ResNet-101")
    assert errors["workers"].tolist() == [2, 4, 8]
    # seconds; of the throughput 21 to 52 % too high
    assert errors["linear_error"].between(-0.35, -0.17).all()
    assert errors["error"].abs().mean() <= 0.12
    assert skill(errors) >= 0.6


def test_amoebanet_is_predicted_better_than_by_the_bubble():
    """GOAL, alone: 12 % is met, 60 % is missed by 6 points; with ResNet-101 both are met."""
    errors = errors_of("torchgpipe AmoebaNet-D")
    assert errors["workers"].tolist() == [2, 2, 4, 4, 4, 8, 8, 8]
    assert errors["error"].abs().mean() <= 0.12
    assert skill(errors) == pytest.approx(0.54, abs=0.01)
    every = with_errors(predict_pipelines(read_pipelines(PUBLISHED)))
    assert len(every) == 11
    assert every["error"].abs().mean() <= 0.12
    assert skill(every) >= 0.6


def test_rows_of_amoebanet_lie_inside_the_intervals_and_errors_of_the_page():
    """`docs/accuracy.md` states an error for each of the eight rows; 0.1 points are its rounding."""
    errors = errors_of("torchgpipe AmoebaNet-D")
    assert errors["seconds"].between(errors["low"], errors["high"]).all()
    page = (Path(__file__).parents[2] / "docs" / "accuracy.md").read_text()
    _, table = page.split("Of AmoebaNet-D (18, 256)")
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| ")]
    stated = [float(row[5].split()[0]) / 100 for row in rows[1:9]]
    assert errors["error"].tolist() == pytest.approx(stated, abs=1e-3)


def test_a_series_without_a_row_of_one_device_begins_with_its_pipeline_of_the_fewest():
    """The base row, held out too, is predicted as it was measured; the bubble of its own row is none."""
    table = read_pipelines(PUBLISHED)
    base = table[(table["series"] == "torchgpipe AmoebaNet-D") & (table["stages"] == 2)]
    base = base[base["split"] == "base"]
    held = pd.concat([base, base.assign(split="hold")], ignore_index=True)
    (row,) = with_errors(predict_pipelines(held)).itertuples()
    assert row.predicted == pytest.approx(row.measured, rel=1e-9)
    assert row.linear == pytest.approx(row.measured, rel=1e-12)
    assert (row.workers, row.doublings) == (2, 0)


def test_a_series_needs_one_row_of_one_device(tmp_path):
    table = pd.read_csv(PUBLISHED)
    resnet = table[table["series"] == "torchgpipe ResNet-101"]
    resnet[resnet["split"] == "hold"].to_csv(tmp_path / "rows.csv", index=False)
    with pytest.raises(
        ResultsError, match=r"ResNet-101: expected a row of split=base, .*, got 0"
    ):
        read_pipelines(tmp_path / "rows.csv")
    twice = table[table["series"] == "torchgpipe AmoebaNet-D"].assign(split="base")
    twice.to_csv(tmp_path / "rows.csv", index=False)
    with pytest.raises(
        ResultsError, match=r"AmoebaNet-D: .* or of several stages, got 9"
    ):
        read_pipelines(tmp_path / "rows.csv")
    table.assign(batch=0).to_csv(tmp_path / "rows.csv", index=False)
    with pytest.raises(ResultsError, match="expected a number above 0 as batch, got 0"):
        read_pipelines(tmp_path / "rows.csv")


def test_pipedreams_plans_are_found_but_for_one():
    """GOAL: 3-1, 7-1 and 15-1 of VGG16; at 1 GB/s the last is missed: three stages are 4 % faster by the rule."""
    assert is_plans(PLANS)
    plans = {
        (plan.model, plan.workers): plan
        for plan in find_plans(read_plans(PLANS), PLANS.parent)
    }
    missed = plans.pop(("vgg16", 16))
    assert len(plans) == 4
    assert all(
        plan.found == plan.published and plan.found_s == plan.published_s
        for plan in plans.values()
    )
    assert (missed.published, missed.found) == ([15, 1], [13, 2, 1])
    assert missed.published_s / missed.found_s == pytest.approx(1.04, abs=0.005)
    # Steps of 6 %: 1.6 and 1.8 to 8.4 and 9.4 GB/s.
    assert missed.elsewhere == pytest.approx((1.7e9, 8.9e9), rel=0.06)
    assert not any(plan.elsewhere for plan in plans.values())


def test_all_plans_of_vgg16_are_found_over_links_of_25_gbit_per_s():
    table = read_plans(PLANS).assign(bandwidth_bytes_per_s=25e9 / 8)
    plans = find_plans(table[table["model"] == "vgg16"], PLANS.parent)
    assert [plan.found for plan in plans] == [[3, 1], [7, 1], [15, 1]]


@pytest.mark.parametrize(
    ("model", "sums"),
    [
        ("vgg16", (233.902, 438.633, 553430176)),
        ("alexnet", (44.801, 40.520, 244403360)),
    ],
)
def test_profiles_add_up_to_the_published_sums_without_the_input(model, sums):
    profile = read_profile(PLANS.parent / f"pipedream-{model}.csv")
    names = ["forward_ms", "backward_ms", "parameter_bytes"]
    assert profile[names].sum().tolist() == pytest.approx(list(sums), abs=1e-6)


def seconds(profile, first, last, workers, bandwidth):
    """The rule, layer by layer."""
    rows = profile.iloc[first:last]
    compute = (rows["forward_ms"].sum() + rows["backward_ms"].sum()) / 1e3
    average = 4 * (workers - 1) / workers * rows["parameter_bytes"].sum() / bandwidth
    before = profile["activation_bytes"].iloc[first - 1] if first else 0
    inner = first > 0 and last < len(profile)
    behind = profile["activation_bytes"].iloc[last - 1] if inner else 0
    return (
        max(compute + average, 2 * before / bandwidth, 2 * behind / bandwidth) / workers
    )


def artifact_s(profile, workers, bandwidth):
    """`compute_partitioning` of PipeDream's optimizer_graph_hierarchical.py, of a sequence on one level of machines."""
    rows = list(profile.itertuples())

    def stage_s(first, last, machines):
        own = rows[first : last + 1]
        compute = sum(row.forward_ms + row.backward_ms for row in own) / 1000
        nbytes = sum(row.parameter_bytes for row in own)
        return (compute + 4 * (machines - 1) * nbytes / (bandwidth * machines)) / (
            machines
        )

    @cache
    def pipeline_s(last, machines):  # of layers up to `last`
        least = stage_s(0, last, machines)
        for before in range(last):
            for own in range(1, machines):
                transfers = [
                    2 * rows[each].activation_bytes / (bandwidth * own)
                    for each in (before, last)
                    if each < len(rows) - 1
                ]
                seconds = max(
                    pipeline_s(before, machines - own),
                    stage_s(before + 1, last, own),
                    *transfers,
                )
                least = min(least, seconds)
        return least

    return pipeline_s(len(rows) - 1, workers)


def found_on(profile, folder, workers, bandwidth):
    """The plan of a profile."""
    profile.to_csv(folder / "profile.csv", index=False)
    row = {
        "model": "m",
        "profile": "profile.csv",
        "workers": workers,
        "stages": workers,
        "bandwidth_bytes_per_s": bandwidth,
    }
    (plan,) = find_plans(pd.DataFrame([row]), folder)
    return plan


def profile_of(layers):
    names = ["forward_ms", "backward_ms", "activation_bytes", "parameter_bytes"]
    return pd.DataFrame(layers, columns=names).assign(
        layer=[f"{place}" for place in range(len(layers))]
    )


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(
            *[st.floats(0.01, 99)] * 2,
            st.integers(1, 10**6),
            st.integers(0, 10**6),
        ),
        min_size=1,
        max_size=7,
    ),
    st.integers(1, 6),
    st.sampled_from([1e6, 1e7, 1e8]),
)
def test_plans_are_as_fast_as_those_of_pipedreams_optimizer(
    tmp_path_factory, layers, workers, bandwidth
):
    profile = profile_of(layers)
    folder = tmp_path_factory.mktemp("profiles")
    plan = found_on(profile, folder, workers, bandwidth)
    assert plan.found_s == pytest.approx(
        artifact_s(profile, workers, bandwidth), rel=1e-9
    )


@given(
    st.lists(st.tuples(*[st.integers(1, 9)] * 4), min_size=1, max_size=5),
    st.integers(1, 5),
)
def test_no_division_has_a_faster_slowest_stage(tmp_path_factory, layers, workers):
    profile = profile_of(layers)
    plan = found_on(profile, tmp_path_factory.mktemp("profiles"), workers, 1e3)
    every = []
    for stages in range(1, min(len(layers), workers) + 1):
        for inner in combinations(range(1, len(layers)), stages - 1):
            for shares in combinations(range(1, workers), stages - 1):
                borders, sizes = (
                    pairwise([0, *inner, len(layers)]),
                    pairwise([0, *shares, workers]),
                )
                pairs = zip(borders, sizes, strict=True)
                every.append(
                    max(
                        seconds(profile, *border, high - low, 1e3)
                        for border, (low, high) in pairs
                    )
                )
    assert plan.found_s == pytest.approx(min(every))
    assert sum(plan.found) == workers


def test_stages_add_up_to_the_workers(tmp_path):
    table = pd.read_csv(PLANS)
    table.assign(stages="3-2").to_csv(tmp_path / "plans.csv", index=False)
    with pytest.raises(
        ResultsError, match="vgg16: stages 3-2 do not add up to 4 workers"
    ):
        read_plans(tmp_path / "plans.csv")
    (tmp_path / "profile.csv").write_text("layer,forward_ms\na,1\n")
    with pytest.raises(ResultsError, match="column 'backward_ms' is missing"):
        read_profile(tmp_path / "profile.csv")
