"""Paced computing on a simulated clock, independent of the load of the machine."""

from types import SimpleNamespace

import pytest
import torch

from scalebench.native.session import _pace
from scalebench.system import clock as clocks
from scalebench.system.clock import Task
from scalebench.training.pacing import PacedClock, PacedStep

STEP = PacedStep(forward_s=0.010, backward_s=0.020, update_s=0.005)
LATE = 1e-5  # a look at the time too many, at most


class Time:
    """Simulated time with exact sleeps and polls of a microsecond."""

    def __init__(self):
        self.now = 1000.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        assert seconds > 0
        self.now += seconds

    def sched_yield(self):
        self.now += 1e-6


@pytest.fixture
def time(monkeypatch):
    passing = Time()
    monkeypatch.setattr(clocks, "time", passing)
    monkeypatch.setattr(clocks, "os", SimpleNamespace(sched_yield=passing.sched_yield))
    return passing


def steps(clock, time, count, forward=0.0, backward=0.0, update=0.0):
    for _ in range(count):
        clock.did(Task.DATA)
        for task, seconds in (
            (Task.FORWARD, forward),
            (Task.BACKWARD, backward),
            (Task.UPDATE, update),
        ):
            time.now += seconds
            clock.did(task)


def test_step_takes_the_time_of_the_device(time):
    clock = PacedClock(STEP)
    clock.start()
    began = time.perf_counter()
    steps(clock, time, 4, forward=0.003, backward=0.003)
    assert time.perf_counter() - began == pytest.approx(4 * STEP.total_s, abs=12 * LATE)
    for task in (Task.FORWARD, Task.BACKWARD, Task.UPDATE):
        assert clock.ledger.seconds[task] == pytest.approx(
            4 * STEP.of(task), abs=4 * LATE
        )
    assert clock.overrun == 0.0


def test_slower_steps_are_counted_as_overrun(time):
    clock = PacedClock(STEP)
    clock.start()
    steps(clock, time, 3)
    steps(clock, time, 1, update=0.020)
    assert clock.overrun == pytest.approx(1 / 4)
    assert clock.ledger.seconds[Task.UPDATE] == pytest.approx(
        3 * STEP.update_s + 0.020, abs=4 * LATE
    )


@pytest.mark.parametrize(("late_s", "overrun"), [(0.0003, 0.0), (0.0004, 1.0)])
def test_overrun_tolerates_a_hundredth_of_a_step(time, late_s, overrun):
    clock = PacedClock(STEP)
    clock.start()
    steps(clock, time, 1, update=STEP.update_s + late_s)
    assert clock.overrun == overrun


def test_late_task_shortens_the_padding_of_the_next(time):
    clock = PacedClock(STEP)
    clock.start()
    began = time.perf_counter()
    steps(clock, time, 4, forward=0.014, backward=0.003)
    steps(clock, time, 4, forward=0.003, backward=0.023, update=0.001)
    assert time.perf_counter() - began == pytest.approx(8 * STEP.total_s, abs=24 * LATE)
    assert clock.overrun == 0.0
    # 2 ms more than the update has
    steps(clock, time, 1, forward=0.014, backward=0.023)
    assert clock.overrun == pytest.approx(1 / 9)


def test_time_after_the_last_gradient_is_reserved(time):
    """After a sleep the rest of the backward pass takes longer than its share on the device."""
    model = torch.nn.Linear(4, 4)
    clock = PacedClock(STEP)
    clock.attach(model)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _: setattr(time, "now", time.now + 0.0004)
        )
    clock.start()
    began = time.perf_counter()
    for _ in range(5):
        clock.did(Task.DATA)
        loss = model(torch.ones(2, 4)).sum()
        clock.did(Task.FORWARD)
        loss.backward()
        clock.did(Task.BACKWARD)
        clock.did(Task.UPDATE)
    assert clock.overrun == 0.0
    assert time.perf_counter() - began == pytest.approx(5 * STEP.total_s, abs=15 * LATE)
    for _ in range(5):  # a server's strategy has no update that could be shortened
        clock.did(Task.DATA)
        loss = model(torch.ones(2, 4)).sum()
        clock.did(Task.FORWARD)
        loss.backward()
        clock.did(Task.BACKWARD)
        clock.did(Task.COMM)
    assert clock.overrun == 0.0


def test_step_with_an_update_on_a_server_is_counted(time):
    clock = PacedClock(STEP)
    clock.start()
    for forward, backward in ((0.0, 0.0), (0.020, 0.030), (0.0, 0.0), (0.0, 0.0)):
        clock.did(Task.DATA)
        for task, seconds in ((Task.FORWARD, forward), (Task.BACKWARD, backward)):
            time.now += seconds
            clock.did(task)
        time.now += 1.0  # on its way to the server
        clock.did(Task.COMM)
    assert clock.overrun == 1 / 4  # late in both of its parts, and counted once


def test_communication_is_not_stretched(time):
    clock = PacedClock(STEP)
    clock.start()
    clock.did(Task.OTHER)
    time.now += 0.002
    clock.did(Task.COMM)
    assert clock.ledger.comm_s == pytest.approx(0.002)
    assert clock.overrun is None


def test_an_update_takes_its_own_time_and_the_passes_the_rest(time):
    clock = PacedClock(0.040)
    steps(clock, time, 3, forward=0.002, backward=0.006, update=0.004)
    assert clock.ledger.total_s == 0.0  # warm-up costs no training time
    clock.start()
    split = clock.step_time
    assert (split.forward_s, split.backward_s, split.update_s) == pytest.approx(
        (0.012, 0.024, 0.004)
    )


def test_the_update_of_a_part_takes_its_own_time(time):
    clock = PacedClock(0.040)
    for _ in range(3):
        time.now += 0.002
        clock.did(Task.FORWARD, 4, 0.25)
        time.now += 0.001
        clock.did(Task.UPDATE, share=0.25)
    split = clock.step_time
    assert (split.forward_s, split.backward_s, 0.25 * split.update_s) == pytest.approx(
        (0.013, 0.026, 0.001)
    )


def test_workers_agree_on_the_mean_of_their_splits(time):
    clock = PacedClock(0.040)
    clock.agree([PacedStep(0.010, 0.030, 0.0), PacedStep(0.020, 0.010, 0.010)])
    clock.start()
    split = clock.step_time
    assert (split.forward_s, split.backward_s, split.update_s) == pytest.approx(
        (0.015, 0.020, 0.005)
    )


@pytest.mark.parametrize(("samples", "share"), [(16, 1.0), (15, 15 / 16), (8, 0.5)])
def test_a_smaller_batch_takes_its_share_of_the_stated_step(time, samples, share):
    clock = PacedClock(STEP, samples=16)
    clock.start()
    clock.did(Task.DATA, samples)
    began = time.perf_counter()
    for task in (Task.FORWARD, Task.BACKWARD, Task.UPDATE):
        clock.did(task, samples)
    assert time.perf_counter() - began == pytest.approx(
        share * STEP.total_s, abs=3 * LATE
    )


def test_lateness_that_communication_may_have_absorbed_is_not_made_up_for(time):
    """The layer after it is shorter by what is left alone; without any communication by all."""
    taken = {}
    for waited in (0.0, 0.003, 0.010):
        clock = PacedClock(STEP)
        clock.start()
        clock.did(Task.DATA)
        time.now += 0.009  # 4 ms more than half of the forward pass has
        clock.did(Task.FORWARD, share=0.5)
        time.now += waited
        clock.did(Task.COMM)
        began = time.perf_counter()
        clock.did(Task.FORWARD, share=0.5)
        taken[waited] = time.perf_counter() - began
        for task in (Task.BACKWARD, Task.UPDATE):
            clock.did(task)
        assert clock.overrun == (1.0 if waited else 0.0)
    assert taken == pytest.approx(
        {0.0: 0.001, 0.003: 0.004, 0.010: 0.005}, abs=3 * LATE
    )


def test_without_a_warm_up_backward_costs_twice_a_forward():
    clock = PacedClock(0.030)
    clock.start()
    split = clock.step_time
    assert (split.forward_s, split.backward_s, split.update_s) == pytest.approx(
        (0.010, 0.020, 0.0)
    )


def test_gradients_are_released_at_their_share_of_the_backward_pass(time):
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False)
    )
    clock = PacedClock(PacedStep(0.005, 0.040, 0.001))
    clock.attach(model)
    released = {}
    for (
        name,
        parameter,
    ) in model.named_parameters():  # as Horovod and DDP do: on the accumulated gradient
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=name: released.__setitem__(name, time.perf_counter() - mark)
        )
    loss = model(torch.ones(4, 8)).sum()
    mark = time.perf_counter()
    loss.backward(retain_graph=True)  # no delay outside training
    assert max(released.values()) == 0
    released.clear()
    clock.start()
    clock.did(Task.DATA)
    clock.did(Task.FORWARD)
    mark = time.perf_counter()
    loss.backward()
    clock.did(Task.BACKWARD)
    assert list(released) == ["1.weight", "0.weight"]
    # half of the parameters, half of the pass
    assert released["1.weight"] == pytest.approx(0.020, abs=LATE)
    assert released["0.weight"] == pytest.approx(0.040, abs=LATE)
    clock.did(Task.UPDATE)
    assert clock.overrun == 0.0


def test_communication_at_the_end_of_backward_is_no_overrun(time):
    """The real DDP waits for its buckets there: that is communication."""
    model = torch.nn.Linear(4, 4, bias=False)
    clock = PacedClock(STEP)
    clock.attach(model, waits_in_backward=True)
    clock.start()
    for _ in range(2):
        clock.did(Task.DATA)
        loss = model(torch.ones(2, 4)).sum()
        clock.did(Task.FORWARD)
        loss.backward()
        time.now += 0.010
        clock.did(Task.BACKWARD)
        clock.did(Task.UPDATE)
    assert clock.overrun == 0.0
    clock.did(Task.DATA)
    loss = model(torch.ones(2, 4)).sum()
    clock.did(Task.FORWARD)
    time.now += 0.030  # the device would have been done by then
    loss.backward()
    clock.did(Task.BACKWARD)
    clock.did(Task.UPDATE)
    assert clock.overrun == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("strategy", "batch", "pace"),
    [
        ("allreduce", {"batch_per_worker": 16}, (0.8, 16)),
        ("allreduce", {"batch_per_worker": None, "batch_global": 64}, (0.2, 16)),
        (
            "pipeline",
            {"batch_per_worker": None, "batch_global": 64},
            (0.4, 32),
        ),  # two replicas
    ],
)
def test_a_stated_step_is_that_of_the_global_batch(make_run, strategy, batch, pace):
    run = make_run(
        strategy, 4, execution="paced", engine="gloo", device_step_time=0.8, **batch
    )
    assert _pace(run) == pytest.approx(pace)
