"""How many files a rank may have open."""

from __future__ import annotations

import resource

from mlora_worker.__main__ import allow_open_files


def test_a_rank_may_have_as_many_files_open_as_its_container_allows() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
        allow_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
