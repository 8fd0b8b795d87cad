"""Models that go wrong on one rank, as a user's might."""

import os
import signal
import threading
import time

import torch

RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("RANK", "0"))


class Faulty(torch.nn.Module):
    def __init__(self, inputs, outputs, fault, rank, at):
        super().__init__()
        self.layer = torch.nn.Linear(inputs, outputs)
        self.fault, self.rank, self.at = fault, rank, at
        self.calls = 0

    def forward(self, x):
        self.calls += self.training
        if self.training and self.rank == RANK and self.calls > self.at:
            self.go_wrong()
            if self.fault == "nan":
                return self.layer(x) * float("nan")
        return self.layer(x)

    def go_wrong(self):
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.fault == "leave":
            os._exit(0)
        elif self.fault == "exit":
            raise SystemExit(0)
        elif self.fault == "raise":
            raise ValueError("the third\nlayer is upset")
        elif self.fault == "hang":
            time.sleep(3600)
        elif self.fault == "compute" and self.calls == self.at + 1:
            until = time.monotonic() + 6
            while time.monotonic() < until:
                torch.ones(100, 100) @ torch.ones(100, 100)
        elif self.fault == "thread" and self.calls == self.at + 1:
            threading.Thread(target=time.sleep, args=(3600,)).start()


def build(input_shape, outputs, fault="none", rank=1, at=25):
    return Faulty(input_shape[0], outputs, fault, rank, at)
