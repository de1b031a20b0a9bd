"""What Triton needs of a machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mlora_worker.runtime.kernel_compiler import missing_for_triton


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    missing_for_triton.cache_clear()
    yield
    missing_for_triton.cache_clear()


def test_without_a_c_compiler_triton_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    assert "C compiler" in (missing_for_triton() or "")
    monkeypatch.setenv("CC", "/opt/cc")
    missing_for_triton.cache_clear()
    assert "C compiler" not in (missing_for_triton() or "")
