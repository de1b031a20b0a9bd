"""``make demo-local``: three adapters trained together on this machine, without a cluster.

Starts an object store on the loopback address, puts the rows there, lets ``mlora run`` train the quick start's tasks on
two local ranks, fetches the adapters and compares them with the base model through Hugging Face PEFT.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from examples.compare import compare
from examples.model.smollm2 import smollm2
from examples.table import Trained, print_table, verdict, wide_console
from tests.cluster import s3 as seaweedfs
from tests.cluster.environment import program_of_environment
from tests.fixtures.storage import connect

EXAMPLES = Path(__file__).parent
MANIFEST = EXAMPLES / "quickstart.yaml"
BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
STAGES = 2
HELDOUT_ROWS = 6


def main() -> int:
    console, began = wide_console(), time.monotonic()
    console.print(
        "[bold]1[/] base model: SmolLM2-135M-Instruct as safetensors (about half a minute the first time)"
    )
    model = smollm2()
    with tempfile.TemporaryDirectory(prefix="mlora-demo-") as folder:
        work = Path(folder)
        console.print("[bold]2[/] object store: SeaweedFS on the loopback address, rows uploaded")
        with seaweedfs.serve(program_of_environment("weed"), work / "s3") as access:
            store = connect(access)
            store.client.upload_file(str(EXAMPLES / "gsm8k/train.jsonl"), "datasets", "gsm8k/train.jsonl")
            secret = work / "secret.yaml"
            secret.write_text(yaml.safe_dump(secret_manifest(access)))
            console.print(f"[bold]3[/] mlora run: three tasks at once on {STAGES} stages")
            mlora = [str(Path(sys.executable).with_name("mlora"))]
            run = [
                *(
                    "run",
                    str(MANIFEST),
                    str(secret),
                    "--model",
                    f"{BASE_MODEL}={model}",
                    "--dtype",
                    "float32",
                ),
                *("--stages", str(STAGES), "--s3-endpoint", access.endpoint, "--state", str(work / "state")),
                *("--timeout", "900"),
            ]
            trained = subprocess.run([*mlora, *run], check=False)
            if trained.returncode:
                console.print(f"[red]mlora run ended with {trained.returncode}[/]; logs of the ranks:")
                for log in sorted((work / "state").rglob("*.log")):
                    console.print(f"--- {log.name}\n{log.read_text()[-3000:]}", markup=False)
                return 1
            training_seconds = time.monotonic() - began
            console.print("[bold]4[/] mlora fetch: adapters downloaded and verified")
            keys = {"AWS_ACCESS_KEY_ID": access.access_key, "AWS_SECRET_ACCESS_KEY": access.secret_key}
            statuses = read_statuses(work / "state", "loratasks")
            for task in statuses:
                name = task["metadata"]["name"]
                subprocess.run(
                    [
                        *mlora,
                        "fetch",
                        task["spec"]["output"]["uri"],
                        "-d",
                        str(work / name),
                        "--endpoint",
                        access.endpoint,
                    ],
                    check=True,
                    env={**os.environ, **keys},
                )
        console.print("[bold]5[/] PEFT: held-out loss with and without each adapter")
        tasks = [trained_from(task) for task in statuses]
        comparison = compare(
            model,
            {task.name: work / task.name for task in tasks},
            EXAMPLES / "gsm8k/heldout.jsonl",
            HELDOUT_ROWS,
        )
        [pipeline] = read_statuses(work / "state", "lorapipelines")
        print_table(
            console, tasks, comparison, pipeline_facts(pipeline, time.monotonic() - began, training_seconds)
        )
    problems = verdict(comparison)
    for problem in problems:
        console.print(f"[red]{problem}[/]")
    return 1 if problems else 0


def secret_manifest(access: seaweedfs.Access) -> dict[str, Any]:
    """The Secret that the tasks name, for any namespace."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "s3-credentials"},
        "stringData": {"AWS_ACCESS_KEY_ID": access.access_key, "AWS_SECRET_ACCESS_KEY": access.secret_key},
    }


def read_statuses(state: Path, plural: str) -> list[dict[str, Any]]:
    """The objects as ``mlora run --state`` leaves them."""
    return [yaml.safe_load(path.read_text()) for path in sorted((state / plural).glob("*.yaml"))]


def trained_from(task: dict[str, Any]) -> Trained:
    """What the table says of a LoRATask."""
    spec, status = task["spec"], task["status"]
    return Trained(
        name=task["metadata"]["name"],
        rank=spec["lora"]["rank"],
        modules=", ".join(name.removesuffix("_proj") for name in spec["lora"]["targetModules"]),
        priority=spec.get("priority", 0),
        steps=status["progress"],
        tokens_per_second=status["tokensPerSecond"],
    )


def pipeline_facts(pipeline: dict[str, Any], seconds: float, until_trained: float) -> dict[str, str]:
    """The figures of the whole run from a LoRAPipeline's status."""
    status = pipeline["status"]
    stages, wire, hidden = status["stages"], status["wire"], status["facts"]["hiddenSize"]
    formula = 2 * (len(stages) - 1) * wire["tokens"] * hidden * status["facts"]["dtypeBytes"]
    layers = ", ".join(f"layers {stage['firstLayer']} to {stage['lastLayer']}" for stage in stages)
    return {
        "stages": f"{len(stages)} ({layers})",
        "tasks in the pipeline at once": str(wire["concurrentTasks"]),
        "tokens trained": f"{wire['tokens']} in {wire['microbatches']} microbatches",
        "bytes between stages": f"{wire['payloadBytes']:,} = {wire['payloadBytes'] / formula:.3f} of "
        f"2 (D-1) tokens x hidden x bytes; descriptors from rank 0: {wire['descriptorBytes']:,}",
        "time": f"{seconds:.0f} s, of which {until_trained:.0f} s until the last adapter was uploaded",
    }


if __name__ == "__main__":
    raise SystemExit(main())
