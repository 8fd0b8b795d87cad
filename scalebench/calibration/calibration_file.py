"""The file of a calibration: all measured numbers that charge the virtual runs of a study."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, PositiveFloat, ValidationError

from scalebench.cluster.cluster_file import Cluster
from scalebench.cluster.engine_costs import EngineCosts
from scalebench.errors import ClusterError, writing
from scalebench.pricing import machine
from scalebench.study.load import from_home, to_home
from scalebench.study.validation import explain
from scalebench.system.file_access import read_text, write_atomic

# the cluster that repeats the nodes and links of this machine
THIS_MACHINE = "this-machine"


class Measurement(BaseModel):
    """Model, dtype and machine of a calibration."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    model: str
    dtype: str
    optimizer: str
    threads_per_worker: int
    cpu: str
    cores: int
    torch: str
    device: str = "cpu"  # that computes the steps: cpu, or the name of a GPU
    model_sha256: str | None = None  # of a user's file

    @property
    def machine(self) -> str:
        """GPU, or processor and its cores, and torch."""
        where = (
            f"{self.cpu} ({self.cores} cores, "
            if self.device == "cpu"
            else f"{self.device} ("
        )
        return f"{where}torch {self.torch})"

    def __str__(self) -> str:
        return f"{self.model} in {self.dtype} on {self.machine}"

    def differences(self, other: Measurement, names: Sequence[str]) -> list[str]:
        """Return `name OWN, not OTHER` for each of `names` in which they differ."""
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in names]
        return [
            f"{name} {mine}, not {others}"
            for name, mine, others in pairs
            if mine != others
        ]


class Calibration(BaseModel):
    """Step times, engine costs, times of operations, and how virtual gradients are computed.

    No `tables` and no `arithmetic` where a study states its step times.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    # hash of the machine, the torch build, the model, the data and the settings that
    # were measured
    key: str
    measured: Measurement | None = None
    trained: machine.Trained | None = None
    tables: list[machine.StepTable]
    engines: EngineCosts
    operations: machine.OperationTimes = {}
    # Not a cost: kept here, a study with this file computes the same bits anywhere.
    arithmetic: machine.Choices = {}
    # the reference step at the machine speed of all these
    reference_s: PositiveFloat | None = None

    def at(self, reference_s: float) -> Calibration:
        """Scale to the machine speed at which the reference step takes `reference_s`."""
        if self.reference_s is None:
            return self
        factor = reference_s / self.reference_s
        operations = {
            name: {operation: time.scaled(factor) for operation, time in own.items()}
            for name, own in self.operations.items()
        }
        return self.model_copy(
            update={
                "tables": [table.scaled(factor) for table in self.tables],
                "engines": self.engines.at(reference_s),
                "operations": operations,
                "reference_s": reference_s,
            }
        )

    def lacking(self, sizes: Collection[int], most_workers: int) -> str:
        """Name the batch `sizes`, and the loads of up to `most_workers` a node, without step times; empty if none."""
        known = [{batch.samples for batch in table.batches} for table in self.tables]
        missing = sorted({size for own in known for size in set(sizes) - own})
        loads = sorted(
            set(machine.loads_up_to(most_workers))
            - {table.busy_workers for table in self.tables}
        )
        parts = (
            [f"batches of {', '.join(map(str, missing))} samples"] if missing else []
        )
        parts += [f"{', '.join(map(str, loads))} busy workers"] if loads else []
        return " and ".join(parts)

    def with_tables(self, measured: Sequence[machine.StepTable]) -> Calibration:
        """Add the batch sizes and loads of `measured` that are new."""
        own = {table.busy_workers: table for table in self.tables}
        for table in measured:
            if (before := own.get(table.busy_workers)) is None:
                own[table.busy_workers] = table
                continue
            known = {batch.samples for batch in before.batches}
            further = [batch for batch in table.batches if batch.samples not in known]
            own[table.busy_workers] = before.model_copy(
                update={"batches": [*before.batches, *further]}
            )
        return self.model_copy(update={"tables": [own[busy] for busy in sorted(own)]})

    def with_arithmetic(self, measured: machine.Choices) -> Calibration:
        """Add the choices of `measured` for batch sizes and worker counts that are new."""
        both = {
            size: measured.get(size, {}) | self.arithmetic.get(size, {})
            for size in sorted({*measured, *self.arithmetic})
        }
        return self.model_copy(update={"arithmetic": both})

    def save(self, path: Path) -> None:
        """Write the file whole, paths in it as in study.yaml, or raise ResultsError."""
        with writing(path, ""):
            write_atomic(
                path, json.dumps(to_home(self.model_dump(mode="json")), indent=1)
            )


def require_measured_cluster(path: Path, cluster: Cluster) -> None:
    """Raise ClusterError if nothing of the calibration at `path` charges runs on `cluster`, which states its own."""
    if cluster.compute != "this-machine":
        raise ClusterError(
            f"calibration: {path} holds what this machine costs, of which cluster {cluster.name} has "
            "nothing; leave the calibration out"
        )


def read_calibration(path: Path) -> Calibration:
    """Read what `Calibration.save` wrote.

    Raises:
        ClusterError: the file cannot be read or is not a calibration; names the first key that is missing, unknown,
            or out of range.
    """
    try:
        text = read_text(path)
        with suppress(ValueError, RecursionError):  # what is no JSON is refused below
            text = json.dumps(from_home(json.loads(text)))
        return Calibration.model_validate_json(text)
    except OSError as error:
        raise ClusterError(
            f"calibration: cannot read {path}: {error.strerror}"
        ) from None
    except UnicodeDecodeError:
        raise ClusterError(
            f"calibration: {path} is not text; expected a calibration in JSON"
        ) from None
    except ValidationError as error:
        where = f"calibration: {path} is not a calibration of this version"
        raise ClusterError(
            f"{explain(error, Calibration, where)}; correct it, or measure another"
        ) from None
