import pytest

from scalebench.errors import EngineError
from scalebench.native.resources import require_gpus_of_their_own


def test_nccl_workers_that_share_a_gpu_are_refused():
    require_gpus_of_their_own(["GPU-a", "GPU-b", "GPU-c"])
    with pytest.raises(EngineError, match=r"workers 1 and 3 share one \(3 GPUs for 4 workers\); start fewer"):
        require_gpus_of_their_own(["GPU-a", "GPU-b", "GPU-c", "GPU-b"])
