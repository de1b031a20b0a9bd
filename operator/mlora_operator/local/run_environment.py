"""Where and with what a local run works."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlora_operator.local.machine import Machine
from mlora_operator.local.ranks import WORKER


class PageNotServed(Exception):
    """The port of the page is taken, or not ours to take."""


@dataclass(frozen=True, slots=True)
class RunEnvironment:
    state: Path  # statuses and logs
    cache: Path  # base models that were downloaded
    machine: Machine
    environment: Mapping[str, str]  # of the ranks
    command: Sequence[str] = WORKER
    timeline: Path | None = None  # where to write what the stages did
    page: int | None = None  # port of the page, on the loopback address


def models_folder(environment: Mapping[str, str]) -> Path:
    """Where base models that are downloaded for this user lie."""
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlora" / "models"
