"""Bodies of torch's own tests of DistributedDataParallel, run on tlsched (see ddp_adapter)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.training.ddp_adapter import run_body
from tests.training.ranks import RankPool

BODIES = (
    "test_DistributedDataParallelCPU",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_DistributedDataParallel_requires_grad",
    "test_ddp_zero_output_features",
    "test_ddp_create_graph",
    "test_DistributedDataParallel",
    "test_DistributedDataParallel_with_amp_and_grad_is_view",
    "test_DistributedDataParallel_SyncBatchNorm_Channels_Last",
    "test_DistributedDataParallel_SyncBatchNorm",
    "test_DistributedDataParallel_SyncBatchNorm_No_Affine",
    "test_DistributedDataParallel_SyncBatchNorm_2D_Input",
    "test_DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process",
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value",
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient",
    "test_DistributedDataParallel_SyncBatchNorm_half",
    "test_ddp_uneven_input_join_disable",
    "test_ddp_shared_grad_acc_unused_params",
    "test_ddp_namedtuple",
    "test_ddp_model_diff_shape_across_ranks",
    "test_ddp_model_diff_num_params_across_ranks",
    "test_ddp_inference",
    "test_ddp_returns_tensor_with_no_grad",
    "test_ddp_new_tensor_in_fwd",
    "test_ddp_new_tensor_in_fwd_static_graph",
    "test_ddp_remove_autograd_hooks",
    "test_ddp_broadcast_buffer",
    "test_ddp_init_sync_buffers_with_forward_sync_buffers_false",
    "test_stateless_api_with_ddp",
    "test_ddp_forward_backward_hook",
    "test_ddp_sink_noclone",
)


@pytest.fixture(scope="module")
def pools() -> Iterator[list[RankPool]]:
    """Ranks of their own: torch's test helpers change settings of the process."""
    pools: list[RankPool] = []
    yield pools
    for pool in pools:
        pool.close()


@pytest.fixture
def ranks(pools: list[RankPool]) -> RankPool:
    """Two of them, anew after a failure."""
    if not pools or pools[-1].broken:
        pools.append(RankPool(2))
    return pools[-1]


@pytest.mark.parametrize("name", BODIES)
def test_body(ranks: RankPool, name: str) -> None:
    ranks.run(run_body, name, timeout_s=40)
