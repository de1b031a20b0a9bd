"""What a layer of an 8B shape launches and keeps on a GPU, counted without one."""

from __future__ import annotations

import pytest

from bench.gpu.absent import layer_costs
from bench.gpu.host import seconds

pytestmark = pytest.mark.integration


def test_a_layer_with_its_element_wise_work_fused_launches_less_and_keeps_less() -> None:
    plain, fused = layer_costs("8b", fused=False), layer_costs("8b")
    assert fused.launches <= 62
    assert fused.kept_bytes <= 140_000
    assert plain.launches > 2 * fused.launches
    assert plain.kept_bytes > fused.kept_bytes + 3 * 14_336


def test_each_kernel_of_this_project_is_launched_as_often_as_the_layer_has_use_for_it() -> None:
    costs = layer_costs("8b")
    groups = dict.fromkeys(("low_kernel", "add_spans_kernel", "output_kernel"), 4)
    assert {n: c for n, c in costs.forward.items() if n.endswith("_kernel")} == {
        **groups,
        "norm_kernel": 2,
        "gated_kernel": 1,
        "rotary_kernel": 1,
    }
    assert costs.backward["rotary_kernel"] == costs.backward["gated_backward_kernel"] == 1
    assert costs.forward["_varlen_attn"] == 1
    assert not {"clone", "copy_", "_to_copy"} & {*costs.forward, *costs.backward}, "nothing is copied"


def test_the_host_makes_the_tables_of_64_tasks_within_10_ms() -> None:
    first, later = seconds("8b", 64, 20)
    assert later <= 0.010
    assert later < first / 2, "rows are written once"
