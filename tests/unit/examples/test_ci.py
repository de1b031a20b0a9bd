"""The ready examples for CI systems: each file is what its reader takes, each command is one that there is."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema
from jsonschema import Draft7Validator

from mlora_operator.cli.app import app
from mlora_operator.cli.fetch.command import parser as fetch_parser
from mlora_operator.local.documents import parse
from mlora_operator.local.manifests import read_manifests

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
CI = EXAMPLES / "ci"
PAGE = ROOT / "docs" / "users" / "ci.md"
MANIFESTS = sorted(file for folder in ("ci", "argocd") for file in (EXAMPLES / folder).glob("*.yaml"))


def documents(name: str) -> list[Any]:
    return [document.value for document in parse((CI / name).read_text())]


@pytest.mark.parametrize(
    ("file", "schemas"),
    [
        ("github-actions.yaml", ["vendor.github-workflows", "custom.github-workflows-require-timeout"]),
        ("gitlab-ci.yaml", ["vendor.gitlab-ci"]),
    ],
)
def test_the_ci_systems_own_schema_takes_the_file(file: str, schemas: list[str]) -> None:
    content = yaml.load((CI / file).read_text(), _Yaml12)
    for schema in schemas:
        problems = Draft7Validator(get_builtin_schema(schema)).iter_errors(content)
        assert [f"{problem.json_path}: {problem.message[:300]}" for problem in problems] == []


class _Yaml12(yaml.SafeLoader):
    """Without YAML 1.1's yes and on, as those systems read their files: a workflow's key ``on`` is text."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - the base class's own attribute
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Yaml12.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("^(?:true|false)$"), list("tf"))


@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: file.name)
def test_every_manifest_is_valid(file: Path) -> None:
    if file.name in ("github-actions.yaml", "gitlab-ci.yaml"):
        return  # files of another kind, above
    text = file.read_text().replace("generateName: train-adapter-", "name: train-adapter")
    found = read_manifests([(file.name, text)])
    assert [str(problem) for problem in found.problems] == []
    assert len(found.tasks) + len(found.others) > 0


# --- commands ---

_COMMAND = re.compile(r"(?:^|[\s`(])(mlora (?:submit|fetch|validate|watch) [^\n`|&#]*)", re.MULTILINE)
_CONTINUED = re.compile(r"\\\n\s*")
_SUBSTITUTION = re.compile(r"\$\{?[A-Z_]+(::8)?\}?")


def commands(text: str) -> Iterator[list[str]]:
    for command in _COMMAND.findall(_CONTINUED.sub(" ", text)):
        words = shlex.split(_SUBSTITUTION.sub("1", command))
        if "..." not in " ".join(words):  # not in a sentence about it
            yield words[1:]


def texts_with_commands() -> list[tuple[str, str]]:
    """Of YAML files their text values, since that is where a folded command is in one piece."""
    found = [("ci.md", "\n".join(PAGE.read_text().split("```")[1::2]))]
    for file in sorted(CI.glob("*.yaml")):
        values = [text for document in yaml.safe_load_all(file.read_text()) for text in _strings(document)]
        found.append((file.name, "\n".join(values)))
    return [(name, text) for name, text in found if _COMMAND.search(text)]


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _strings(one)
    elif isinstance(value, list):
        for one in value:
            yield from _strings(one)


@pytest.mark.parametrize(
    ("name", "text"), texts_with_commands(), ids=[name for name, _ in texts_with_commands()]
)
def test_every_command_is_one_that_there_is(name: str, text: str) -> None:
    found = list(commands(text))
    assert found, name
    root: Any = typer.main.get_command(app)
    for command, *arguments in found:
        if command == "fetch":
            fetch_parser().parse_args(arguments)
        else:
            root.commands[command].make_context(command, list(arguments))


def test_all_three_systems_submit_wait_and_fetch() -> None:
    used = {name: [words[0] for words in commands(text)] for name, text in texts_with_commands()}
    for name in ("github-actions.yaml", "gitlab-ci.yaml", "tekton.yaml"):
        assert {"submit", "fetch"} <= set(used[name]), name


# --- Tekton ---


def _named(items: Any) -> set[str]:
    return {item["name"] for item in items or ()}


def test_tekton_tasks_use_what_they_declare_and_nothing_else() -> None:
    for task in documents("tekton.yaml"):
        if task["kind"] != "Task":
            continue
        spec = task["spec"]
        text = yaml.safe_dump(spec["steps"])
        assert set(re.findall(r"\$\(params\.(\w+)\)", text)) == _named(spec["params"])
        assert set(re.findall(r"\$\(workspaces\.(\w+)\.path\)", text)) == _named(spec["workspaces"])
        assert set(re.findall(r"\$\(results\.(\w+)\.path\)", text)) == _named(spec.get("results"))
        for step in spec["steps"]:
            assert "$(params" not in step["script"]  # a parameter must not be read by the shell
            context = step["securityContext"]  # the restricted Pod Security Standard
            assert (context["runAsNonRoot"], context["allowPrivilegeEscalation"]) == (True, False)
            assert context["capabilities"] == {"drop": ["ALL"]}


def test_the_tekton_pipeline_gives_each_task_what_it_asks_for() -> None:
    by_kind = {(one["kind"], one["metadata"].get("name")): one["spec"] for one in documents("tekton.yaml")}
    pipeline = by_kind["Pipeline", "train-adapter"]
    for step in pipeline["tasks"]:
        task = by_kind["Task", step["taskRef"]["name"]]
        required = {one["name"] for one in task["params"] if "default" not in one}
        assert required <= _named(step["params"]) <= _named(task["params"])
        assert _named(step["workspaces"]) == _named(task["workspaces"])
        assert {one["workspace"] for one in step["workspaces"]} <= _named(pipeline["workspaces"])
    text = yaml.safe_dump(pipeline)
    assert set(re.findall(r"\$\(params\.(\w+)\)", text)) == _named(pipeline["params"])
    for task_name, result in re.findall(r"\$\(tasks\.(\w+)\.results\.(\w+)\)", text):
        (step,) = [one for one in pipeline["tasks"] if one["name"] == task_name]
        assert result in _named(by_kind["Task", step["taskRef"]["name"]]["results"])
    (run,) = documents("tekton-run.yaml")
    assert run["spec"]["pipelineRef"]["name"] == "train-adapter"
    assert _named(run["spec"]["params"]) == _named(pipeline["params"])
    assert _named(run["spec"]["workspaces"]) == _named(pipeline["workspaces"])
