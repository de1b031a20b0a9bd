"""What the preparation process does from its start to its end."""

from __future__ import annotations

import logging
import socket
from functools import partial
from pathlib import Path

from mlora_worker.data.errors import DataError
from mlora_worker.data.row_access import Reading, reading_of
from mlora_worker.data.tokenizing.rendering import uses_date
from mlora_worker.data.tokenizing.sandbox_process import PACKAGES
from mlora_worker.data.tokenizing.tokenizer import load_tokenizer
from mlora_worker.data.training_rows.row_cache import sweep
from mlora_worker.preparing.bounds import lift_limits
from mlora_worker.preparing.errors import failed_message
from mlora_worker.preparing.job import JobRunner
from mlora_worker.preparing.messages import ProcessAnswer, Ready, Setup, receive, send
from mlora_worker.preparing.server import Server
from mlora_worker.runtime.fences import tried
from mlora_worker.runtime.log_lines import set_up_logging
from mlora_worker.storage.object_store.s3_client import DEFAULT_TIMEOUTS, new_client
from mlora_worker.storage.object_store.store import open_store

log = logging.getLogger(__name__)


def main(file: int) -> None:
    """``file``: descriptor of the control connection. Returns when the rank has ended."""
    lift_limits()
    control = socket.socket(fileno=file)
    asked = receive(control)
    if asked is None:
        return
    setup = Setup.model_validate_json(asked[0])
    config = setup.config
    set_up_logging(config.log_format, 0, config.pipeline)
    try:
        tokenizer = load_tokenizer(Path(setup.folder))
    except (DataError, MemoryError) as error:
        send(control, ProcessAnswer(failed=failed_message(error)))
        return
    new_client(
        "http://127.0.0.1", "us-east-1", None, DEFAULT_TIMEOUTS
    )  # what the SDK reads for that, a job has by its fork
    reading = reading_of(config)
    workshop = JobRunner(
        tokenizer,
        setup.max_positions,
        setup.vocabulary,
        lambda access: open_store(
            access, allow_files=config.allow_file_uris, allowed_networks=config.allowed_networks
        ),
        reading,
    )
    send(control, ProcessAnswer(ready=Ready(uses_date=uses_date(tokenizer))))
    log.info("chat templates of tasks are rendered behind these fences: %s", tried(PACKAGES))
    Server(control, workshop.do, partial(_clean, reading)).serve()


def _clean(reading: Reading) -> None:
    if reading.cache_folder is not None:
        sweep(reading.cache_folder)
