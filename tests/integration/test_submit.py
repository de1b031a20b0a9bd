"""`mlora submit` against a real API server. No operator runs: the test writes the statuses that one would."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from typer.testing import CliRunner

from mlora_operator.cli.app import app
from mlora_operator.cli.output import CommandError
from tests.fixtures.cluster import Cluster
from tests.fixtures.kubectl import Kubectl
from tests.fixtures.loratask import loratask
from tests.fixtures.tcp_proxy import TcpProxy

pytestmark = pytest.mark.integration

CRDS = Path(__file__).parents[2] / "crds"


def task(name: str, **spec: Any) -> dict[str, Any]:
    return loratask(
        name,
        {
            "baseModel": "a model that nobody serves",
            "dataset": {"uri": "s3://datasets/a"},
            "output": {"uri": f"s3://adapters/submit/{name}"},
            **spec,
        },
    )


@dataclass
class Bench:
    """A namespace to submit to."""

    kubectl: Kubectl
    folder: Path

    def file(self, *manifests: dict[str, Any]) -> str:
        path = self.folder / "tasks.yaml"
        path.write_text(yaml.safe_dump_all(manifests))
        return str(path)

    def submit(self, *arguments: str) -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        done = CliRunner().invoke(app, ["submit", "-n", str(self.kubectl.namespace), *arguments])
        if isinstance(done.exception, CommandError):  # what the process would print
            return done.exception.exit_code, done.stdout, done.stderr + str(done.exception)
        return done.exit_code, done.stdout, done.stderr

    def get(self, name: str) -> dict[str, Any]:
        return self.kubectl.json("get", "loratask", name)

    def names(self) -> list[str]:
        return [one["metadata"]["name"] for one in self.kubectl.json("get", "loratasks")["items"]]

    def status(self, name: str, *conditions: tuple[str, str, str], **status: Any) -> None:
        """Conditions that are True, each with reason and message."""
        moment = "2026-01-01T00:00:00Z"
        held = [
            {
                "type": type_,
                "status": "True",
                "reason": reason,
                "message": message,
                "lastTransitionTime": moment,
            }
            for type_, reason, message in conditions
        ]
        patch = json.dumps({"status": {"conditions": held, **status}})
        self.kubectl("patch", "loratask", name, "--subresource=status", "--type=merge", "--patch", patch)


@pytest.fixture
def bench(
    cluster: Cluster, kubectl: Kubectl, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Bench:
    kubectl("apply", "--server-side", "--force-conflicts", "--filename", str(CRDS))
    kubectl("wait", "--for=condition=Established", "--timeout=60s", "--filename", str(CRDS))
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    return Bench(kubectl.within(namespace), tmp_path)


def meanwhile(bench: Bench, name: str, what: Callable[[], None]) -> threading.Thread:
    """Does ``what`` once the task is there."""

    def run() -> None:
        end = time.monotonic() + 60
        while name not in bench.names() and time.monotonic() < end:
            time.sleep(0.2)
        what()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_tasks_are_followed_to_their_end_in_lines_without_colour(bench: Bench) -> None:
    def train() -> None:
        bench.status(
            "a", ("Accepted", "Accepted", "served by p"), state="Training", step=3, totalSteps=12, loss="1.5"
        )
        bench.status("b", ("Succeeded", "AdapterUploaded", ""), state="Succeeded")
        done = ("Succeeded", "AdapterUploaded", "")
        bench.status(
            "a",
            done,
            state="Succeeded",
            step=12,
            totalSteps=12,
            adapter={"uri": "s3://x/a", "sha256": "0" * 64, "bytes": 1},
        )

    rows = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "rows"}, "data": {"a": "b"}}
    thread = meanwhile(bench, "b", train)
    code, output, errors = bench.submit("-f", bench.file(task("a", priority=3), rows, task("b")), "--wait")
    thread.join()
    assert (code, errors) == (0, "")
    lines = output.splitlines()
    assert lines[:3] == ["configmap/rows applied", "loratask/a created", "loratask/b created"]
    assert lines[-2:] == ["a: succeeded, s3://x/a", "b: succeeded, s3://adapters/submit/b"]
    told = [line.split(" ", 1)[1] for line in lines[3:-2]]
    assert "a  step 12/12, loss 1.5" in told
    assert {"a  Succeeded (AdapterUploaded)", "b  Succeeded (AdapterUploaded)"} <= set(told)
    assert "\x1b" not in output
    assert bench.get("a")["spec"]["priority"] == 3
    assert bench.kubectl.json("get", "configmap", "rows")["data"] == {"a": "b"}


def test_a_failure_is_told_with_its_last_words_and_events(bench: Bench) -> None:
    bench.kubectl.apply(task("a"), task("b"))
    uid = bench.get("a")["metadata"]["uid"]
    event = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": "e"},
        "involvedObject": {"kind": "LoRATask", "name": "a", "namespace": bench.kubectl.namespace, "uid": uid},
        "type": "Warning",
        "reason": "Restarting",
        "message": "pod p-0 was killed",
    }
    bench.kubectl.create(event)
    bench.status("a", ("Failed", "InvalidRow", "first words\nline 3: no answer"), state="Failed")
    bench.status("b", ("Succeeded", "AdapterUploaded", ""), state="Succeeded")
    code, output, errors = bench.submit("-f", bench.file(task("a"), task("b")), "--wait")
    assert code == 1
    assert "b: succeeded" in output
    assert errors.splitlines() == [
        "a failed: InvalidRow",
        "  first words",
        "  line 3: no answer",
        "  Restarting: pod p-0 was killed",
    ]


def test_programs_read_an_object_a_line(bench: Bench) -> None:
    thread = meanwhile(bench, "a", lambda: bench.status("a", ("Failed", "InvalidRow", "x"), state="Failed"))
    code, output, _ = bench.submit("-f", bench.file(task("a")), "--wait", "-o", "json")
    thread.join()
    said = [json.loads(line) for line in output.splitlines()]
    assert [one["type"] for one in said] == ["submitted", "condition", "end"]
    assert said[0]["uid"] == bench.get("a")["metadata"]["uid"]
    assert (code, said[-1]["exitCode"]) == (1, 1)
    (end,) = said[-1]["tasks"]
    assert (end["name"], end["result"], end["reason"]) == ("a", "Failed", "InvalidRow")


def test_the_same_command_again_trains_nothing_twice(bench: Bench) -> None:
    file = bench.file(task("a"))
    assert bench.submit("-f", file)[0] == 0
    bench.status("a", ("Succeeded", "AdapterUploaded", ""), state="Succeeded")
    before = bench.get("a")["metadata"]
    code, output, _ = bench.submit("-f", file, "--wait", "--timeout", "1m")
    assert (code, output.splitlines()[0]) == (0, "loratask/a unchanged")
    after = bench.get("a")["metadata"]
    assert (after["uid"], after["resourceVersion"]) == (before["uid"], before["resourceVersion"])


def test_a_name_that_is_taken_by_another_spec_is_refused_or_replaced(bench: Bench) -> None:
    bench.kubectl.apply(task("a"))
    former = bench.get("a")["metadata"]["uid"]
    file = bench.file(task("new"), task("a", lora={"rank": 4}))
    code, _, errors = bench.submit("-f", file)
    assert code == 7
    assert "spec.lora.rank is 16 in the cluster and 4 in the file" in errors
    assert bench.names() == ["a"]

    code, output, _ = bench.submit("-f", file, "--replace")
    assert (code, output.splitlines()) == (0, ["loratask/new created", "loratask/a replaced"])
    assert bench.get("a")["metadata"]["uid"] != former
    assert bench.get("a")["spec"]["lora"]["rank"] == 4

    code, output, _ = bench.submit("-f", file, "--name-suffix", "r2")
    assert (code, sorted(bench.names())) == (0, ["a", "a-r2", "new", "new-r2"])
    assert bench.get("a-r2")["spec"]["output"]["uri"] == "s3://adapters/submit/a-r2"


def test_what_may_change_is_changed_in_place(bench: Bench) -> None:
    bench.kubectl.apply(task("a", suspend=True))
    uid = bench.get("a")["metadata"]["uid"]
    code, output, _ = bench.submit("-f", bench.file(task("a", priority=7)))
    assert (code, output.splitlines()) == (0, ["loratask/a applied"])
    now = bench.get("a")
    assert (now["metadata"]["uid"], now["spec"]["priority"]) == (uid, 7)


def test_what_the_api_server_refuses_is_refused_before_anything_is_written(bench: Bench) -> None:
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "few"},
        "spec": {"hard": {"count/configmaps": "0"}},
    }
    bench.kubectl.apply(quota)
    # The quota counts at once, but its controller sets the figures first.
    bench.kubectl(
        "wait", "--for=jsonpath={.status.hard.count/configmaps}=0", "--timeout=30s", "resourcequota/few"
    )
    rows = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "rows"}, "data": {"a": "b"}}
    code, _, errors = bench.submit("-f", bench.file(rows, task("a")))
    assert (code, "configmap/rows" in errors, "exceeded quota" in errors) == (7, True, True)
    assert bench.names() == []

    unknown = {"apiVersion": "nowhere.dev/v1", "kind": "Thing", "metadata": {"name": "x"}}
    code, _, errors = bench.submit("-f", bench.file(task("a"), unknown))
    assert (code, "the cluster has no Thing in nowhere.dev/v1" in errors) == (5, True)
    code, _, errors = bench.submit("-f", bench.file(task("a", lora={"rank": 0})))
    assert (code, "spec.lora.rank" in errors, bench.names()) == (2, True, [])


def test_a_task_that_the_operator_rejects_is_given_up(bench: Bench) -> None:
    bench.kubectl.apply(task("a"))
    bench.status("a", state="Rejected", reason="NoPipelineForModel")
    code, _, errors = bench.submit("-f", bench.file(task("a")), "--wait", "--refused-after", "1s")
    assert (code, errors.splitlines()[0]) == (7, "a is rejected: NoPipelineForModel")


@pytest.mark.parametrize(("leave", "suspended"), [("keep", False), ("suspend", True), ("delete", None)])
def test_a_timeout_leaves_the_tasks_as_asked(bench: Bench, leave: str, suspended: bool | None) -> None:
    bench.kubectl.apply(task("done"))
    bench.status("done", ("Succeeded", "AdapterUploaded", ""), state="Succeeded")
    file = bench.file(task("a"), task("done"))
    code, _, errors = bench.submit("-f", file, "--wait", "--timeout", "2s", "--on-timeout", leave)
    assert code == 3
    assert "not all tasks finished within 2 seconds" in errors
    assert not bench.get("done")["spec"]["suspend"]
    if suspended is None:
        assert bench.names() == ["done"]
    else:
        assert bench.get("a")["spec"]["suspend"] is suspended


def test_an_interrupt_leaves_the_tasks_as_asked(bench: Bench) -> None:
    program = [sys.executable, "-c", "from mlora_operator.cli import main; main()"]
    arguments = ["submit", "-n", str(bench.kubectl.namespace), "-f", bench.file(task("a")), "--wait"]
    with subprocess.Popen(
        [*program, *arguments, "--on-timeout", "suspend"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ},
    ) as process:
        meanwhile(bench, "a", lambda: None).join()
        time.sleep(2)  # the command waits now
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted; suspended: a" in errors
    assert bench.get("a")["spec"]["suspend"] is True


@pytest.fixture
def proxy(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Iterator[TcpProxy]:
    """Between the command and the API server. kubectl goes straight."""
    config = yaml.safe_load(Path(os.environ["KUBECONFIG"]).read_text())
    cluster = config["clusters"][0]["cluster"]
    server = urlsplit(cluster["server"])
    proxy = TcpProxy((str(server.hostname), server.port or 443))
    cluster |= {"server": f"https://127.0.0.1:{proxy.port}", "tls-server-name": server.hostname}
    (bench.folder / "through-proxy").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(bench.folder / "through-proxy"))
    yield proxy
    proxy.down()


def test_a_wait_outlives_cut_connections_and_an_api_server_that_is_away(
    bench: Bench, proxy: TcpProxy
) -> None:
    def trouble() -> None:
        bench.status("a", ("Accepted", "Accepted", "served by p"), state="Queued")
        for _ in range(3):
            before = proxy.connections
            proxy.cut()
            end = time.monotonic() + 30
            while proxy.connections == before and time.monotonic() < end:
                time.sleep(0.1)
        proxy.down()
        bench.status("a", ("Running", "Training", ""), state="Training", step=3, totalSteps=4)
        time.sleep(2)
        proxy.up()
        bench.status("a", ("Succeeded", "AdapterUploaded", ""), state="Succeeded", step=4, totalSteps=4)

    thread = meanwhile(bench, "a", trouble)
    code, output, errors = bench.submit("-f", bench.file(task("a")), "--wait", "--timeout", "2m")
    thread.join()
    assert (code, errors) == (0, "")
    assert "a  Succeeded (AdapterUploaded)" in output
    assert proxy.connections > 3


def test_a_cluster_that_is_away_from_the_start_is_given_up_soon(bench: Bench, proxy: TcpProxy) -> None:
    proxy.down()
    start = time.monotonic()
    code, _, errors = bench.submit("-f", bench.file(task("a")), "--wait", "--timeout", "10m")
    assert (code, "the cluster does not answer" in errors) == (4, True)
    assert time.monotonic() - start < 60


def test_a_task_that_someone_deletes_ends_the_wait(bench: Bench) -> None:
    thread = meanwhile(bench, "a", lambda: bench.kubectl("delete", "loratask", "a", "--wait=false") and None)
    code, _, errors = bench.submit("-f", bench.file(task("a")), "--wait")
    thread.join()
    assert (code, "a: was deleted by someone else" in errors) == (5, True)


@pytest.fixture
def pipelines_account(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kubectl:
    """KUBECONFIG is that of the account in examples/ci/rbac.yaml; returned is the administrator's kubectl."""
    inside = bench.kubectl
    example = (CRDS.parent / "examples" / "ci" / "rbac.yaml").read_text()
    inside("apply", "--filename", "-", stdin=example.replace("team-a", str(inside.namespace)))
    config = yaml.safe_load(Path(os.environ["KUBECONFIG"]).read_text())
    config["users"][0]["user"] = {"token": inside("create", "token", "adapter-ci").strip()}
    (tmp_path / "adapter-ci").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "adapter-ci"))
    return inside


@pytest.mark.usefixtures("pipelines_account")
def test_the_example_account_may_do_all_that_submit_does(bench: Bench) -> None:
    file = bench.file(task("a"))
    thread = meanwhile(bench, "a", lambda: bench.status("a", ("Failed", "InvalidRow", "x"), state="Failed"))
    code, _, errors = bench.submit("-f", file, "--wait", "--timeout", "1m")
    thread.join()
    assert (code, errors.splitlines()[0]) == (1, "a failed: InvalidRow")
    wait = ("--wait", "--timeout", "1s", "--on-timeout")
    assert bench.submit("-f", file, "--replace", *wait, "suspend")[0] == 3
    assert bench.submit("-f", file, *wait, "delete")[0] == 3
    assert bench.names() == []


def test_an_account_without_a_right_is_told_which(bench: Bench, pipelines_account: Kubectl) -> None:
    looks = json.dumps([{"op": "replace", "path": "/rules/0/verbs", "value": ["get", "list", "watch"]}])
    pipelines_account("patch", "role", "adapter-ci", "--type=json", "--patch", looks)
    code, _, errors = bench.submit("-f", bench.file(task("a")))
    assert code == 4
    assert "cannot patch resource" in errors
    assert bench.names() == []
