"""DDP's buckets are those that its virtual runs are charged for."""

from __future__ import annotations

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from scalebench.strategies.ddp import Ddp, VirtualDdp

MIB = 1 << 20


@pytest.fixture
def group(tmp_path):
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    distributed.destroy_process_group()


def buckets(model: nn.Module, cap: float | None) -> list[int]:
    """Bytes of DDP's buckets in the order in which they travel, once it has seen the order of the gradients."""
    wrapped = DistributedDataParallel(model, bucket_cap_mb=cap)  # type: ignore[arg-type]
    for _ in range(3):
        wrapped(torch.ones(1, 600)).sum().backward()
    return [
        int(size)
        for size in wrapped._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")
    ]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(600, 600),
        nn.ReLU(),
        nn.Linear(600, 600),
        nn.ReLU(),
        nn.Linear(600, 10),
    )


@pytest.mark.parametrize("cap", [25.0, 2.0])
def test_virtual_buckets_are_torchs_own(group, cap):
    size = sum(parameter.nbytes for parameter in net().parameters())
    overlap = VirtualDdp(bucket_cap_mb=cap).overlap
    made = buckets(net(), Ddp(bucket_cap_mb=cap).torchs_cap(size))
    assert made == buckets(net(), None if cap == 25.0 else cap)
    assert sum(made) == size
    charged, filled = [], 0
    for parameter in reversed(list(net().parameters())):
        filled += parameter.nbytes
        if filled >= (overlap.bucket_bytes if charged else overlap.first_bucket_bytes):
            charged.append(filled)
            filled = 0
    assert made == charged + ([filled] if filled else [])


def test_powersgd_has_one_bucket_whatever_the_cap(group):
    size = sum(parameter.nbytes for parameter in net().parameters())
    for cap in (0.01, 25.0):
        assert buckets(
            net(), Ddp(bucket_cap_mb=cap, compression="powersgd").torchs_cap(size)
        ) == [size]
