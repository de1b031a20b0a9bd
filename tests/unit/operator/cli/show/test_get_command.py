"""`mlora get`: one task in full, in words."""

from __future__ import annotations

import json

import pytest
import yaml

from mlora_operator.cli import exit_codes
from tests.fixtures.kube_server import KubeServer
from tests.fixtures.spoken import mlora

MOMENT = "2026-01-01T00:00:00Z"


def condition(type_: str, status: str, reason: str, message: str = "") -> dict[str, str]:
    return {
        "type": type_,
        "status": status,
        "reason": reason,
        "message": message,
        "lastTransitionTime": MOMENT,
    }


DROPPED = {
    "rows": 10,
    "used": 8,
    "tokens": 4000,
    "dropped": {"emptyAnswer": 2},
    "firstDropped": {"emptyAnswer": [3, 7]},
}


def lines(out: str) -> dict[str, str]:
    """Text by title; what has none belongs to the one above."""
    found: dict[str, str] = {}
    title = ""
    for line in out.splitlines():
        title = line[:12].strip() or title
        found[title] = f"{found[title]}\n{line[12:]}" if title in found else line[12:]
    return found


def test_the_kinds_of_adapter_objective_and_optimizer_are_said(kube: KubeServer) -> None:
    training = {"objective": {"type": "dpo"}, "optimizer": {"type": "lion"}, "maxSteps": 6}
    lora = {"type": "lora", "rank": 4, "useDora": True, "useRslora": False, "loraplusLrRatio": 16}
    kube.task("a", {"state": "Queued"}, lora=lora, training=training)
    found = lines(mlora("get", "a").out)
    assert found["lora"] == "type lora, rank 4, useDora, loraplusLrRatio 16"
    assert found["training"] == "objective dpo, optimizer lion, maxSteps 6"


def test_a_waiting_task_says_why_and_which_rows_were_dropped(kube: KubeServer) -> None:
    held = [
        condition("Accepted", "True", "Accepted"),
        condition("Admitted", "False", "WaitingForMemory", "2 tasks come first"),
        condition("Failed", "False", "Training"),
    ]
    kube.task("a", {"state": "Queued", "reason": "WaitingForMemory", "data": DROPPED, "conditions": held})
    found = lines(mlora("get", "a").out)
    assert found["name"] == "a in namespace team"
    assert found["state"] == "Queued (WaitingForMemory)"
    assert found["base model"] == "acme/base"
    assert found["lora"] == "rank 8, alpha 16, targetModules q_proj, v_proj"
    assert found["data"].splitlines() == [
        "s3://d/a.jsonl (promptCompletion)",
        "8 of 10 rows are used, 4,000 tokens",
        "dropped as emptyAnswer: 2 (first in line 3, 7)",
    ]
    accepted, admitted = found["conditions"].splitlines()
    assert accepted.startswith("Accepted, for ")
    assert admitted == "not Admitted (WaitingForMemory): 2 tasks come first"
    assert found["adapter"] == "none yet; it will be at s3://adapters/a"


def test_a_format_that_was_detected_is_said(kube: KubeServer) -> None:
    status = {"state": "Training", "data": DROPPED | {"format": "messages"}}
    kube.task("a", status, dataset={"uri": "s3://d/a.jsonl"})
    assert lines(mlora("get", "a").out)["data"].startswith("s3://d/a.jsonl (messages, detected)\n")


def test_a_finished_task_says_where_its_adapter_is_and_how_to_fetch_it(kube: KubeServer) -> None:
    kube.task(
        "a",
        {
            "state": "Succeeded",
            "step": 10,
            "totalSteps": 10,
            "loss": "0.5",
            "conditions": [condition("Succeeded", "True", "AdapterUploaded", "verified")],
            "adapter": {"uri": "s3://adapters/a", "bytes": 1234},
        },
    )
    found = lines(mlora("get", "a").out)
    assert found["progress"] == "step 10 of 10, loss 0.5"
    assert found["adapter"] == "s3://adapters/a, 1,234 bytes"
    assert found["fetch it"] == "mlora fetch a -n team"


def test_a_failed_task_says_why_first(kube: KubeServer) -> None:
    failed = condition("Failed", "True", "InvalidRow", "line 7 has no answer")
    kube.task("a", {"state": "Failed", "reason": "InvalidRow", "conditions": [failed]})
    assert lines(mlora("get", "a").out)["state"] == "Failed (InvalidRow)\nline 7 has no answer"


def test_a_task_that_no_operator_has_seen_says_so(kube: KubeServer) -> None:
    kube.task("a")
    assert "no operator has processed the task yet" in lines(mlora("get", "a").out)["conditions"]


@pytest.mark.parametrize("format", ["json", "yaml"])
def test_one_is_printed_as_itself_and_several_as_a_list(kube: KubeServer, format: str) -> None:
    kube.task("a")
    kube.task("b")
    read = json.loads if format == "json" else yaml.safe_load
    one = read(mlora("get", "a", "-o", format).out)
    assert (one["kind"], one["metadata"]["name"]) == ("LoRATask", "a")
    both = read(mlora("get", "b", "a", "-o", format).out)
    assert [found["metadata"]["name"] for found in both["items"]] == ["b", "a"]


def test_an_unknown_task_ends_with_its_own_code(kube: KubeServer) -> None:
    kube.task("a")
    said = mlora("get", "a", "gone")
    assert (said.code, said.out) == (exit_codes.NOT_FOUND, "")
    assert "no loratask 'gone' in namespace 'team'" in said.err
