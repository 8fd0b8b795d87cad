"""DASO on given batches: replicas that train on arrays of their own, and the runs they take part in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from scalebench.data.dataset import Dataset
from scalebench.strategies.base import Batch
from scalebench.study.spec import Run
from scalebench.training.replica import Replica

REFERENCES = Path(__file__).parents[1] / "reference"


class GivenReplica(Replica):
    """Trains on `x`, `y` [epoch, batch, rank] instead of a shard; reports `losses[epoch, rank]` where given."""

    x: np.ndarray
    y: np.ndarray
    losses: np.ndarray | None = None
    made: list[GivenReplica]

    def __init__(self, *arguments, **named):
        self.epoch_losses = []
        super().__init__(*arguments, **named)
        self.made.append(self)

    def steps_in(self, epoch):
        return self.x.shape[1]

    def batches(self, epoch):
        self._epoch, self._epoch_steps = epoch, self.x.shape[1]
        for step in range(self._epoch_steps):
            x, y = (
                torch.from_numpy(array[epoch, step, self.rank]).to(self.dtype)
                for array in (self.x, self.y)
            )
            self._moment = epoch + step / self._epoch_steps
            yield Batch(x, y, 1.0, step, step == 0)

    def epoch_done(self, epoch, agreed):
        # before its update, as heat reports it
        self.epoch_losses += [float(loss) for loss in self._losses[-1:]]
        super().epoch_done(epoch, agreed)

    def gradient(self, batch, weight=1.0, *, add=False):
        super().gradient(batch, weight, add=add)
        if self.losses is not None:
            self._last_loss = torch.tensor(
                self.losses[self._epoch, self.rank], dtype=self.dtype
            )


def given(x, y, losses=None):
    """A class of replicas that train on these arrays."""
    return type(
        "Given", (GivenReplica,), {"x": x, "y": y, "losses": losses, "made": []}
    )


def reference(name):
    """The arrays of one reference run of heat's, by name."""
    with np.load(REFERENCES / f"heat-1.8.0-daso-{name}.npz") as archive:
        return {key: archive[key] for key in archive}


def reference_class(case):
    epochs, ranks = int(case["epochs"]), case["x"].shape[2]
    return given(
        case["x"], case["y"], np.ones((epochs, ranks)) if case["flat_loss"] else None
    )


def check_epoch_losses(found, case, rank):
    """Losses see the weights before each epoch's last update in float32, final weights only what bfloat16 keeps.

    Sums in another order move them by some 1e-7. Two references report the flat loss
    that steered them.
    """
    if (case["epoch_losses"] != 1.0).any():
        np.testing.assert_allclose(found, case["epoch_losses"][rank], rtol=2e-6, atol=0)


def reference_run(case, initial: Path, **values):
    """The run that repeats `case` from the weights in the file `initial`."""
    options = {
        "devices_per_node": int(case["devices_per_node"]),
        "warm_up_epochs": int(case["warmup_epochs"]),
        "cool_down_epochs": int(case["cooldown_epochs"]),
        "max_global_skips": int(case["max_global_skips"]),
    }
    return daso_run(
        {"daso-heat": options}, case["x"], case["y"], initial, dtype="float32", **values
    )


def daso_run(strategy, x, y, initial: Path | None = None, **values):
    return Run.model_validate(
        {
            "study": "test",
            "run_id": "daso",
            "config_hash": "0" * 16,
            "execution": "virtual",
            "engine": "virtual",
            "strategy": strategy,
            "workers": x.shape[2],
            "repetition": 0,
            "seed": 3,
            "epochs": x.shape[0],
            "batch_per_worker": x.shape[3],
            "model": {"mlp": {"hidden": []}},
            "dtype": "float64",
            "lr": 0.05,
            "optimizer": {"sgd": {"momentum": 0.9}},
            "warmup_steps": 0,
            "init_weights": initial,
            **values,
        }
    )


def stand_in(x, y):
    """A data set of the right shape; its rows are not what is trained on."""
    rows = np.zeros((x.shape[2] * x.shape[3], x.shape[4]), np.float32)
    targets = np.zeros((len(rows), y.shape[4]), np.float32)
    return Dataset(
        "given", "regression", y.shape[4], rows, targets, rows[:2], targets[:2]
    )
