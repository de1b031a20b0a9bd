"""The real vLLM on this machine's CPU, and adapters that ``mlora run`` has trained for it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".state" / "consumers" / "vllm" / "bin" / "python"
BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
TOKENS = 40
_START_SECONDS = 600  # on a busy machine; 60 on a quiet one


@dataclass(frozen=True)
class Vllm:
    """``log``: what it has said. ``resolved``: the folder that it looks into for models that it does not know."""

    url: str
    log: Path
    resolved: Path

    def tokens(self, model: str, prompt: Sequence[int]) -> list[int]:
        """What it writes after ``prompt``, the likeliest token each time. Raises HTTPError for a model that it has not."""
        asked = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            made: list[int] = json.loads(answer.read())["choices"][0]["token_ids"]
        return made

    def models(self) -> set[str]:
        with urllib.request.urlopen(f"{self.url}/v1/models", timeout=60) as answer:
            return {one["id"] for one in json.loads(answer.read())["data"]}


@pytest.fixture(scope="session")
def vllm(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    """It runs until all tests have ended. Where it is not installed, or does not start, tests fail."""
    if not PYTHON.exists():
        pytest.fail(f"vLLM is not installed in {PYTHON.parents[1]}: run `make consumers`, or .ci/consumers")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("vllm") / "log"
    resolved = tmp_path_factory.mktemp("resolved")
    command = [
        *(
            str(PYTHON),
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        ),
        *("--model", str(smollm2), "--served-model-name", BASE, "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", "512", "--max-num-seqs", "4"),
        *("--enable-lora", "--max-lora-rank", "64", "--max-loras", "4"),
    ]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_PLUGINS": "lora_filesystem_resolver",
        "VLLM_LORA_RESOLVER_CACHE_DIR": str(resolved),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TMPDIR": str(log.parent),
    }
    with log.open("wb") as output:
        # Its engine is a process of its own: all are ended as one group.
        running = subprocess.Popen(
            command, env=environment, cwd=log.parent, stdout=output, stderr=output, start_new_session=True
        )
    served = Vllm(f"http://127.0.0.1:{port}", log, resolved)
    try:
        _await_start(served, running)
        yield served
    finally:
        running.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.wait(30)
        _end_group(running.pid)
        running.wait(30)


def _await_start(served: Vllm, running: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end and running.poll() is None:
        try:
            served.models()
            return
        except OSError:
            time.sleep(1)
    ended = "did not start in time" if running.poll() is None else f"ended with {running.returncode}"
    pytest.fail(f"vLLM {ended}:\n{served.log.read_text(errors='replace')[-4000:]}")


def _end_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, 9)


def task(name: str, folder: Path, *, rank: int, modules: list[str], seed: int) -> dict[str, Any]:
    return {
        "apiVersion": "mlora.dev/v1alpha1",
        "kind": "LoRATask",
        "metadata": {"name": name},
        "spec": {
            "baseModel": BASE,
            "lora": {"rank": rank, "alpha": 2 * rank, "targetModules": modules},
            "dataset": {
                "uri": (ROOT / "examples" / "gsm8k" / "train.jsonl").as_uri(),
                "format": "promptCompletion",
                "fields": {"prompt": "question", "completion": "answer"},
            },
            "training": {
                "batchSize": 2,
                "maxSteps": 4,
                "learningRate": 0.005,
                "warmupSteps": 1,
                "maxSeqLength": 256,
                "seed": seed,
            },
            "output": {"uri": folder.as_uri()},
        },
    }


@pytest.fixture(scope="session")
def trained(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with adapters, all of one run on two stages. ``by-path`` names its base as the server does in itself: by the
    folder that it was started with.
    """
    folder = tmp_path_factory.mktemp("trained")
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    tasks = [
        task("two-stage", folder / "two-stage", rank=8, modules=attention, seed=1),
        task("rank-48", folder / "rank-48", rank=48, modules=["all-linear"], seed=2),
        task("better", folder / "better", rank=16, modules=attention, seed=3),
        task("figures", folder / "figures", rank=8, modules=attention, seed=4),
        task("dora", folder / "dora", rank=8, modules=attention, seed=5),
        task("vera", folder / "vera", rank=8, modules=attention, seed=6),
        task("by-path", folder / "by-path", rank=8, modules=attention, seed=7),
    ]
    of = {one["metadata"]["name"]: one["spec"] for one in tasks}
    of["figures"]["lora"] |= {
        "alpha": 12.5, "useRslora": True, "rankPattern": {"v_proj": 4}, "alphaPattern": {r".*layers\.[0-9]\..*": 6},
    }  # fmt: skip
    of["dora"]["lora"]["useDora"] = True
    of["vera"]["lora"] = {"type": "vera", "rank": 8, "targetModules": attention}
    of["by-path"]["output"]["baseModelName"] = str(smollm2)
    manifest = folder / "tasks.yaml"
    manifest.write_text(yaml.safe_dump_all(tasks))
    command = [
        *(sys.executable, "-c", "from mlora_operator.cli import main; main()", "run", str(manifest)),
        *("--model", f"{BASE}={smollm2}", "--dtype", "float32", "--stages", "2", "--timeout", "20m"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@dataclass
class Store:
    """Adapters below one prefix, as tasks publish them."""

    folder: Path
    trained: Path

    def publish(self, adapter: str, name: str) -> None:
        """As a worker does: a mark says that an upload is in progress, the former manifest goes, the new one comes last."""
        target = self.folder / name
        target.mkdir(exist_ok=True)
        (target / ".mlora-upload.json").write_text("{}")
        (target / "manifest.json").unlink(missing_ok=True)
        for path in (self.trained / adapter).iterdir():
            if path.is_file() and path.name != "manifest.json":
                shutil.copyfile(path, target / path.name)
        shutil.copyfile(self.trained / adapter / "manifest.json", target / "manifest.json")
        (target / ".mlora-upload.json").unlink()

    def remove(self, name: str) -> None:
        shutil.rmtree(self.folder / name)


@pytest.fixture
def store(trained: Path, tmp_path: Path) -> Store:
    (tmp_path / "store").mkdir()
    return Store(tmp_path / "store", trained)


class Sync:
    """``mlora sync`` as it runs beside the server, and what it has said."""

    def __init__(self, running: subprocess.Popen[str]) -> None:
        self._running = running

    def await_news(self, kind: str, name: str) -> None:
        """Reads on until then; a problem fails the test. The test's own limit ends a wait for what never comes."""
        assert self._running.stdout is not None
        for line in self._running.stdout:
            news = json.loads(line)
            assert news["type"] != "problem", news
            if (news["type"], news["name"]) == (kind, name):
                return
        pytest.fail(f"mlora sync ended before {kind} {name}")


@pytest.fixture
def sync(vllm: Vllm, store: Store, tmp_path: Path) -> Iterator[Sync]:
    command = [
        *(sys.executable, "-c", "from mlora_operator.cli import main; main()"),
        *("sync", store.folder.as_uri(), "-d", str(tmp_path / "shown"), "--server", f"vllm={vllm.url}"),
        *("--every", "1s", "--prune", "-o", "json"),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        try:
            yield Sync(running)
        finally:
            running.terminate()
