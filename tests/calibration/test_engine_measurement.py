import pytest

from scalebench.calibration import engine_measurement
from scalebench.calibration.engine_measurement import measure_engine_costs
from scalebench.cluster.engine_costs import EngineCost, EngineCosts
from scalebench.comm import engines
from scalebench.errors import EngineError
from scalebench.launch.calibrating import ranks_on_this_host


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    here = [
        name
        for name in engine_measurement.MEASURABLE
        if engines.available(name) is None
    ]
    if "mpi" not in here:
        pytest.skip("no MPI")
    cache = tmp_path_factory.mktemp("cache")
    measure = engine_measurement._measure

    def undisturbed(*arguments):  # however busy this machine is
        costs = measure(*arguments)
        entries = [
            entry.model_copy(update={"disturbed": False}) for entry in costs.entries
        ]
        return costs.model_copy(update={"entries": entries})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_measurement, "_measure", undisturbed)
        return (
            cache,
            here,
            measure_engine_costs(cache, here, ranks_on_this_host, seconds=1.0),
        )


def test_each_engine_has_a_complete_curve_with_source(measured):
    _, here, costs = measured
    collectives = ("broadcast", "reduce", "linear-broadcast", "linear-reduce")
    parts = {
        f"mpi-{part}" for part in ("onesided", *collectives, "server", "server-busy")
    }
    if "gloo" in here:
        parts |= {f"gloo-{part}" for part in ("allgather", "reduce-scatter", "send")}
    assert {entry.engine for entry in costs.entries} >= {*here, *parts}
    for entry in costs.entries:
        assert entry.ranks >= 2
        assert "torch" in entry.source
        sizes = [size for size, _ in entry.points]
        assert (sizes[0], sizes) == (4, sorted(sizes))
        assert sizes[-1] >= 4 << 20
        assert entry.points[0][1] == entry.alpha_s
        costs_s = [seconds for _, seconds in entry.points]
        assert costs_s == sorted(costs_s), "more bytes never cost less"
        # 16 MiB take longer than 4 bytes on any machine
        assert entry.seconds(16 << 20) > entry.seconds(4)
        assert 0 < entry.seconds(16 << 20) < 10


def test_waking_up_is_measured_and_no_part_of_the_curve(measured):
    """Of gloo, whose threads the system wakes, it takes longer than nothing on any machine."""
    _, here, costs = measured
    assert costs.entries
    assert all(0 <= entry.pause_s < 1 for entry in costs.entries)
    if "gloo" in here:
        assert costs.of("gloo").pause_s == costs.of("gloo-send").pause_s


def test_horovod_waits_for_its_cycle(measured):
    _, here, costs = measured
    if "horovod" not in here:
        pytest.skip("no Horovod")
    entry = costs.of("horovod")
    # its loop turns once per millisecond unless told otherwise
    assert entry.cycle_s > 0.9e-3
    assert entry.per_step_s > 0
    assert costs.of("mpi").cycle_s == costs.of("mpi").negotiation_s == 0


def test_costs_are_cached_by_machine_and_versions(measured, monkeypatch):
    cache, here, costs = measured
    monkeypatch.setattr(
        engine_measurement, "_measure", lambda *_: pytest.fail("measured again")
    )
    assert measure_engine_costs(cache, here, ranks_on_this_host) == costs
    assert len(list((cache / "engine-costs").iterdir())) == 1
    monkeypatch.setattr(engine_measurement, "version", lambda name: "99")
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        measure_engine_costs(cache, here, ranks_on_this_host)


def test_disturbed_costs_are_used_but_not_cached(tmp_path, monkeypatch):
    if reason := engines.available("mpi"):
        pytest.skip(reason)
    quiet = [
        EngineCost(engine=name, ranks=2, alpha_s=1e-6, source="made up")
        for name in ("mpi", "mpi-server")
    ]
    taken = [quiet[0], quiet[1].model_copy(update={"disturbed": True})]
    monkeypatch.setattr(engine_measurement.BackgroundLoad, "share", lambda _: 0.9)
    monkeypatch.setattr(
        engine_measurement, "_measure", lambda *_: EngineCosts(entries=taken)
    )
    costs = measure_engine_costs(tmp_path, ["mpi"], ranks_on_this_host)
    assert (costs.entries, costs.others_load) == (taken, 0.9)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(
        engine_measurement, "_measure", lambda *_: EngineCosts(entries=quiet)
    )
    assert measure_engine_costs(tmp_path, ["mpi"], ranks_on_this_host).entries == quiet
    assert not costs.model_copy(update={"entries": quiet}).disturbed, (
        "a busy machine in undisturbed windows"
    )
    (path,) = tmp_path.rglob("*.json")
    assert EngineCosts.load(path).others_load == 0.9


def test_missing_engine_and_failed_probe_raise_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "available", lambda name, **_: "it is not here")
    with pytest.raises(
        EngineError, match="engine mpi is not available: it is not here"
    ):
        measure_engine_costs(tmp_path, ["mpi"], ranks_on_this_host)
    monkeypatch.undo()
    if reason := engines.available("mpi"):
        pytest.skip(reason)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("raise ImportError('a shadow')")
    with pytest.raises(EngineError, match="failed: ImportError: a shadow") as caught:
        measure_engine_costs(tmp_path, ["mpi"], ranks_on_this_host)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "engine-costs").exists()
