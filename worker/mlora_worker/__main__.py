"""``python -m mlora_worker``: one rank of a pipeline, until it is told to stop or its group is over.

Exit codes: 0 stopped by SIGTERM, after what it has in hand was saved (``termination.py``); 1 this rank failed; 2 its
configuration is wrong, or its model cannot be served so, which another start would not change; 75 a peer was lost, start
again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import resource
import signal
import sys
from types import FrameType

from pydantic import ValidationError

from mlora_worker.protocol import WorkerConfig
from mlora_worker.runtime.allocator import ask_for_huge_pages
from mlora_worker.runtime.log_lines import set_up_logging
from mlora_worker.runtime.termination import Termination
from mlora_worker.runtime.threads import switch_quickly

EXIT_FAILED, EXIT_USAGE, EXIT_PEER_LOST = 1, 2, 75


def main() -> None:
    try:
        config, rank = read_environment(dict(os.environ))
    except ValueError as error:
        print(f"mlora_worker: {error}", file=sys.stderr)
        raise SystemExit(EXIT_USAGE) from None
    set_up_logging(config.log_format, rank, config.pipeline)
    allow_open_files()
    switch_quickly()
    if config.memory_budget is not None:
        ask_for_huge_pages()
    termination = Termination(config.termination_seconds, lambda: _leave(0))

    def stop(signum: int, _: FrameType | None) -> None:
        logging.getLogger("mlora_worker").info("asked to stop by %s", signal.Signals(signum).name)
        termination.ask()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    # torch is imported only once the configuration is known to be good
    from mlora_worker.data.errors import DataError, Interrupted
    from mlora_worker.model.errors import ModelError
    from mlora_worker.pipeline.frames import LinkClosed
    from mlora_worker.rank.start import run_rank
    from mlora_worker.runtime.tls import CannotServe
    from mlora_worker.storage.base_model.safetensors_reader import BrokenModel

    log = logging.getLogger("mlora_worker")

    def leave(error: Exception) -> None:
        log.error("the group ended before it started: %s", error)
        _leave(EXIT_PEER_LOST)

    try:
        run_rank(config, rank, termination, leave)
        code = 0
    except LinkClosed as error:
        log.error("the group ended: %s", error)
        code = EXIT_PEER_LOST
    except Interrupted as error:  # the machine lacks something: another start may find it
        log.error("%s", error)
        code = EXIT_FAILED
    except (ModelError, DataError, BrokenModel) as error:
        log.error("the model cannot be served: %s", error)
        code = EXIT_USAGE
    except CannotServe as error:
        log.error("%s", error)
        code = EXIT_FAILED
    except Exception:
        log.exception("rank %d failed", rank)
        code = EXIT_FAILED
    _leave(code)


def read_environment(environment: dict[str, str]) -> tuple[WorkerConfig, int]:
    """Configuration and rank. Raises ``ValueError`` that names the variable."""
    text = environment.get("MLORA_WORKER_CONFIG")
    if not text:
        raise ValueError(
            "MLORA_WORKER_CONFIG is not set; it holds the rank's configuration as JSON (protocol.WorkerConfig)"
        )
    try:
        config = WorkerConfig.model_validate_json(text)
    except ValidationError as error:
        raise ValueError(f"MLORA_WORKER_CONFIG is not valid: {error}") from None
    number = environment.get("MLORA_RANK") or ""
    if not number:
        match = re.search(r"-(\d+)$", environment.get("MLORA_POD_NAME", ""))
        if match is None:
            raise ValueError(
                "this rank's number is not set: set MLORA_RANK, or a MLORA_POD_NAME that ends in a number"
            )
        number = match[1]
    if not number.isdigit() or int(number) >= config.stages:
        raise ValueError(f"rank {number} does not exist in a pipeline of {config.stages} stages")
    return config, int(number)


def allow_open_files() -> None:
    """As many as this process may have: container runtimes begin with 1,024, which links, stores and many tasks exceed."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # more than this kernel knows
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _leave(code: int) -> None:
    """End at once: threads that wait for a dead peer inside torch.distributed would hold an ordinary exit up."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
