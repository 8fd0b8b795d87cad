"""Programs that are drawn: an excerpt of what they state, and the whole of what they do not, take the same time."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scalebench.cluster.cluster_file import load_cluster
from scalebench.errors import StudyError
from scalebench.models.layers import Layer, LayerTable
from scalebench.pricing.devices import Stated
from scalebench.pricing.platform import Platform
from scalebench.pricing.prediction import Case, Predictor
from scalebench.pricing.program import excerpt_of
from scalebench.pricing.workload import Workload
from scalebench.strategies import registry
from scalebench.strategies.base import Batch, Strategy, Worker
from scalebench.strategies.epoch_average import EpochAverage
from scalebench.strategies.local_sgd import LocalSgd
from scalebench.strategies.parameter_server import Asp
from scalebench.strategies.traits import Stretch, Traits
from scalebench.study.spec import Component
from tests.facts import naming

WORKERS, BATCH = 8, 4


class Drawn(Strategy):
    """Averages in groups by the rhythm of each stretch, and of all workers at the end of training.

    Gradients travel in the `first` steps, weights after them.
    """

    stretches: tuple[Stretch, ...]
    first: int = 0
    group: int = WORKERS
    stated: bool = True

    name: ClassVar[str] = "drawn"
    summary: ClassVar[str] = "drawn"
    source: ClassVar[str] = "this test"

    @property
    def traits(self) -> Traits:
        if not self.stated:
            return Traits()
        lead = (Stretch(steps=self.first),) if self.first else ()
        return Traits(lead + self.stretches)

    def setup(self, worker: Worker) -> None:
        worker.state.taken = 0
        worker.state.group = worker.comm.split(lambda rank: rank // self.group)

    def train_epoch(self, worker: Worker, epoch: int) -> None:
        stretch, last = self.at(epoch, worker.epochs), worker.steps_in(epoch) - 1
        for batch in worker.batches(epoch):
            worker.local_step(batch)
            worker.state.taken += 1
            if worker.state.taken <= self.first:
                worker.comm.allreduce_(
                    worker.gradients[: len(worker.gradients) // 2], "mean"
                )
            elif stretch.unit == "batch" and self.is_due(
                stretch, worker.state.taken, batch, last
            ):
                worker.state.group.allreduce_(worker.parameters, "mean")
        if stretch.unit == "epoch" and (epoch + 1) % stretch.period == 0:
            worker.state.group.allreduce_(worker.parameters, "mean")
        if worker.is_last(epoch):
            worker.comm.allreduce_(worker.parameters, "mean")

    def at(self, epoch: int, epochs: int) -> Stretch:
        """Return the stretch of `epoch`."""
        stated = sum(each.epochs or 0 for each in self.stretches)
        for stretch in self.stretches:
            lasts = (
                max(0, epochs - stated) if stretch.epochs is None else stretch.epochs
            )
            if epoch < lasts:
                return stretch
            epoch -= lasts
        return self.stretches[-1]

    @staticmethod
    def is_due(stretch: Stretch, taken: int, batch: Batch, last: int) -> bool:
        if stretch.restarts:
            return (batch.step + 1) % stretch.period == 0 or batch.step == last
        return taken % stretch.period == 0


def stretch_of(epochs: st.SearchStrategy[int | None]) -> st.SearchStrategy[Stretch]:
    unit = st.sampled_from(["batch", "epoch"])
    return st.builds(
        Stretch, epochs, st.integers(1, 5), unit, st.none(), restarts=st.booleans()
    )


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    before = draw(st.lists(stretch_of(st.integers(0, 7)), max_size=2))
    after = draw(st.lists(stretch_of(st.integers(0, 4)), max_size=1))
    stretches = (*before, draw(stretch_of(st.none())), *after)
    # Epochs without an exchange are alike only if the first steps have none either.
    first = (
        draw(st.integers(0, 30))
        if any(each.unit == "batch" for each in stretches)
        else 0
    )
    return Drawn(
        stretches=stretches,
        first=first,
        group=draw(st.sampled_from([1, 2, 4, WORKERS])),
    )


def seconds(
    strategy: Strategy, epochs: int, steps: int, **jitter: float
) -> list[float]:
    """Return the columns of a predicted training."""
    sizes = (20_000, 5_000)
    layers = LayerTable(
        "small",
        tuple(Layer(f"layer{n}", "gemm", n, 2 * n, 100, 100, 100) for n in sizes),
        "test",
        (100,),
    )
    platform = replace(
        Platform(load_cluster("juwels-booster"), Stated(1e-3, BATCH)), **jitter
    )
    predictor = Predictor(
        Workload(layers, WORKERS * steps * BATCH, epochs, BATCH), platform
    )
    component = Component(name=strategy.name)
    predictor._strategies[str(component)] = strategy
    times = predictor.times(component, WORKERS, [Case(platform, BATCH)])
    return [float(column[0]) for column in times]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(strategy=drawn(), epochs=st.integers(1, 40), steps=st.integers(1, 90))
def test_excerpt_takes_the_time_of_the_whole_program(strategy, epochs, steps):
    whole = strategy.model_copy(update={"stated": False})
    assert excerpt_of(whole.traits.stretches, epochs, steps).whole
    assert seconds(strategy, epochs, steps) == pytest.approx(
        seconds(whole, epochs, steps), rel=1e-9, abs=1e-15
    )


@pytest.mark.parametrize(
    ("stretches", "steps", "recorded"),
    [
        ((Stretch(period=8),), 1000, 3 * (8 + 16)),
        ((Stretch(unit="epoch"),), 1000, 3),
        (
            (Stretch(epochs=4), Stretch(period=4, restarts=True), Stretch(epochs=2)),
            1000,
            9 * (4 + 8),
        ),
        (None, 1000, 90_000),
    ],
)
def test_few_steps_are_recorded_of_what_repeats(stretches, steps, recorded):
    excerpt = excerpt_of(stretches, 90, steps)
    assert excerpt.epochs * sum(excerpt.steps) == recorded


class Warm(Strategy):
    """Gradients averaged for the first epochs, then weights after each epoch; states nothing."""

    gentle: int = 0

    name: ClassVar[str] = "warm"
    summary: ClassVar[str] = "warm"
    source: ClassVar[str] = "this test"

    def train_epoch(self, worker: Worker, epoch: int) -> None:
        for batch in worker.batches(epoch):
            worker.gradient(batch)
            if epoch < self.gentle:
                worker.comm.allreduce_(worker.gradients, "mean")
            worker.update()
        if epoch >= self.gentle:
            worker.comm.allreduce_(worker.parameters, "mean")


def test_own_strategy_that_states_nothing_is_predicted_whole():
    """N epochs as allreduce and the others as epoch_average, wherever N lies."""
    often = seconds(registry.create("allreduce", {}, "virtual"), 90, 20)[0]
    seldom = seconds(registry.create("epoch_average", {}, "virtual"), 90, 20)[0]
    assert often > 1.001 * seldom
    for gentle in (0, 20, 80, 90):
        expected = (gentle * often + (90 - gentle) * seldom) / 90
        assert seconds(Warm(gentle=gentle), 90, 20)[0] == pytest.approx(
            expected, rel=1e-9
        )


class OtherRhythm(LocalSgd):
    """Local SGD that synchronises after the squares of 1, 2, 3, ... steps."""

    def due(self, taken: int) -> bool:
        return int(taken**0.5) ** 2 == taken


class OtherOptions(LocalSgd):
    """Local SGD with another default."""

    steps: int = 3

    def check(self, setting):
        return []


def test_a_subclass_that_changes_the_program_states_nothing_of_it():
    assert OtherRhythm().traits.stretches is None
    assert OtherRhythm().traits.averages_buffers, (
        "what does not follow from the order of operations holds"
    )
    assert OtherOptions().traits.stretches == (Stretch(period=3),)
    assert EpochAverage().arithmetic(1) == "serial"
    assert type("Mixed", (OtherRhythm, EpochAverage), {})().arithmetic(1) is None
    assert seconds(OtherRhythm(), 4, 25)[0] < seconds(LocalSgd(steps=1), 4, 25)[0]


def test_every_strategy_of_the_package_states_what_repeats():
    silent = [
        name
        for name in registry.names()
        if registry.create(name, {}, "virtual").traits.stretches is None
    ]
    assert silent == []


class OtherGate(Asp):
    """A server of its own rule."""

    def gate(self, workers, meetings):
        return super().gate(workers, meetings)


def test_a_server_that_does_not_state_when_it_answers_is_not_predicted():
    with pytest.raises(
        StudyError, match="strategy asp: it does not state when its server answers"
    ):
        seconds(OtherGate(), 4, 25)


def test_a_program_too_long_to_record_is_refused():
    with pytest.raises(
        StudyError,
        match=naming("not state", "repeats", "9,000,000 steps"),
    ):
        seconds(Warm(), 9000, 1000)


def test_only_one_stretch_takes_what_others_leave():
    with pytest.raises(ValueError, match="at most one"):
        Traits((Stretch(), Stretch(period=2)))
