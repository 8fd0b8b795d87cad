"""Runs under mpirun: merges into a shared state lose nothing, and a server answers in the order of arrival."""

import gc
import json
import shutil
import tempfile
import time
from pathlib import Path

import torch
from mpi4py import MPI

from scalebench.comm.mpi import MpiCommunicator
from scalebench.comm.server import OneSidedState, RankServer, ServerLoop
from scalebench.errors import RunError
from scalebench.native.heartbeat import Heartbeat, create_heartbeats, read_heartbeats
from scalebench.system.clock import WallClock

WORLD = MPI.COMM_WORLD
torch.set_num_threads(1)
clock = WallClock()
comm = MpiCommunicator(WORLD, clock)
rank, size = comm.rank, comm.size
found = {}

# Every worker adds its rank + 1 to each element ten times: whatever the order, nothing
# may be lost.
ROUNDS = 10
state = OneSidedState(comm, torch.full((1000,), 0.5, dtype=torch.float64))
clock.start()
positions = []
for _ in range(ROUNDS):
    with state.exclusive() as model:
        positions.append(state.merges)
        model.add_(rank + 1.0)
assert comm.collectives == ROUNDS
assert comm.bytes_sent == ROUNDS * 8000
assert clock.ledger.comm_s > 0
WORLD.Barrier()
with state.exclusive() as model:
    total = ROUNDS * size * (size + 1) / 2
    assert bool((model == 0.5 + total).all()), (rank, model[:3])
try:
    with state.exclusive() as model:
        model.zero_()
        raise KeyError("leave it as it was")
except KeyError:
    pass
with state.exclusive() as model:
    assert bool((model == 0.5 + total).all())
everyone = WORLD.gather(positions)
WORLD.Barrier()
if rank == 0:
    found["positions"] = sorted(position for each in everyone for position in each)
    found["ascending"] = all(each == sorted(each) for each in everyone)
state.close()


# A server that replies with the mean after all workers have sent a request (BSP).
class Together:
    def __init__(self, workers):
        self.workers, self.asked, self.seen = workers, {}, []

    def __call__(self, worker, payload, now):
        self.seen.append((worker, now))
        self.asked[worker] = payload
        if len(self.asked) < self.workers:
            return []
        mean = torch.stack(list(self.asked.values())).mean(0)
        self.asked = {}
        return [(each, mean) for each in range(self.workers)]


# One that answers at once, with the order in which requests came.
class Ticket:
    def __init__(self):
        self.tickets = 0

    def __call__(self, worker, payload, now):
        self.tickets += 1
        return [(worker, torch.tensor([float(self.tickets)]))]


# One that never answers.
class Deaf:
    def __call__(self, worker, payload, now):
        return []


# One whose replies are too large to leave before they are taken.
class Generous:
    def __call__(self, worker, payload, now):
        return [(worker, torch.ones(1_000_000))]


def with_server(rule, ask, beat=lambda: None):
    clock.start()
    if rank < size - 1:
        server = RankServer(workers_comm, WORLD, rule)
        answer = ask(server)
        server.close()
        return answer
    return ServerLoop(WORLD, torch.float32, beat=beat).serve()


workers_mpi = WORLD.Split(0 if rank < size - 1 else 1, rank)
workers_comm = MpiCommunicator(workers_mpi, clock)


def means(server):
    return [
        server.request(torch.full((4,), float(rank + step)))[0].item()
        for step in range(3)
    ]


def tickets(server):
    if rank < size - 2:
        workers_mpi.recv(source=rank + 1)  # the last worker asks first
    ticket = server.request(torch.empty(0)).item()
    if rank > 0:
        workers_mpi.send("your turn", rank - 1)
    return ticket


answers = WORLD.gather(with_server(Together(size - 1), means))
if rank == 0:
    middle = (size - 2) / 2
    assert all(each == [middle, middle + 1, middle + 2] for each in answers[:-1]), (
        answers
    )
    found["handled"] = answers[-1]
WORLD.Barrier()
answers = WORLD.gather(with_server(Ticket(), tickets))
if rank == 0:
    found["tickets"] = answers[:-1]


# A worker that receives its reply late: the others are served, and the server still
# calls beat.
def beats_until_taken(server):
    if rank:
        workers_mpi.recv(source=0)
        for _ in range(3):
            server.request(torch.empty(0))
        workers_mpi.send("served", 0)
        return None
    # asks, and does not look for the answer
    WORLD.Send(torch.empty(0).numpy(), size - 1, tag=3)
    deadline = time.monotonic() + 600
    found["served_meanwhile"] = 0
    for other in range(1, size - 1):
        workers_mpi.send("asked", other)
        while (
            not (served := workers_mpi.iprobe(source=other))
            and time.monotonic() < deadline
        ):
            time.sleep(0.001)
        found["served_meanwhile"] += served
    started = heard = 0
    while heard < started + 1000 and time.monotonic() < deadline:
        time.sleep(0.001)
        heard = read_heartbeats(heartbeats)[0].beats
        started = started or heard
    WORLD.Recv(torch.empty(1_000_000).numpy(), size - 1, tag=4)
    for other in range(1, size - 1):
        workers_mpi.recv(source=other)
    return heard - started


heartbeats = Path(WORLD.bcast(tempfile.mkdtemp() if rank == 0 else None)) / "heartbeats"
if rank == 0:
    create_heartbeats(heartbeats, 1)
WORLD.Barrier()
heart = Heartbeat(heartbeats, 0)
answers = WORLD.gather(with_server(Generous(), beats_until_taken, heart.beat))
if rank == 0:
    found["beats"] = answers[0]
    shutil.rmtree(heartbeats.parent)

WORLD.Barrier()
if rank == size - 1:
    try:
        ServerLoop(WORLD, torch.float32).serve()
    except RunError as error:
        WORLD.send(str(error), 0, tag=9)
    for worker in range(size - 1):
        # what the rule would not send
        WORLD.Send(torch.zeros(1).numpy(), worker, tag=4)
else:
    RankServer(workers_comm, WORLD, Deaf()).request(torch.zeros(1))
if rank == 0:
    found["deaf"] = WORLD.recv(source=size - 1, tag=9)
    print(json.dumps(found))
gc.freeze()  # or a search at the end looks through all that torch has made
