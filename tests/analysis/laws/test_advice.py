"""Knee, largest N worth running and fastest N against formulas."""

from __future__ import annotations

import json
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalebench.analysis.laws.bands import linear, reach
from scalebench.analysis.laws.candidates import (
    Candidate,
    amdahl,
    candidates,
    fit,
    gustafson,
    laws_for,
    universal,
)
from scalebench.analysis.laws.render import as_values, count_text, law_rows
from scalebench.analysis.laws.series import Base, _base
from scalebench.analysis.laws.worker_counts import STEP, advise, scaling_of
from tests.law_factory import COUNTS, following, workload


def advice(law, coefficients, efficiency=0.5, **changes):
    series = following(law, coefficients, **changes)
    return advise([Candidate(fit(law, series), series, 0.0, 1.0)], series, efficiency)


@settings(max_examples=40)
@given(st.floats(0.005, 0.4), st.floats(0.2, 0.95))
def test_amdahl(s, efficiency):
    advised = advice(amdahl(), (1 - s, s), efficiency, repetitions=1)
    knee, worth = (1 - s) / s, 1 + (1 / efficiency - 1) / s  # E = 1 / (1 + s (N - 1))
    n = np.arange(1, 1025)
    height = n / (1 + s * (n - 1)) ** 2  # E S; its continuous maximum is at (1 - s) / s
    assert height[advised.knee.workers - 1] == pytest.approx(height.max(), rel=1e-9)
    assert abs(advised.knee.workers - knee) <= 1
    assert advised.worth.workers in (math.floor(worth - 1e-6), math.floor(worth + 1e-6))
    assert advised.knee.at.value == pytest.approx(knee, rel=1e-3)
    assert advised.worth.at.value == pytest.approx(worth, rel=1e-3)
    assert advised.fastest.workers == advised.limit == 64 * 16  # it never gets slower
    assert math.isnan(advised.knee.at.low)  # one repetition has no interval


@settings(max_examples=40)
@given(st.floats(0.005, 0.4), st.floats(0.2, 0.95), st.floats(0.3, 1.2))
def test_efficiency_is_against_the_serial_run(s, efficiency, serial):
    """T(N) = s + (1 - s) / N, and a `serial` time that differs from the strategy at one worker."""
    advised = advice(
        amdahl(),
        (1 - s, s),
        efficiency,
        repetitions=1,
        base=Base(math.log(serial), 0.0, 1),
    )
    worth = (serial / efficiency - (1 - s)) / s  # serial / (N T(N)) = efficiency
    if worth < 1 - 1e-6:
        assert (advised.worth.workers, math.isnan(advised.worth.at.value)) == (0, True)
        assert count_text(advised.worth) == "none"
    elif 1 + 1e-6 < worth < 1000:
        assert advised.worth.workers in (
            math.floor(worth - 1e-6),
            math.floor(worth + 1e-6),
        )
        assert advised.worth.at.value == pytest.approx(worth, rel=1e-3)
    knee = advice(amdahl(), (1 - s, s), efficiency, repetitions=1).knee
    assert (advised.knee.workers, advised.knee.at.value) == (
        knee.workers,
        pytest.approx(knee.at.value, rel=1e-6),
    )


def test_worth_contains_the_noise_of_serial_but_no_shared_noise():
    """400 studies of 5 repetitions: standard error 1.1 %; shared noise of three repetitions is three times the rest."""
    random, held, widths = np.random.default_rng(5), [], []
    true = (1.0 / 0.5 - 0.97) / 0.03
    for _ in range(400):
        shared = random.normal(0, 0.06, (5, 1))
        logs = (
            np.log(0.03 + 0.97 / np.array(COUNTS))
            + shared
            + random.normal(0, 0.02, (5, 7))
        )
        serial = shared[:, 0] + random.normal(0, 0.02, 5)
        own = pd.DataFrame(logs, columns=COUNTS).rename_axis("repetition").reset_index()
        own = own.melt("repetition", var_name="workers", value_name="train_s")
        runs = own.assign(train_s=np.exp(own["train_s"].astype(float)))
        base = _base(dict(enumerate(np.exp(serial))), runs)
        columns = {"at": "workers", "seconds": "train_s", "repetition": "repetition"}
        values = {
            name: runs[column].to_numpy(float) for name, column in columns.items()
        }
        series = following(amdahl(), (0.97, 0.03), repetitions=1, base=base, **values)
        advised = advise(
            [Candidate(fit(amdahl(), series), series, 0.0, 1.0)], series, 0.5
        ).worth
        held.append(advised.at.low <= true <= advised.at.high)
        widths.append(math.log(advised.at.high / advised.at.low))
    assert 0.93 <= np.mean(held) <= 0.985, (
        "Satterthwaite's degrees of freedom are few here, which errs to the safe side"
    )
    assert np.median(widths) < 0.15


@settings(max_examples=40)
@given(st.floats(0, 0.2), st.floats(0.0005, 0.05))
def test_usl_is_fastest_at_its_peak(sigma, kappa):
    advised = advice(universal(weak=False), (1.0, sigma, kappa), repetitions=1)
    # Gunther 2007
    assert abs(advised.fastest.workers - math.sqrt((1 - sigma) / kappa)) <= 1
    n = np.arange(1, 1025)
    speed = n / (1 + sigma * (n - 1) + kappa * n * (n - 1))
    assert speed[advised.fastest.workers - 1] == pytest.approx(speed.max(), rel=1e-8)
    assert (speed**2 / n)[advised.knee.workers - 1] == pytest.approx(
        (speed**2 / n).max(), rel=1e-8
    )
    assert advised.worth.workers == n[speed / n >= 0.5 - 1e-9][-1]


@pytest.mark.parametrize("seed", range(4))
def test_worth_interval_matches_the_band_of_efficiency(seed: int):
    # What makes its coverage that of the band: nothing is rounded, and nothing added.
    series = following(
        amdahl(),
        (0.9, 0.1),
        repetitions=3,
        noise=0.05,
        random=np.random.default_rng(seed),
    )
    found, _ = candidates(laws_for(series)[0], series)
    advised = advise(found, series, 0.5).worth
    n = np.arange(2, 40, 0.01)
    against_one = np.hstack([np.ones((len(n), 1)), -np.eye(len(n))])
    band = linear(found, series, np.append(1.0, n), against_one)
    level = math.log(0.5) + np.log(n)
    inside = n[(band.low <= level) & (level <= band.high)]
    assert advised.at.low == pytest.approx(inside[0], rel=2e-3)
    assert advised.at.high == pytest.approx(inside[-1], rel=2e-3)


@pytest.mark.parametrize(
    ("true", "low", "high"),
    [
        pytest.param(12, 0.93, 0.97, marks=pytest.mark.thorough),
        (62, 0.93, 0.97),
        (80, 1, 1),
    ],
)
def test_an_interval_holds_the_truth_in_95_percent_up_to_the_end_of_the_band_and_always_beyond(
    true, low, high
):
    """Six counts have a band up to 64. Near its end few studies have an upper end, and those miss on that side.

    400 studies leave a standard error of 1.1 %, of which one is allowed for: a 5 %
    lower limit where there is no upper one would hold 92.5 % at 62.
    """
    random, held = np.random.default_rng(3), []
    efficiency = 1 / (1 + 0.03 * (true - 1))
    for _ in range(400):
        series = following(
            amdahl(),
            (0.97, 0.03),
            (1, 2, 4, 8, 16, 32),
            repetitions=3,
            noise=0.03,
            random=random,
        )
        advised = advise(
            [Candidate(fit(amdahl(), series), series, 0.0, 1.0)], series, efficiency
        ).worth
        held.append(advised.at.low <= true <= advised.at.high)
    assert low - 0.011 <= np.mean(held) <= high + 0.011


def test_knee_and_worth_have_no_upper_end_beyond_the_band_of_the_curve():
    for counts in ((1, 2, 4, 8, 16), (1, 2, 4, 8, 16, 32)):
        for seed in range(6):
            random = np.random.default_rng(seed)
            series = following(
                amdahl(), (0.97, 0.03), counts, repetitions=3, noise=0.01, random=random
            )
            found, _ = candidates(laws_for(series)[0], series)
            advised = advise(found, series, 0.5)
            for count in (advised.knee, advised.worth):
                assert 1 <= count.at.low <= min(count.at.value, reach(series))
                assert count.at.high <= reach(series) or math.isinf(count.at.high)
                if len(counts) == 5:  # a knee at 32 of counts up to 16
                    assert math.isinf(count.at.high)


def test_lower_end_of_worth_is_at_most_the_end_of_the_band():
    series = following(
        amdahl(),
        (0.9999, 0.0001),
        repetitions=3,
        noise=0.003,
        random=np.random.default_rng(0),
    )
    advised = advise(candidates(laws_for(series)[0], series)[0], series, 0.5)
    assert advised.worth.at.low == 128
    assert advised.knee.at.low == 128 / STEP
    assert math.isinf(advised.worth.at.high)


def test_gustafson_without_losses_reaches_the_end_of_the_search():
    advised = advice(gustafson(), (1.0, 0.0))
    assert advised.knee.reaches_end
    assert advised.worth.reaches_end
    assert advised.worth.workers == advised.limit == 1024


def test_gustafson_is_worth_running_always_or_never():
    assert advice(
        gustafson(), (0.7, 0.3), 0.69
    ).worth.reaches_end  # efficiency goes to 0.7
    assert advice(gustafson(), (0.4, 0.6), 0.5).worth.workers == 6  # E = 0.4 + 0.6 / N


def test_advice_keeps_a_whole_batch_per_worker():
    advised = advice(amdahl(), (1.0, 0.0), most_workers=100.0)
    assert (advised.limit, advised.worth.workers, advised.worth.reaches_end) == (
        100,
        100,
        True,
    )


def test_without_any_gain_one_worker_is_worth_running():
    advised = advice(amdahl(), (0.0, 1.0), 0.51)
    assert (advised.worth.workers, advised.knee.workers, advised.fastest.workers) == (
        1,
        1,
        1,
    )


def test_intervals_hold_the_estimate_and_narrow_with_less_noise():
    widths = []
    for noise in (0.05, 0.005):
        random = np.random.default_rng(6)
        series = following(
            amdahl(), (0.96, 0.04), repetitions=5, noise=noise, random=random
        )
        advised = advise(candidates(laws_for(series)[0], series)[0], series, 0.5)
        for count in (advised.knee, advised.worth):
            assert count.at.low <= count.at.value <= count.at.high
        widths.append(math.log(advised.worth.at.high / advised.worth.at.low))
    assert widths[1] < widths[0] / 3


@settings(max_examples=25)
@given(st.data())
def test_advice_is_a_valid_number_of_workers(data):
    counts = data.draw(
        st.lists(st.integers(1, 5000), min_size=4, max_size=9, unique=True).map(sorted)
    )
    repetitions = data.draw(st.integers(1, 4))
    runs = len(counts) * repetitions
    seconds = np.array(
        data.draw(st.lists(st.floats(1e-6, 1e6), min_size=runs, max_size=runs))
    )
    weak = data.draw(st.booleans())
    load = workload(counts, every=data.draw(st.sampled_from(["batch", "epoch"])))
    series = following(
        amdahl(),
        (1.0, 0.1),
        counts,
        repetitions=repetitions,
        load=load,
        seconds=seconds,
        weak=weak,
    )
    advised = scaling_of(series, data.draw(st.floats(0.01, 1)))
    assert (advised.advice is None) == bool(advised.refusal)
    if advised.advice is not None:
        assert 1 <= advised.advice.worth.workers <= advised.advice.limit
        assert 1 <= advised.advice.knee.workers <= advised.advice.limit
        assert 1 <= advised.advice.fastest.workers <= advised.advice.limit
        assert all(math.isfinite(one.leave_out_error) for one in advised.candidates)
        assert law_rows(advised)
        json.dumps(as_values(advised), allow_nan=False)
