"""`mlora watch` and `mlora fetch` against a real API server and a real object store."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import boto3
import pytest
from typer.testing import CliRunner

from mlora_operator.cli.app import app
from mlora_operator.cli.output import CommandError
from mlora_operator.download import Access, open_source
from tests.fixtures.cluster import Cluster
from tests.fixtures.kubectl import Kubectl
from tests.fixtures.loratask import loratask
from tests.fixtures.storage import Storage

pytestmark = pytest.mark.integration

CRDS = Path(__file__).parents[2] / "crds"


def task(name: str, **spec: Any) -> dict[str, Any]:
    return loratask(
        name,
        {
            "baseModel": "a model that nobody serves",
            "dataset": {"uri": "s3://datasets/a"},
            "output": {"uri": f"s3://adapters/cli/{name}"},
            "suspend": True,
            **spec,
        },
    )


@pytest.fixture
def inside(kubectl: Kubectl, namespace: str) -> Kubectl:
    """kubectl in this test's namespace, with the CRDs there."""
    kubectl("apply", "--server-side", "--force-conflicts", "--filename", str(CRDS))
    kubectl("wait", "--for=condition=Established", "--timeout=60s", "--filename", str(CRDS))
    return kubectl.within(namespace)


def set_status(kubectl: Kubectl, name: str, type_: str | None = None, **status: Any) -> None:
    if type_ is not None:
        moment = "2026-01-01T00:00:00Z"
        held = {"type": type_, "status": "True", "reason": f"Why{type_}", "message": f"message of {type_}"}
        status["conditions"] = [held | {"observedGeneration": 1, "lastTransitionTime": moment}]
        status.setdefault("state", type_)
    patch = json.dumps({"status": status})
    kubectl("patch", "loratask", name, "--subresource=status", "--type=merge", "--patch", patch)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from mlora_operator.cli import main; main()", *arguments]


def mlora(cluster: Cluster, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """What a finished `mlora` process would have said; in this process, since each new one loads much."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"KUBECONFIG": str(cluster.kubeconfig), **environment}.items():
            patch.setenv(name, value)
        done = CliRunner().invoke(app, arguments)
    code, errors = done.exit_code, done.stderr
    if isinstance(done.exception, CommandError):
        code, errors = done.exception.exit_code, f"{errors}error: {done.exception}\n"
    return subprocess.CompletedProcess(arguments, code, done.stdout, errors)


def test_watch_tells_each_change_and_ends_when_all_have_finished(cluster: Cluster, inside: Kubectl) -> None:
    inside.apply(task("a", priority=3), task("b"))
    arguments = ("watch", "-n", str(inside.namespace), "--output", "json", "--timeout", "60")
    environment = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig)}
    with subprocess.Popen(command(*arguments), env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = [json.loads(process.stdout.readline()) for _ in range(2)]
        assert {one["name"]: one["priority"] for one in first} == {"a": 3, "b": 0}
        set_status(inside, "a", state="Training", step=3, totalSteps=12, loss="1.5", tokensPerSecond="99")
        seen = json.loads(process.stdout.readline())
        assert (seen["name"], seen["state"], seen["step"], seen["loss"]) == ("a", "Training", 3, "1.5")
        set_status(inside, "a", "Succeeded")
        set_status(inside, "b", "Succeeded")
        rest = [json.loads(line) for line in process.stdout]
    assert process.returncode == 0
    assert {one["name"] for one in rest if one["succeeded"]} == {"a", "b"}


def test_watch_ends_with_1_when_a_task_failed_and_says_why(cluster: Cluster, inside: Kubectl) -> None:
    inside.apply(task("a"), task("b"), task("c"))
    set_status(inside, "a", "Succeeded")
    set_status(inside, "b", "Failed")
    done = mlora(cluster, "watch", "a", "b", "-n", str(inside.namespace), "--timeout", "60")
    assert done.returncode == 1
    assert "b: WhyFailed: message of Failed" in done.stderr
    assert "c " not in done.stdout


@pytest.mark.parametrize(("arguments", "code"), [(["a", "--timeout", "1"], 3), (["nobody"], 5), ([], 3)])
def test_watch_has_an_exit_code_for_each_other_end(
    cluster: Cluster, inside: Kubectl, arguments: list[str], code: int
) -> None:
    inside.apply(task("a"))
    done = mlora(cluster, "watch", "-n", str(inside.namespace), *(arguments or ["--timeout", "1"]))
    assert done.returncode == code
    assert done.stderr.startswith("error: ")


def test_watch_says_when_a_task_is_deleted(cluster: Cluster, inside: Kubectl) -> None:
    inside.apply(task("a"))
    environment = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig)}
    arguments = ("watch", "a", "-n", str(inside.namespace), "--output", "json", "--timeout", "60")
    with subprocess.Popen(
        command(*arguments),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        inside("delete", "loratask", "a", "--wait=false")
        process.wait(60)
    assert process.returncode == 5


def test_a_cluster_that_is_not_there_has_its_own_exit_code(cluster: Cluster, tmp_path: Path) -> None:
    missing = mlora(cluster, "watch", KUBECONFIG=str(tmp_path / "none"))
    assert (missing.returncode, "no kubeconfig at" in missing.stderr) == (4, True)
    dead = tmp_path / "dead"
    dead.write_text(re.sub(r"https://[0-9.:]+", "https://127.0.0.1:1", cluster.kubeconfig.read_text()))
    refused = mlora(cluster, "fetch", "a", KUBECONFIG=str(dead))
    assert (refused.returncode, "the cluster does not answer" in refused.stderr) == (4, True)


@pytest.fixture
def adapter(s3: Storage, inside: Kubectl) -> str:
    """The name of a task whose adapter lies in the store, with the Secret of its keys."""
    keys = {"AWS_ACCESS_KEY_ID": s3.access_key, "AWS_SECRET_ACCESS_KEY": s3.secret_key}
    inside.apply(
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": keys},
        task(
            "a",
            output={"uri": f"s3://adapters/cli/{inside.namespace}"},
            storage={"endpoint": s3.inside, "secretRef": {"name": "keys"}},
        ),
    )
    uid = inside.json("get", "loratask", "a")["metadata"]["uid"]
    publish(s3, f"cli/{inside.namespace}", uid)
    return "a"


def publish(s3: Storage, prefix: str, uid: str, content: bytes = b"weights") -> None:
    files = {"adapter_model.safetensors": content, "adapter_config.json": b"{}"}
    manifest = {
        "taskUid": uid,
        "namespace": "n",
        "name": "a",
        "fingerprint": "f",
        "baseModel": "m",
        "step": 1,
        "loss": 1.5,
        "files": [
            {"name": name, "bytes": len(written), "sha256": hashlib.sha256(written).hexdigest()}
            for name, written in files.items()
        ],
    }
    for name, written in files.items():
        s3.client.put_object(Bucket="adapters", Key=f"{prefix}/{name}", Body=written)
    s3.client.put_object(Bucket="adapters", Key=f"{prefix}/manifest.json", Body=json.dumps(manifest).encode())


def fetch(
    cluster: Cluster, s3: Storage, inside: Kubectl, what: str, target: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    arguments = ("fetch", what, "-n", str(inside.namespace), "-d", str(target), "--endpoint", s3.endpoint)
    return mlora(cluster, *arguments, **environment)


def test_fetch_by_name_takes_address_and_keys_from_the_cluster(
    cluster: Cluster, s3: Storage, inside: Kubectl, adapter: str, tmp_path: Path
) -> None:
    early = fetch(cluster, s3, inside, adapter, tmp_path / "got")
    assert (early.returncode, "has no adapter yet" in early.stderr) == (5, True)

    uri = f"s3://adapters/cli/{inside.namespace}"
    set_status(inside, adapter, "Succeeded", adapter={"uri": uri, "sha256": "0" * 64, "bytes": 7})
    done = fetch(cluster, s3, inside, adapter, tmp_path / "got")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "got" / "adapter_model.safetensors").read_bytes() == b"weights"

    publish(s3, f"cli/{inside.namespace}", "another task's uid")
    other = fetch(cluster, s3, inside, adapter, tmp_path / "got")
    assert (other.returncode, "of another task" in other.stderr) == (5, True)

    inside("delete", "secret", "keys")
    lost = fetch(cluster, s3, inside, adapter, tmp_path / "got")
    assert (lost.returncode, "secret/keys cannot be read" in lost.stderr) == (4, True)
    assert (tmp_path / "got" / "adapter_model.safetensors").read_bytes() == b"weights"


def test_fetch_by_address_takes_the_keys_from_the_environment(
    cluster: Cluster, s3: Storage, inside: Kubectl, tmp_path: Path
) -> None:
    publish(s3, f"cli/{inside.namespace}", "uid")
    uri = f"s3://adapters/cli/{inside.namespace}"
    good = {"AWS_ACCESS_KEY_ID": s3.access_key, "AWS_SECRET_ACCESS_KEY": s3.secret_key}
    done = fetch(cluster, s3, inside, uri, tmp_path / "got", **good)
    assert done.returncode == 0, done.stderr

    wrong = fetch(cluster, s3, inside, uri, tmp_path / "no", **(good | {"AWS_SECRET_ACCESS_KEY": "wrong"}))
    assert (wrong.returncode, "refuses" in wrong.stderr) == (4, True)
    absent = fetch(cluster, s3, inside, "s3://adapters/cli/nothing", tmp_path / "no", **good)
    assert (absent.returncode, "no finished adapter" in absent.stderr) == (5, True)
    assert not (tmp_path / "no").exists()


# All of boto3, and nothing else.
BOTO3 = ("boto3", "botocore", "s3transfer", "jmespath", "urllib3", "dateutil", "six.py")


@pytest.fixture
def bare(tmp_path: Path) -> list[str]:
    """`mlora` by an interpreter that has the standard library, boto3 and this project's code."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for name in BOTO3:
        (packages / name).symlink_to(Path(boto3.__file__).parents[1] / name)
    paths = [str(packages), *(str(CRDS.parent / house) for house in ("operator", "worker"))]
    code = f"import sys; sys.path[:0] = {paths!r}; from mlora_operator.cli import main; main()"
    return [sys.executable, "-S", "-I", "-c", code]


def test_fetch_by_address_needs_boto3_alone(bare: list[str], s3: Storage, tmp_path: Path) -> None:
    prefix = f"cli/{uuid.uuid4()}"
    publish(s3, prefix, "uid", b"w" * 3_000_000)
    # As the AWS tools read it: neither keys nor the endpoint need an option.
    environment = {
        "AWS_ACCESS_KEY_ID": s3.access_key,
        "AWS_SECRET_ACCESS_KEY": s3.secret_key,
        "AWS_ENDPOINT_URL": s3.endpoint,
    }
    arguments = [
        *bare,
        "fetch",
        f"s3://adapters/{prefix}",
        "-d",
        str(tmp_path / "got"),
        "--wait",
        "--timeout",
        "20s",
    ]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "got" / "adapter_model.safetensors").stat().st_size == 3_000_000


def test_fetch_goes_on_with_a_part_of_an_object(s3: Storage) -> None:
    prefix = f"cli/{uuid.uuid4()}"
    publish(s3, prefix, "uid", bytes(range(256)) * 10_000)
    access = Access(s3.endpoint, None, s3.access_key, s3.secret_key)
    source = open_source(f"s3://adapters/{prefix}", access)
    rest = b"".join(source.read("adapter_model.safetensors", 1_234_567))
    assert rest == (bytes(range(256)) * 10_000)[1_234_567:]


def test_fetch_by_name_waits_for_the_task(
    cluster: Cluster, s3: Storage, inside: Kubectl, adapter: str, tmp_path: Path
) -> None:
    target = str(tmp_path / "got")
    arguments = (
        "fetch",
        adapter,
        "-n",
        str(inside.namespace),
        "-d",
        target,
        "--endpoint",
        s3.endpoint,
        "--wait",
    )
    environment = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig)}
    with subprocess.Popen(command(*arguments), env=environment, stdout=subprocess.PIPE, text=True) as process:
        uri = f"s3://adapters/cli/{inside.namespace}"
        set_status(inside, adapter, "Succeeded", adapter={"uri": uri, "sha256": "0" * 64, "bytes": 7})
        output, _ = process.communicate(timeout=60)
    assert (process.returncode, "verified" in output) == (0, True)

    set_status(inside, adapter, "Failed")
    failed = mlora(cluster, *arguments)
    assert (failed.returncode, "WhyFailed: message of Failed" in failed.stderr) == (1, True)
    set_status(inside, adapter, "Running")
    late = mlora(cluster, *arguments, "--timeout", "1s")
    assert (late.returncode, "had not finished after 1 seconds" in late.stderr) == (3, True)
