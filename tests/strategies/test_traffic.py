"""What is counted is what the printed formula says, epoch by epoch, for every strategy."""

from __future__ import annotations

import math

import pytest
import torch

from scalebench.errors import StudyError
from scalebench.strategies import registry
from scalebench.strategies.traffic import SYMBOLS, Setting, evaluate, readable, symbols_of

EPOCHS = 3
VARIANTS = {
    "allreduce": [
        {"accumulate": 2}, {"compression": "fp16"}, {"compression": "topk", "keep": 0.1}, {"collective": "tree"},
        {"compression": "powersgd", "rank": 1, "start": 4}, {"collective": "hierarchical"},
    ],
    "ddp": [{"compression": "bf16"}, {"compression": "powersgd"}, {"accumulate": 4},
            {"accumulate": 2, "compression": "powersgd"}],
    "horovod": [{"compression": "fp16"}, {"accumulate": 5, "compression": "fp16"}],
    "epoch_average": [{"every": 2}, {"every": 2, "aggregation": "master"}],
    "epoch_async": [{"every": 2}],
    "local_sgd": [{"steps": 5}, {"steps": 5, "first": 2}, {"steps": 4, "first": 9, "optimizer_state": "average"}],
    "post_local_sgd": [{"start": 5, "steps": 2}, {"start": 4, "steps": 3, "subgroup": 2}, {"start": 99},
                       {"start": 3, "subgroup": 0}],
    "hierarchical_local_sgd": [{"groups": {2: 2, 4: 3}}],
    "torch_local_sgd": [{"period": 3, "warmup": 2}],
    "torch_hierarchical_local_sgd": [{"groups": {2: 17, 4: 18}}],
    "torch_post_local_sgd": [{"start": 5, "period": 2}],
    "daso-heat": [{"devices_per_node": 1, "warm_up_epochs": 1, "cool_down_epochs": 1}],
    "daso-fixed": [
        {"devices_per_node": 2, "local_skip": 2}, {"devices_per_node": 1, "wait": 3},
        {"devices_per_node": 2, "global_skip": 3, "wait": 2, "cool_down_epochs": 1}, {"devices_per_node": 1, "wait": 0},
    ],
    "gossip": [{"every": 2}, {"peers": "pair"}],
    "ad_psgd": [{"every": 3}, {"neighbours": "ring", "trailing": "leave"}],
    "fedavg": [{"local_epochs": 2, "fraction": 0.5}],
    "easgd": [{"steps": 5}],
}  # fmt: skip
DEFAULTS = {
    "daso-heat": {"devices_per_node": 1},
    "daso-fixed": {"devices_per_node": 1},
    "torch_hierarchical_local_sgd": {"groups": {2: 2, 4: 6}},
}
CASES = [
    (name, options)
    for name in registry.names()
    for options in [DEFAULTS.get(name, {}), *VARIANTS.get(name, [])]
    if name != "bsp_backup"  # which pushes come too late depends on timing
]


def refusal(strategy, workers):
    """What the strategy refuses at `workers`, two a node."""
    try:
        strategy.check(workers, 2)
    except StudyError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("workers", [2, 3, 4, 5])
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_counted_is_what_the_formula_says(play, name, options, workers):
    strategy = registry.create(name, options, "virtual")
    if max(strategy.model_dump().get("devices_per_node") or 1, strategy.model_dump().get("subgroup") or 1) >= workers:
        pytest.skip("the node, or the subgroup, would hold all workers")
    if workers % 2 and refusal(strategy, workers):
        pytest.skip("nodes and groups of two cannot be filled")
    if strategy.single_worker:
        workers = 1
    model, optimizer = {"mlp": {"hidden": [12, 12]}}, {"sgd": {"momentum": 0.9}}
    outcome, weights = play(
        {name: options}, workers, epochs=EPOCHS, model=model, optimizer=optimizer, batch_per_worker=4
    )
    shapes = ((12, 2), (12,), (12, 12), (12,), (3, 12), (3,))
    assert sum(math.prod(shape) for shape in shapes) == weights["final"].numel()
    setting = Setting(
        epochs=EPOCHS, steps=math.ceil(96 / 4 / workers), workers=workers, shapes=shapes, element_bytes=8,
        workers_per_node=2, optimizer_bytes=8 * weights["final"].numel(),
    )  # fmt: skip
    for epoch in range(EPOCHS):
        reports = [worker.epochs[epoch] for worker in outcome.workers]
        # A merge after a worker's last epoch is booked with it, the mean that follows with the whole run.
        late = strategy.asynchronous and name.startswith(("epoch_async", "dislib")) and epoch == EPOCHS - 1
        sent = sum(report.bytes_sent for report in reports) / workers
        if late:
            sent = (sum(worker.bytes_sent for worker in outcome.workers) / workers) - sum(
                strategy.bytes_in_epoch(before, setting) for before in range(epoch)
            )
        assert strategy.bytes_in_epoch(epoch, setting) == pytest.approx(sent, rel=1e-12)
    syncs, by_formula = outcome.workers[0].syncs, sum(strategy.syncs_in_epoch(e, setting) for e in range(EPOCHS))
    assert syncs <= by_formula if "syncs" in strategy.at_most and workers % 2 else syncs == by_formula


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_every_symbol_of_a_formula_is_explained(name, options):
    strategy = registry.create(name, options)
    for formula in (strategy.syncs_formula, strategy.bytes_formula):
        assert set(symbols_of(formula)) <= {*SYMBOLS, *type(strategy).model_fields, *strategy.counts}
        assert "*" not in readable(formula)


def test_buffers_and_optimizer_state_travel_where_they_are_averaged(play, blobs):
    strategy = registry.create("local_sgd", {"optimizer_state": "average"})
    setting = Setting(epochs=1, steps=8, workers=2, shapes=((5,),), buffer_bytes=12, optimizer_bytes=40)
    assert strategy.bytes_formula == "(n + n_b + n_o) * syncs"
    assert strategy.bytes_in_epoch(0, setting) == 20 + 12 + 40


def test_the_low_rank_bytes_are_those_of_the_hook():
    from scalebench.strategies.compression import powersgd_elements

    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 4))
    setting = Setting(1, 1, 2, tuple(tuple(parameter.shape) for parameter in model.parameters()))
    assert evaluate("f(2)", setting.symbols()) == 4 * powersgd_elements(model, 2)
