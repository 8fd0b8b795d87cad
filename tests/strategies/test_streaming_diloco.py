"""Streaming DiLoCo against torchft's own code, against diloco, and its numbers in few bits against their definition."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scalebench.errors import StudyError
from scalebench.pricing.machine import Choice
from scalebench.strategies import registry
from scalebench.strategies.few_bits import RowScaled, packed_codes, unpacked_codes
from scalebench.strategies.streaming_diloco import fragments_of
from scalebench.virtual import engine
from tests.conftest import setting
from tests.strategies import daso_case

CASES = ("blocking", "delayed", "mixed", "three", "one")
MODEL = {"mlp": {"hidden": [5, 4], "activation": "tanh"}}
ADAMW = {"adamw": {"weight_decay": 0.01}}
LEVELS = np.array([0.0, *(2.0**exponent for exponent in range(-6, 1))])


@pytest.fixture(scope="module")
def reference():
    with np.load(daso_case.REFERENCES / "torchft-0.2.0-diloco.npz") as archive:
        return {key: archive[key] for key in archive}


@pytest.fixture
def trained(reference, machine, monkeypatch, tmp_path):
    """`final, replicas, initial = trained(strategy)`: a run on the arrays of the reference."""

    def run(strategy, **values):
        x, y = reference["x"], reference["y"]
        made = type("Ended", (daso_case.given(x, y),), {"epoch_done": ended})
        # gradients replica by replica
        monkeypatch.setattr(engine, "choose", lambda *_: Choice())
        monkeypatch.setattr(engine, "Replica", made)
        np.savez(tmp_path / "initial.npz", initial=reference["initial"])
        values = {"model": MODEL, "optimizer": ADAMW, "lr": 0.05, **values}
        spec = daso_case.daso_run(strategy, x, y, tmp_path / "initial.npz", **values)
        outcome, weights = engine.simulate(spec, daso_case.stand_in(x, y), machine)
        assert outcome.status == "completed", outcome.error
        return (
            weights["final"],
            np.stack([each.ended.numpy() for each in made.made]),
            outcome,
        )

    return run


def ended(replica, epoch, agreed):
    """Keep the weights: evaluation makes others of them."""
    replica.ended = replica.parameters.detach().clone()
    daso_case.GivenReplica.epoch_done(replica, epoch, agreed)


@pytest.mark.parametrize("case", CASES)
def test_every_replica_ends_as_torchfts(trained, reference, case):
    every, fragments, delay, alpha = reference[f"{case}-options"]
    options = {
        "steps": int(every),
        "fragments": int(fragments),
        "delay": int(delay),
        "alpha": float(alpha),
    }
    _, replicas, _ = trained({"streaming_diloco": {**options, "trailing": "leave"}})
    np.testing.assert_allclose(replicas, reference[f"{case}-final"], atol=1e-12, rtol=0)


# 24 steps: a whole last interval, and a partial one
@pytest.mark.parametrize("steps", [4, 5])
def test_one_fragment_without_delay_and_mixing_is_diloco(trained, steps):
    whole = {"fragments": 1, "delay": 0, "alpha": 0.0, "steps": steps}
    final, replicas, _ = trained({"streaming_diloco": whole})
    expected, as_expected, _ = trained({"diloco": {"steps": steps}})
    assert torch.equal(final, expected)
    assert (replicas == as_expected).all()


@pytest.mark.parametrize("bits", [32, 8, 4])
@pytest.mark.parametrize("steps", [8, 10])
def test_all_replicas_end_equal(trained, bits, steps):
    final, replicas, _ = trained(
        {"streaming_diloco": {"steps": steps, "delay": 2, "bits": bits}}
    )
    assert (replicas == final.numpy()).all()
    left = {"steps": steps, "delay": 2, "bits": bits, "trailing": "leave"}
    final, replicas, _ = trained({"streaming_diloco": left})
    np.testing.assert_allclose(final.numpy(), replicas.mean(0), atol=1e-15, rtol=0)


def rounded(move, shapes, bits):
    """A move as it is received, number by number."""
    found, at = [], 0
    for shape in shapes:
        size = int(np.prod(shape))
        for row in move[at : at + size].reshape(shape if len(shape) > 1 else (1, -1)):
            scale = np.abs(row).max()
            sent = float(np.float32(scale))
            for value in row:
                if bits == 8:
                    found.append(np.round(value / scale * 127) / 127 * sent)
                else:
                    nearest = LEVELS[np.abs(LEVELS - abs(value) / scale).argmin()]
                    found.append(np.sign(value) * nearest * sent)
        at += size
    return np.array(found)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_moves_in_few_bits_are_averaged_as_each_was_rounded(trained, bits, weighting):
    """One interval of all steps: outer step on the mean of the moves of workers that train alone."""
    options = {"steps": 24, "fragments": 1, "delay": 0, "alpha": 0.0}
    final, _, outcome = trained(
        {"streaming_diloco": {**options, "bits": bits, "weighting": weighting}}
    )
    _, alone, _ = trained({"local_sgd": {"steps": 99, "trailing": "leave"}})
    initial = trained({"local_sgd": {"steps": 1}}, lr=1e-300)[0].numpy()
    shapes = [(5, 3), (5,), (4, 5), (4,), (2, 4), (2,)]
    mean = np.mean([rounded(initial - weights, shapes, bits) for weights in alone], 0)
    np.testing.assert_allclose(
        final.numpy(), initial - 0.7 * (mean + 0.9 * mean), atol=1e-12, rtol=0
    )
    rows = 5 + 1 + 4 + 1 + 2 + 1
    assert [worker.bytes_sent for worker in outcome.workers] == [
        4 * rows + 54 * bits // 8 + 8
    ] * 2


@settings(max_examples=50)
@given(
    st.sampled_from([4, 8]),
    st.integers(0, 2**32 - 1),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_few_bits_keep_signs_and_the_largest_of_each_row(bits, seed, dtype):
    shapes = [(3, 4), (7,), (2, 1, 5), (1,)]
    values = torch.from_numpy(np.random.default_rng(seed).standard_normal(30)).to(dtype)
    values[3] = 0.0
    codec = RowScaled(shapes, bits, values)
    message = codec.encode(values)
    found = codec.decode(message)
    assert message.nbytes == 4 * (3 + 1 + 2 + 1) + -(-30 * bits // 8)
    assert found.dtype == dtype
    assert (found * values >= 0).all()
    assert found[3] == 0
    for row, kept in zip(values[:12].view(3, 4), found[:12].view(3, 4), strict=True):
        most = row.abs().argmax()
        torch.testing.assert_close(kept[most], row[most], rtol=1e-6, atol=0)
        # half the widest gap between two numbers
        gap = row.abs().max() * (0.5 / 127 if bits == 8 else 0.25)
        assert ((kept - row).abs() <= gap * (1 + 1e-5)).all()


def test_a_row_of_zeros_stays_one():
    zeros = torch.zeros(6)
    for bits in (4, 8):
        codec = RowScaled([(2, 3)], bits, zeros)
        assert torch.equal(codec.decode(codec.encode(zeros)), zeros)


@given(st.sampled_from([2, 4, 8]), st.lists(st.integers(0, 255), max_size=20))
def test_codes_come_out_of_bytes_as_they_went_in(bits, numbers):
    codes = torch.tensor([number % 2**bits for number in numbers], dtype=torch.uint8)
    together = packed_codes(codes, bits)
    assert together.numel() == -(-len(numbers) * bits // 8)
    assert torch.equal(unpacked_codes(together, bits, len(numbers)), codes)


def test_fragments_are_of_layers_with_the_vectors_behind_them():
    shapes = [(4, 3), (4,), (4,), (5, 4), (5,), (6, 5), (6,), (2, 6)]
    assert fragments_of(shapes, 2, "strided") == [[0, 1, 2, 5, 6], [3, 4, 7]]
    assert fragments_of(shapes, 2, "sequential") == [[0, 1, 2, 3, 4], [5, 6, 7]]
    assert fragments_of([(3,), (4,)], 2, "strided") == [[0], [1]]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"steps": 9}, "9 is no multiple of the 2 fragments"),
        ({"steps": 8, "delay": 4}, "delay: 4 is not below steps / fragments, 4"),
        ({"bits": 16}, "32, 8 or 4"),
    ],
)
def test_options_that_do_not_fit_are_one_line(options, said):
    with pytest.raises(StudyError) as failure:
        registry.create("streaming_diloco", options)
    assert said in str(failure.value)
    assert "\n" not in str(failure.value)


def test_more_fragments_than_layers_are_refused():
    strategy = registry.create("streaming_diloco", {"fragments": 4})
    with pytest.raises(
        StudyError, match="4 fragments of a model of 3 layers; use at most 3"
    ):
        strategy.check(
            replace(setting(4), shapes=[(5, 3), (5,), (4, 5), (4,), (2, 4), (2,)])
        )
