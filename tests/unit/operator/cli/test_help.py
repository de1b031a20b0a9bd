"""One style of help, one meaning of -o, and the same program as a plugin of kubectl."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from mlora_operator import cli
from mlora_operator.cli.app import app, main
from mlora_operator.cli.fetch.command import parser as fetch_parser
from mlora_operator.cli.sync.command import parser as sync_parser

MLORA: Any = typer.main.get_command(app)
COMMANDS = sorted(MLORA.commands)
CLUSTER = {"--namespace", "-n", "--context", "--kubeconfig"}
ON_CLUSTERS = {
    "delete", "fetch", "get", "list", "logs", "report", "resume", "retry", "submit", "suspend", "sync", "watch",
}  # fmt: skip


def options(name: str) -> dict[str, str]:
    """The name of the value's parameter, by option."""
    return {
        option: str(param.name)
        for param in MLORA.commands[name].params
        if param.param_type_name == "option"
        for option in param.opts
    }


def helped(*arguments: str) -> str:
    return CliRunner().invoke(app, [*arguments, "--help"], env={"COLUMNS": "200"}).stdout


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_writes_words_and_choices_and_no_types(name: str) -> None:
    shown = helped(*([name] if name else []))
    assert "--help" in shown
    for label in re.findall(r"<[a-z][^>]*>", shown):
        assert "|" in label, label  # choices


def test_every_command_that_asks_a_cluster_has_the_same_options_for_it() -> None:
    assert {name for name in COMMANDS if options(name).keys() >= CLUSTER} == ON_CLUSTERS
    assert {name for name in COMMANDS if "--context" in options(name)} == ON_CLUSTERS


def test_o_is_the_format_of_the_output_wherever_it_is() -> None:
    for name in COMMANDS:
        held = options(name)
        assert held.get("-o") == held.get("--output"), name
        assert name == "init" or "-o" in held, name


@pytest.mark.parametrize(("name", "parser"), [("fetch", fetch_parser), ("sync", sync_parser)])
def test_fetch_and_sync_have_the_same_options_with_typer_and_without(name: str, parser: Any) -> None:
    plain = {one for action in parser()._actions for one in action.option_strings}
    assert plain - {"-h", "--help"} == options(name).keys()


@pytest.mark.parametrize(
    ("called", "name"), [("/usr/bin/mlora", "mlora"), ("/opt/kubectl-mlora", "kubectl mlora")]
)
def test_the_usage_line_is_how_the_program_was_called(
    called: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [called, "get", "--help"])
    with pytest.raises(SystemExit):
        main()
    assert f"Usage: {name} get " in capsys.readouterr().out
    assert fetch_parser().prog == f"{name} fetch"


@pytest.mark.parametrize("name", ["fetch", "sync"])
def test_fetch_and_sync_show_the_help_of_all_commands_though_they_can_do_without_typer(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["mlora", name, "-h"])
    with pytest.raises(SystemExit):
        cli.main()
    assert f"Usage: mlora {name} [OPTIONS]" in capsys.readouterr().out


def test_help_does_not_wait_for_the_client_of_the_cluster() -> None:
    """It takes a second to load, so a command loads it when it runs."""
    ask = "import mlora_operator.cli.app, sys; print(sys.modules.keys() & {'kubernetes', 'kopf', 'torch'})"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_both_programs_are_installed() -> None:
    scripts = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"mlora": "mlora_operator.cli:main", "kubectl-mlora": "mlora_operator.cli:main"}
