"""Adaptive parallelism: each component of a model shared by as many workers as suits it, chosen again when measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Literal, NamedTuple

from pydantic import Field, PositiveInt

from scalebench.comm.base import Capability
from scalebench.comm.engines import providing
from scalebench.errors import StudyError
from scalebench.strategies.base import Batch, LayerProfile, Setting, Strategy, Worker
from scalebench.strategies.registry import register
from scalebench.strategies.traits import Stretch, Traits
from scalebench.study.spec import BY_LAYER, Component
from scalebench.system.late import torch

if TYPE_CHECKING:
    from torch import Tensor

    from scalebench.models.parts import Layer

Solver = Literal["viterbi", "greedy"]
_MIB = 2**20
# relative difference of measured and predicted seconds, above which a layout is chosen
# again
_UNLIKE = 0.10
_WORTH = 0.05  # share of the time ahead that another layout has to save


class Costs(NamedTuple):
    """Numbers that a worker sends and receives, and parameters that it holds, for each degree of each layer.

    With n samples on each of K workers a layer of degree t, P parameters, and x numbers
    a sample in and y out costs

        gradients   2 (1 - t / K) P / t             allreduce over the K / t workers with the same share
        sums        2 (1 - 1 / t) t n (x + y)       allreduce of outputs, and of gradients of inputs, over t
        moves       (b - 1) n x + (a - 1) n x       from degree a to b != a: rows gathered, and their gradients back

    Compute is the same for every degree: t workers share the layer, and its batch is
    that of t workers.
    """

    workers: int
    samples: float  # n

    def of_layer(self, layer: LayerProfile, degree: int) -> float:
        """Return the numbers of a step in a layer."""
        gradients = 2 * (1 - degree / self.workers) * layer.parameters / degree
        return gradients + 2 * (degree - 1) * self.samples * (layer.takes + layer.gives)

    def of_move(self, numbers: int, before: int, after: int) -> float:
        """Return the numbers of a step between two layers of other degrees, with so many numbers a sample."""
        return 0.0 if before == after else (before + after - 2) * self.samples * numbers

    def of_layout(
        self, layers: Sequence[LayerProfile], degrees: Sequence[int]
    ) -> float:
        """Return the numbers of a step; before the first layer and behind the last one a worker has its own batch."""
        own = sum(
            self.of_layer(layer, degree)
            for layer, degree in zip(layers, degrees, strict=True)
        )
        between = [layers[0].takes, *(layer.gives for layer in layers)]
        moves = zip(between, pairwise([1, *degrees, 1]), strict=True)
        return own + sum(self.of_move(numbers, *pair) for numbers, pair in moves)


class _Path(NamedTuple):
    cost: float
    held: float
    degrees: tuple[int, ...]


def chosen(
    layers: Sequence[LayerProfile],
    costs: Costs,
    most_held: float,
    solver: Solver,
) -> tuple[int, ...] | None:
    """Return the degree of each layer for the least cost with at most `most_held` parameters; None if none fits.

    `viterbi` keeps, for each degree of the latest layer, the paths that no other beats
    in cost and parameters: the best of all layouts. `greedy` keeps the cheapest path
    alone that leaves room for the least of the layers ahead.
    """
    least = [
        min(layer.parameters / degree for degree in layer.degrees) for layer in layers
    ]
    paths = [_Path(0.0, 0.0, ())]
    for place, layer in enumerate(layers):
        ahead = sum(least[place + 1 :])
        grown = [
            _Path(
                path.cost
                # A worker begins with its own batch, as after a layer of degree 1.
                + costs.of_move(layer.takes, (path.degrees or (1,))[-1], degree)
                + costs.of_layer(layer, degree),
                path.held + layer.parameters / degree,
                (*path.degrees, degree),
            )
            for path in paths
            for degree in layer.degrees
        ]
        fitting = sorted(path for path in grown if path.held + ahead <= most_held)
        paths = fitting[:1] if solver == "greedy" else _undominated(fitting)
        if not paths:
            return None
    best = min(
        paths,
        # Behind the last layer each worker takes the loss of its own batch.
        key=lambda path: (
            path.cost + costs.of_move(layers[-1].gives, path.degrees[-1], 1)
        ),
    )
    return best.degrees


def _undominated(paths: Iterable[_Path]) -> list[_Path]:
    """Return those of `paths`, by cost, that hold fewer parameters than each cheaper one of their last degree."""
    fewest: dict[int, float] = {}
    found = []
    for path in paths:
        if path.held < fewest.get(path.degrees[-1], float("inf")):
            fewest[path.degrees[-1]] = path.held
            found.append(path)
    return found


def runs_of(degrees: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the lengths of the runs of equal degrees, and their degrees."""
    sizes, own = [1], [degrees[0]]
    for before, degree in pairwise(degrees):
        if degree == before:
            sizes[-1] += 1
        else:
            sizes.append(1)
            own.append(degree)
    return sizes, own


class Shared(NamedTuple):
    """A component: consecutive layers, from `first` to `last`, that `degree` workers share."""

    first: str
    last: str
    layers: int
    parameters: int
    degree: int


def components_of(
    layers: Sequence[LayerProfile], degrees: Sequence[int]
) -> list[Shared]:
    """Return the components of a layout."""
    place, found = 0, []
    for size, degree in zip(*runs_of(degrees), strict=True):
        own = layers[place : place + size]
        found.append(
            Shared(
                own[0].name,
                own[-1].name,
                size,
                sum(layer.parameters for layer in own),
                degree,
            )
        )
        place += size
    return found


def of_least_numbers(solver: Solver, parameters_mib: float | None = None) -> Component:
    """Return the strategy `adaptive` that begins with the layout of the least numbers, under a cap."""
    options: dict[str, object] = {"layout": "least"}
    if solver != "viterbi":
        options["solver"] = solver
    if parameters_mib is not None:
        options["parameters_mib"] = parameters_mib
    return Component(name="adaptive", options=options)


@register()
class Adaptive(Strategy):
    """Each layer l is shared by t_l of K workers, in K / t_l replicas: 1 is data parallelism, K model parallelism.

        forward, backward   as in `tensor` by t_l; rows are gathered where the next layer has another degree
        step                mean of the gradients over the K / t_l workers with the same share
        after an epoch      if its seconds differ by more than 10 % from those expected of this layout: choose again
        choose              layouts that were used cost what was measured; t* = arg min of the numbers costs its numbers
                            times the seconds of a number: those of communication / numbers of this layout
        switch              if 5 % of the time ahead is saved, less the parameters that are sent for it

    Consecutive layers of one degree are one component. The first epoch is trained with
    `layout`, and profiles; without a measurement, as in a prediction, that layout
    stays. Weights are those of allreduce.
    """

    layout: list[PositiveInt] | Literal["least"] | None = Field(
        None,
        description="degree of each layer at the beginning, or `least` for the least numbers; default: 1, data "
        "parallelism, where `parameters_mib` allows it",
    )
    solver: Solver = Field(
        "viterbi",
        description="viterbi: the best of all layouts; greedy: layer after layer",
    )
    parameters_mib: float | None = Field(
        None,
        gt=0,
        description="most MiB of parameters on a worker; gradients and each state take as much again",
    )
    again: bool = Field(
        True, description="choose again after an epoch by what was measured"
    )

    name = "adaptive"
    summary = "each layer shared by as many workers as suits it, chosen again by measured times"
    source = "Baligodugula and Amsaad, arXiv 2503.23186 (ASA); its algorithm is not public: reconstructed"
    requires = frozenset({Capability.COLLECTIVES, Capability.SPLIT})
    engines = providing(Capability.SPLIT)

    def setup(self, worker: Worker) -> None:
        if worker.size > 1:
            worker.state.measured = {}  # seconds of an epoch by layout
            self._use(worker, self._first(worker), expected_s=0.0)

    def _use(self, worker: Worker, degrees: tuple[int, ...], expected_s: float) -> None:
        worker.state.degrees, worker.state.expected_s = degrees, expected_s
        worker.state.components = worker.use_layout(*runs_of(degrees))

    def _first(self, worker: Worker) -> tuple[int, ...]:
        """Return the layout that is stated, else data parallelism if it fits, else that of the least numbers."""
        if isinstance(self.layout, list):
            return tuple(self.layout)
        layers = worker.layer_profiles
        held = sum(layer.parameters for layer in layers)
        most = self._most_held(worker.parameters.element_size())
        if self.layout is None and held <= most:
            return (1,) * len(layers)
        return self._least(worker, 0)

    def _least(self, worker: Worker, epoch: int) -> tuple[int, ...]:
        """Return the layout of the least numbers of a step in `epoch`, under the cap."""
        number, layers = worker.parameters.element_size(), worker.layer_profiles
        found = self.least(layers, self._costs(worker, epoch), number)
        if found is None:
            # of a layer table, which `check` has no modules of
            smallest = [
                (number * layer.parameters / max(layer.degrees) / _MIB, layer.name)
                for layer in layers
            ]
            raise self._unmet(worker.size, smallest)
        return found

    def least(
        self, layers: Sequence[LayerProfile], costs: Costs, number: int
    ) -> tuple[int, ...] | None:
        """Return the degrees of the least numbers, of so many bytes each, under the cap; None if none fits."""
        return chosen(layers, costs, self._most_held(number), self.solver)

    def _costs(self, worker: Worker, epoch: int) -> Costs:
        return Costs(worker.size, worker.mean_batch(epoch))

    def _most_held(self, number: int) -> float:
        """Return the most parameters, of so many bytes each, of a worker."""
        if self.parameters_mib is None:
            return float("inf")
        return self.parameters_mib * _MIB / number

    def train_epoch(self, worker: Worker, epoch: int) -> None:
        began = worker.clock.ledger.copy()
        for batch in worker.batches(epoch):
            self._step(worker, batch)
        if worker.size > 1 and self.again and not worker.is_last(epoch):
            ledger = worker.clock.ledger
            self._plan(
                worker,
                epoch,
                ledger.compute_s - began.compute_s,
                ledger.comm_s - began.comm_s,
            )

    def _step(self, worker: Worker, batch: Batch) -> None:
        worker.gradient(batch, batch.weight)
        if worker.size > 1:
            for component in worker.state.components:
                component.peers.allreduce_(component.gradients, "mean")
                # Not div_, whose meta kernel imports sympy when this program is
                # recorded, in half a second.
                component.gradients.mul_(1 / component.degree)
        worker.update()

    def warm_up(self, worker: Worker, batch: Batch) -> None:
        self._step(worker, batch)

    def _plan(
        self, worker: Worker, epoch: int, compute_s: float, comm_s: float
    ) -> None:
        """Choose the layout again if this epoch took another time than expected, and switch if that pays.

        Every worker decides by the same numbers, and so alike.
        """
        gradients = worker.gradients
        own = torch.tensor(
            [compute_s, comm_s],
            dtype=gradients.dtype,
            device=gradients.device if gradients.is_cuda else "cpu",
        )  # seconds have values where gradients have none, as in timing alone
        of_all = [each.tolist() for each in worker.comm.allgather(own)]
        seconds = fmean(compute + comm for compute, comm in of_all)
        # of the worker that waited least for others
        exchange_s = min(comm for _, comm in of_all)

        state, layers, costs = (
            worker.state,
            worker.layer_profiles,
            self._costs(worker, epoch),
        )
        state.measured[state.degrees] = seconds
        # A recording measures nothing, 0 as expected of the first layout.
        if abs(seconds - state.expected_s) <= _UNLIKE * state.expected_s:
            return
        now, least = costs.of_layout(layers, state.degrees), self._least(worker, epoch)
        seconds_a_number = exchange_s / now
        saved_s = (now - costs.of_layout(layers, least)) * seconds_a_number
        # What was measured goes before what the numbers promise.
        expected = {least: seconds - saved_s, **state.measured}
        best = min(expected, key=expected.__getitem__)

        ahead = worker.epochs - epoch - 1
        held = sum(layer.parameters for layer in layers)
        # with a state of the optimizer
        moved_s = 2 * held * seconds_a_number / worker.steps_in(epoch)
        # Of this layout, should it stay.
        state.expected_s = seconds
        if (seconds - expected[best]) * ahead - moved_s > _WORTH * seconds * ahead:
            self._use(worker, best, expected[best])
            worker.observe("switches", 1)

    def in_agreement(self, worker: Worker, epoch: int) -> bool:
        return True

    def consensus(self, worker: Worker) -> Tensor:
        raise AssertionError("replicas agree after every epoch")

    def check(self, setting: Setting) -> list[str]:
        if setting.workers == 1:
            return []
        optimizer = setting.training.optimizer.name
        if optimizer in BY_LAYER:
            raise StudyError(
                f"strategy {self.name}: optimizer {optimizer} takes the norms of whole layers, of which a worker may "
                "hold a share; use sgd, adam or adamw"
            )
        stated = self.layout if isinstance(self.layout, list) else []
        for degree in stated:
            if setting.workers % degree:
                raise StudyError(
                    f"strategy {self.name}: layout: {degree} workers cannot share a layer among {setting.workers}; use "
                    f"divisors of {setting.workers}"
                )
        if (
            setting.layer_work is not None
            and stated
            and len(stated) != len(setting.layer_work)
        ):
            raise StudyError(
                f"strategy {self.name}: layout: {len(stated)} degrees for a model of {len(setting.layer_work)} "
                "layers with parameters; give one for each"
            )
        if setting.layers is not None:
            self._require_shares(setting.layers, stated, setting.workers)
        return []

    def _require_shares(
        self, layers: Sequence[Layer], stated: Sequence[int], workers: int
    ) -> None:
        """Check that layers can be shared as `stated`, and that some layout fits under the cap."""
        from scalebench.models.sharding import sharing_degrees_of

        of_each = sharing_degrees_of(layers, workers, "of the study")
        for layer, degree, degrees in zip(layers, stated, of_each, strict=False):
            if degree not in degrees:
                raise StudyError(
                    f"strategy {self.name}: layout: layer {layer.name} cannot be shared by {degree} workers, but by "
                    f"{', '.join(map(str, degrees))}"
                )
        # The largest degrees hold the fewest parameters.
        sharing = stated or [max(degrees) for degrees in of_each]
        held = [
            (sum(each.nbytes for each in layer.parameters) / degree / _MIB, layer.name)
            for layer, degree in zip(layers, sharing, strict=True)
        ]
        least = sum(mib for mib, _ in held)
        if self.parameters_mib is not None and least > self.parameters_mib:
            raise self._unmet(workers, held)

    def _unmet(self, workers: int, held: Sequence[tuple[float, str]]) -> StudyError:
        """Return the refusal of the cap; `held` are the least MiB of a worker of each layer, and its name."""
        least, (most, where) = sum(mib for mib, _ in held), max(held)
        return StudyError(
            f"strategy {self.name}: parameters_mib: no layout on {workers} workers fits into "
            f"{self.parameters_mib:g} MiB: the least is {least:.3g} MiB a worker, of which layer {where} takes "
            f"{most:.3g}; allow more, or use more workers"
        )

    @property
    def traits(self) -> Traits:
        program = (Stretch(restarts=True),)
        return Traits(
            stretches=program,
            mean_over_global_batch=True,
            mixed=True,
            adapts=self.again,
        )
