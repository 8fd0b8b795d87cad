"""Learned times of kernels: one small network for each kind of layer and pass, from kernels measured on a machine.

After Barrachina et al., Computing 105(5), 2023, who predict kernels of cuDNN and cuBLAS
by multi-layer perceptrons. Theirs are unpublished; these have two hidden layers, take
log2 of a kernel's sizes and give the log of its seconds. Outside the convex hull of the
measured sizes a network is not asked: the roofline is.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import ConvexHull, QhullError

from scalebench.cluster.device import Device
from scalebench.errors import ClusterError, writing
from scalebench.models.layers import LayerTable
from scalebench.pricing import devices
from scalebench.system.file_access import read_text, write_atomic

Array = NDArray[np.float64]
PASSES = ("forward", "backward")
PRODUCTS = {
    "conv": ("m", "n", "k", "inputs"),
    "gemm": ("m", "n", "k"),
    "bmm": ("count", "m", "n", "k"),
}
# stands for kinds without a network of their own, as a kernel that reads and writes
ANY_KIND = "relu"
_HIDDEN = (32, 32)
_HELD_OUT = 5  # every fifth kernel
_FEWEST = 20  # kernels for a network


@dataclass(frozen=True)
class KernelNet:
    """Network of one kind: seconds = exp(W3 tanh(W2 tanh(W1 z + b1) + b2) + b3), z being standardised log2 sizes."""

    weights: tuple[Array, ...]
    biases: tuple[Array, ...]
    mean: Array
    spread: Array
    hull: Array  # (facets, sizes + 1): inside where hull @ (log2 sizes, 1) <= 0
    error: float  # median of |predicted / measured - 1| over held-out kernels

    def seconds(self, sizes: Array) -> Array:
        """Return seconds of kernels of `sizes` (kernels, sizes)."""
        values = (np.log2(sizes) - self.mean) / self.spread
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            values = np.tanh(values @ weight + bias)
        return np.asarray(np.exp(values @ self.weights[-1] + self.biases[-1])[:, 0])

    def covers(self, sizes: Array) -> NDArray[np.bool_]:
        """Return True for each kernel in the convex hull of the measured ones."""
        # Sizes of 0 are those of layers that were not measured: not covered, below.
        places = np.log2(np.maximum(sizes, 1))
        inside = places @ self.hull[:, :-1].T + self.hull[:, -1] <= 1e-9
        return np.asarray((sizes >= 1).all(axis=1) & inside.all(axis=1))


def fit_net(sizes: Array, seconds: Array, seed: int = 0) -> KernelNet:
    """Train a network on four of five kernels of `sizes` (kernels, sizes); the fifth says its error.

    Raises:
        ClusterError: too few kernels, or kernels that differ in too few sizes.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.neural_network import MLPRegressor
    from threadpoolctl import threadpool_limits

    if len(sizes) < _FEWEST:
        raise ClusterError(
            f"kernel model: {len(sizes)} kernels of one kind were measured, {_FEWEST} are needed"
        )
    places = np.log2(sizes)
    order = np.random.default_rng(seed).permutation(len(places))
    held, used = order[::_HELD_OUT], np.delete(order, slice(0, None, _HELD_OUT))
    mean, spread = places[used].mean(axis=0), np.maximum(places[used].std(axis=0), 1e-9)
    network = MLPRegressor(
        hidden_layer_sizes=_HIDDEN,
        activation="tanh",
        solver="lbfgs",
        alpha=0.1,
        max_iter=500,
        random_state=seed,
    )
    with (
        warnings.catch_warnings(),
        threadpool_limits(1),
    ):  # more threads only wait for one another
        # the held-out error says what it has learned
        warnings.simplefilter("ignore", ConvergenceWarning)
        network.fit((places[used] - mean) / spread, np.log(seconds[used]))
    net = KernelNet(
        tuple(network.coefs_),
        tuple(network.intercepts_),
        mean,
        spread,
        _hull(places[used]),
        np.nan,
    )
    error = float(np.median(np.abs(net.seconds(sizes[held]) / seconds[held] - 1)))
    return KernelNet(net.weights, net.biases, mean, spread, net.hull, error)


def _hull(places: Array) -> Array:
    # Qhull wants two dimensions: the hull of numbers is their range.
    if places.shape[1] == 1:
        return np.array([[-1.0, places.min()], [1.0, -places.max()]])
    try:
        return np.asarray(ConvexHull(places).equations, dtype=np.float64)
    except QhullError:
        raise ClusterError(
            "kernel model: the measured kernels differ in too few sizes; measure more of them"
        ) from None


@dataclass(frozen=True)
class KernelModel:
    """Networks by (kind, pass) of one machine, and its own roofline."""

    machine: str
    dtype: str
    nets: Mapping[tuple[str, str], KernelNet]
    device: Device

    def save(self, path: Path) -> None:
        """Write the model as JSON. Raises ResultsError."""
        nets = {
            # JSON has no tuples as keys.
            "/".join(key): {name: _listed(value) for name, value in vars(net).items()}
            for key, net in self.nets.items()
        }
        device = self.device.model_dump(mode="json")
        content = {
            "machine": self.machine,
            "dtype": self.dtype,
            "device": device,
            "nets": nets,
        }
        with writing(path, ""):
            write_atomic(path, json.dumps(content))


def _listed(value: Any) -> Any:
    return (
        [array.tolist() for array in value]
        if isinstance(value, tuple)
        else np.asarray(value).tolist()
    )


def load_kernel_model(path: Path) -> KernelModel:
    """Read what `KernelModel.save` wrote. Raises ClusterError for any other file."""
    try:
        read = json.loads(read_text(path))
        nets = {}
        for name, own in read["nets"].items():
            arrays = {
                key: np.array(own[key], dtype=np.float64)
                for key in ("mean", "spread", "hull")
            }
            weights, biases = (
                tuple(map(np.array, own[key])) for key in ("weights", "biases")
            )
            net = KernelNet(weights, biases, **arrays, error=float(own["error"]))
            kind, _, part = name.partition("/")
            # A file may have been edited: whether its matrices fit is tried once, at
            # the centre.
            centre = 2 ** net.mean[None]
            if (
                part not in PASSES
                or not np.isfinite(net.seconds(centre)).all()
                or net.covers(centre).shape != (1,)
            ):
                raise ValueError(name)
            nets[kind, part] = net
        device = Device.model_validate(read["device"])
        return KernelModel(str(read["machine"]), str(read["dtype"]), nets, device)
    except OSError as error:
        raise ClusterError(
            f"kernel model: cannot read {path}: {error.strerror}"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise ClusterError(
            f"kernel model: {path} is not a kernel model of this version; measure it again"
        ) from None


@dataclass(frozen=True, eq=False)
class Learned(devices.TimeModel):
    """Times of layers by a kernel model; the roofline's where a kernel is outside what was measured.

    All are divided by `speed`.
    """

    kernels: KernelModel
    roofline: devices.Roofline
    speed: float = 1.0

    def __post_init__(self) -> None:
        if self.kernels.dtype != self.roofline.dtype:
            raise ClusterError(
                f"kernel model of {self.kernels.machine}: its kernels are in {self.kernels.dtype}, the roofline in "
                f"{self.roofline.dtype}; ask for {self.kernels.dtype}"
            )

    @property
    def source(self) -> str:
        return f"kernel model of {self.kernels.machine} in {self.kernels.dtype}"

    def times(self, layers: LayerTable, batch: int) -> devices.LayerTimes:
        bound = self.roofline.times(layers, batch)
        forward, backward = bound.forward.copy(), bound.backward.copy()
        for (kind, part), rows, sizes, covered in self._asked(layers, batch):
            seconds = self.kernels.nets[kind, part].seconds(sizes[covered])
            chosen = rows[covered]
            if part == "forward":
                forward[chosen] = seconds
            else:  # networks have learned both products, or the one pass back of other kinds
                backward[chosen] = seconds * layers.backward_products[chosen] / 2
        return devices.LayerTimes(
            forward / self.speed, backward / self.speed, bound.update_s / self.speed
        )

    @property
    def memory_gib(self) -> float:
        return self.roofline.memory_gib

    def _faster(self, factor: float) -> Learned:
        return replace(self, speed=self.speed * factor)

    @property
    def gpu(self) -> bool:
        return self.roofline.gpu

    @property
    def name(self) -> str:
        return self.kernels.machine

    def error(self, batch: float) -> devices.StepError:
        return devices.LEARNED_ERROR

    def outside(self, layers: LayerTable, batch: float, busy: int) -> list[str]:
        computing = {
            index
            for index, layer in enumerate(layers.layers)
            if layer.inputs + layer.activations
        }
        modelled = set(computing)
        for (_, part), rows, _, covered in self._asked(layers, max(1, round(batch))):
            if part == "forward":
                modelled -= set(rows[covered].tolist())
        if not modelled:
            return []
        layers_of = f"{len(modelled)} of {len(computing)} layers"
        return [
            f"{layers_of} outside the kernels of {self.kernels.machine}: times of the {self.roofline.source}"
        ]

    def _asked(
        self, layers: LayerTable, batch: int
    ) -> list[tuple[tuple[str, str], NDArray[np.intp], Array, NDArray[np.bool_]]]:
        """Return (network, rows of layers, their sizes, which of them it covers) for every network."""
        kinds = {kind for kind, _ in self.kernels.nets}
        named = [
            layer.kind if layer.kind in kinds or layer.kind in PRODUCTS else ANY_KIND
            for layer in layers.layers
        ]
        found = []
        for key, net in self.kernels.nets.items():
            rows = np.flatnonzero([name == key[0] for name in named])
            sizes = kernel_sizes(layers, key[0], batch)[rows]
            found.append((key, rows, sizes, net.covers(sizes)))
        return found


def kernel_sizes(layers: LayerTable, kind: str, batch: int) -> Array:
    """Return the sizes (layers, sizes) that a network of `kind` reads, of all `layers` at `batch`."""
    growing = {"inputs", "count" if kind == "bmm" else "m"}
    if kind not in PRODUCTS:
        return batch * (layers.column("inputs") + layers.column("activations"))[:, None]
    grouped = layers.column("count") if kind == "conv" else np.ones(len(layers.layers))
    columns = [
        layers.column(name) * (batch if name in growing else 1)
        for name in PRODUCTS[kind]
    ]
    # grouped convolutions were not measured
    return np.where(grouped[:, None] > 1, 0.0, np.stack(columns, axis=1))
