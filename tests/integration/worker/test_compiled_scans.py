"""What flash-linear-attention starts, compiled for GPUs that need not be there, in the one configuration of each kernel."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import pytest

from tests.fixtures.compiled_apart import compiled_apart

pytest.importorskip("triton")
pytestmark = pytest.mark.integration


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_every_kernel_compiles_and_has_the_shared_memory_that_it_asks_for(architecture: str) -> None:
    """At the shapes of Qwen3-Next and Granite 4, forward and backward, in a process of its own."""
    try:
        version("fla-core")
    except PackageNotFoundError:
        pytest.skip("fla-core is not installed")
    found = {one["kernel"] for one in compiled_apart("tests.fixtures.compile_scans", architecture)}
    assert {"chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64", "chunk_bwd_kernel_dh"} <= found
    assert len(found) > 12
