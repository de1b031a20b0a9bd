"""The ready examples for serving an adapter: the manifests fit the task of the other examples, and the program runs."""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.serving import generate
from mlora_operator.cli.fetch.command import parser as fetch_parser
from mlora_operator.cli.sync.command import parser as sync_parser

EXAMPLES = Path(__file__).parents[3] / "examples"
SERVING = EXAMPLES / "serving"


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((SERVING / name).read_text()))


@pytest.mark.parametrize("name", ["vllm.yaml", "lorax.yaml"])
def test_what_is_fetched_and_served_is_what_the_example_trains(name: str) -> None:
    task = yaml.safe_load((EXAMPLES / "ci" / "task.yaml").read_text())["spec"]
    deployment, service = documents(name)
    pod = deployment["spec"]["template"]["spec"]
    (fetch,), (server,) = pod["initContainers"], pod["containers"]
    fetched = fetch_parser().parse_args(fetch["command"][2:])
    assert fetch["command"][:2] == ["mlora", "fetch"]
    assert fetched.what == task["output"]["uri"]
    words = [*server.get("command", ()), *server["args"]]
    assert task["baseModel"] in words
    if name == "vllm.yaml":
        assert f"--max-lora-rank={task['lora']['rank']}" in words
        assert f"support-bot={fetched.output_dir}" in words
    else:
        assert f'"adapter_id": "{fetched.output_dir}"' in (SERVING / name).read_text()
    environment = {one["name"]: one for one in fetch["env"]}
    assert environment["AWS_ENDPOINT_URL"]["value"] == task["storage"]["endpoint"]
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        reference = environment[key]["valueFrom"]["secretKeyRef"]
        assert reference == {"name": task["storage"]["secretRef"]["name"], "key": key}
    (mount,), (served,) = fetch["volumeMounts"], server["volumeMounts"]
    assert (served["name"], served["mountPath"], served["readOnly"]) == (
        mount["name"],
        mount["mountPath"],
        True,
    )
    assert str(fetched.output_dir).startswith(mount["mountPath"] + "/")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert labels == deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    assert service["spec"]["ports"][0]["targetPort"] in {port["name"] for port in server["ports"]}


def test_a_sidecar_brings_what_the_example_trains_to_the_server_beside_it() -> None:
    task = yaml.safe_load((EXAMPLES / "ci" / "task.yaml").read_text())["spec"]
    deployment, service = documents("sync.yaml")
    pod = deployment["spec"]["template"]["spec"]
    sync, server = pod["containers"]
    assert sync["command"][:2] == ["mlora", "sync"]
    options = sync_parser().parse_intermixed_args([*sync["command"][2:], *sync["args"]])
    assert options.uris == [task["output"]["uri"].rpartition("/")[0]]
    assert options.base_model == task["baseModel"]
    assert task["baseModel"] in server["command"]
    assert f"--max-lora-rank={task['lora']['rank']}" in server["args"][1]
    (port,) = server["ports"]
    assert options.servers == [f"vllm=http://127.0.0.1:{port['containerPort']}"]
    assert {"name": "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "value": "True"} in server["env"]
    (mount,), (served,) = sync["volumeMounts"], server["volumeMounts"]
    assert mount["mountPath"] == served["mountPath"] == str(options.output_dir)
    assert served["readOnly"]
    assert {one["name"]: one.get("value") for one in sync["env"]}["AWS_ENDPOINT_URL"] == task["storage"][
        "endpoint"
    ]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert labels == deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]


@pytest.fixture(scope="module")
def adapter(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As a task leaves it, with weights that change what the base says."""
    folder = tmp_path_factory.mktemp("adapter")
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(base, config).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }} The answer is")
    files = [
        {"name": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in sorted(folder.iterdir())
    ]
    (folder / "manifest.json").write_text(json.dumps({"files": files}))
    return folder


def test_the_program_answers_with_the_adapter_and_its_template(tiny_model: Path, adapter: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_model)
    prompt = tokenizer(
        "How many clips? The answer is", return_tensors="pt", add_special_tokens=False
    ).input_ids
    model: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), adapter)
    made = model.merge_and_unload().generate(input_ids=prompt, max_new_tokens=8, do_sample=False)
    expected = tokenizer.decode(made[0, prompt.shape[1] :], skip_special_tokens=True).strip()
    assert expected
    assert generate.answer(tiny_model, adapter, "How many clips?", 8) == expected


def test_an_adapter_that_came_in_damaged_is_not_used(tiny_model: Path, adapter: Path, tmp_path: Path) -> None:
    for file in adapter.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with (tmp_path / "adapter_model.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(ValueError, match=r"adapter_model.safetensors is not what the manifest says"):
        generate.answer(tiny_model, tmp_path, "x")


def test_the_program_needs_nothing_of_this_project() -> None:
    tree = ast.parse((SERVING / "generate.py").read_text())
    found = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [one.name for one in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert found - sys.stdlib_module_names == {"torch", "transformers", "peft"}
