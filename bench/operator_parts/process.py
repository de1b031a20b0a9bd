"""The operator's process, started as its image starts it, and what the kernel says of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from bench.forks import die_with_parent
from bench.ranks import free_ports

_START_WITHIN, _END_WITHIN = 120.0, 30.0  # seconds
_TICKS = os.sysconf("SC_CLK_TCK")


class Operator:
    """``python -m mlora_operator`` with these settings; a context manager."""

    def __init__(self, folder: Path, kubeconfig: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (port,) = free_ports(1)
        self._health = f"http://127.0.0.1:{port}/healthz"
        self._log = folder / "operator.log"
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("MLORA_")},
            "KUBECONFIG": str(folder / "kubeconfig"),
            "MLORA_SETTINGS": str(folder / "settings.json"),
            "MLORA_POD_NAME": "bench-operator",
        }
        (folder / "kubeconfig").write_text(json.dumps(kubeconfig))
        (folder / "settings.json").write_text(json.dumps({**settings, "health": {"port": port}}))
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Operator:
        self.start()
        self.wait_healthy()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mlora_operator"],
                env=self._environment,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
            )

    def stop(self) -> None:
        """As the kubelet ends it."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_END_WITHIN)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def wait_healthy(self) -> None:
        """Raises RuntimeError with the log's end."""
        end = time.monotonic() + _START_WITHIN
        while not self.is_healthy():
            if time.monotonic() > end or self._running.poll() is not None:
                raise RuntimeError(f"the operator did not start\n{self.last_words}")
            time.sleep(0.05)

    def is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(self._health, timeout=2) as answer:
                return int(answer.status) == 200
        except (urllib.error.URLError, OSError):
            return False

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def last_words(self) -> str:
        return self.log[-3000:]

    @property
    def peak_mib(self) -> float:
        """The most memory that it ever had resident."""
        return self._memory("VmHWM")

    @property
    def resident_mib(self) -> float:
        return self._memory("VmRSS")

    @property
    def cpu_seconds(self) -> float:
        """Processor time until now."""
        fields = Path(f"/proc/{self._running.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def _memory(self, name: str) -> float:
        for line in Path(f"/proc/{self._running.pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) / 1024
        raise RuntimeError(f"the operator has ended\n{self.last_words}")

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "it was not started"
        return self._process
