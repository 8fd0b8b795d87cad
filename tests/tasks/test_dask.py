"""Tasks on dask.distributed: a cluster of our own, one that is running already, and addresses where nothing answers."""

from __future__ import annotations

import socket
import threading

import numpy as np
import pytest

from scalebench.comm.engines.tasks import backend_lacks
from scalebench.errors import EngineError
from scalebench.tasks import backends
from scalebench.tasks.run import TaskRuns
from tests.conftest import some
from tests.tasks.conftest import kill_one_training, task_run

pytestmark = pytest.mark.skipif(
    backend_lacks("dask") is not None, reason="dask is not installed"
)


@pytest.fixture(scope="module")
def running():
    """The address of a scheduler that was started by someone else, with three workers as dask starts them."""
    from distributed import LocalCluster

    with LocalCluster(
        n_workers=3, threads_per_worker=1, dashboard_address=":0"
    ) as cluster:
        yield cluster.scheduler_address


def on(scheduler=None, **changes):
    return task_run(tasks={"backend": "dask", "scheduler": scheduler}, **changes)


def test_weights_are_those_of_processes_bit_for_bit(executed):
    there, here = executed(on(run_id="dask")), executed(task_run())
    assert there[0].facts.launcher == "dask"
    assert there[0].facts.malloc_trim_bytes is None, (
        "the variable that slows torch is not set by our own cluster"
    )
    assert np.array_equal(there[1]["final"], here[1]["final"])


def test_a_running_scheduler_is_used_and_what_slows_torch_there_is_named(
    executed, running
):
    _, expected = executed(task_run())  # first: the next test goes on with dask
    outcome, weights = executed(on(running, run_id="running"))
    assert outcome.status == "completed", outcome.error
    assert outcome.facts.malloc_trim_bytes == 65536
    assert np.array_equal(weights["final"], expected["final"])


def announced(backend):
    """How many tasks have begun, as the scheduler knows, which repeats those of dead workers by itself."""
    return len(backend._client.get_events(backends._TOPIC))


@pytest.mark.parametrize("own", some([True, False], False), ids=["own", "running"])
def test_a_dead_worker_s_block_is_trained_again_once(
    executed, running, monkeypatch, tmp_path, own
):
    kill_one_training(tmp_path, monkeypatch, announced)
    model = f"{tmp_path / 'mortal.py'}:build"
    scheduler = None if own else running
    outcome, weights = executed(on(scheduler, model=model, epochs=2, run_id="killed"))
    assert outcome.status == "completed", outcome.error
    assert outcome.facts.blocks_retrained == 1
    calm = task_run(model=model, epochs=2, run_id="calm")
    assert np.array_equal(weights["final"], executed(calm)[1]["final"])


def test_an_address_that_does_not_answer_is_refused(monkeypatch):
    monkeypatch.setattr(backends, "ANSWER_S", 1.0)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()  # takes connections and says nothing
        for address in (
            f"tcp://127.0.0.1:{silent.getsockname()[1]}",
            "tcp://127.0.0.1:9",
        ):
            with pytest.raises(
                EngineError,
                match=f"tasks.scheduler {address}: no dask scheduler answers there",
            ) as refused:
                TaskRuns({}, 2)._backend(on(address))
            assert ".py:" not in str(refused.value), "a line of dask's code"


def test_an_address_where_another_program_answers_is_refused():
    """As the page of a scheduler does, which dask prints beside its address."""

    def answer(server):
        client, _ = server.accept()
        with client:
            client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        page = threading.Thread(target=answer, args=[server])
        page.start()
        with pytest.raises(
            EngineError, match=r"no dask scheduler answers .* \(another program does\)"
        ):
            TaskRuns({}, 2)._backend(on(f"tcp://127.0.0.1:{server.getsockname()[1]}"))
        page.join()


def test_too_few_workers_are_refused(running, monkeypatch):
    from distributed import Client

    wait = Client.wait_for_workers
    monkeypatch.setattr(
        Client, "wait_for_workers", lambda client, n, timeout: wait(client, n, 0.5)
    )
    with pytest.raises(
        EngineError,
        match=r"3 dask workers there, and the largest run takes 4; .*--workers 1\.\.3",
    ):
        TaskRuns({}, 4)._backend(on(running))
