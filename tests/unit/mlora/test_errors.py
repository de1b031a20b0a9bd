"""One class for each exit code of the command, and the command's own messages."""

from __future__ import annotations

import pytest

import mlora
from mlora import MloraError
from mlora.errors import as_own_errors
from mlora_operator.cli import exit_codes
from mlora_operator.cli.fetch.command import EXIT_CODES
from mlora_operator.cli.output import CommandError
from mlora_operator.download import AdapterCorrupt

CODES = {
    value
    for name, value in vars(exit_codes).items()
    if name.isupper() and name not in ("OK", "BROKEN", "INTERRUPTED")
}


def test_each_exit_code_has_a_class_that_can_be_imported() -> None:
    kinds = MloraError.__subclasses__()
    assert {kind.code for kind in kinds} == CODES
    assert len(kinds) == len(CODES)
    assert {kind.__name__ for kind in kinds} <= set(mlora.__all__)


@pytest.mark.parametrize("code", sorted(CODES))
def test_an_error_of_the_command_is_one_of_ours_with_its_words(code: int) -> None:
    with pytest.raises(MloraError, match="words") as raised, as_own_errors():
        raise CommandError("words", code)
    assert raised.value.exit_code == code == raised.value.code
    assert type(raised.value) is not MloraError


def test_an_error_of_a_store_is_what_mlora_fetch_makes_of_it() -> None:
    with pytest.raises(mlora.AdapterDamaged) as raised, as_own_errors():
        raise AdapterCorrupt("broken")
    assert raised.value.exit_code == EXIT_CODES[AdapterCorrupt]


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("add --model acme/a=FOLDER", 'add models={"acme/a": "FOLDER"}'),
        ("--model a=hf://a/b: unknown", 'models={"a": "hf://a/b"}: unknown'),
        ("set KUBECONFIG or --kubeconfig to the file", "set KUBECONFIG or kubeconfig= to the file"),
        (
            "Use another name (--name-suffix), or replace it (--replace)",
            "Use another name, or replace it (replace=True)",
        ),
    ],
)
def test_messages_name_the_clients_parameters(words: str, shown: str) -> None:
    with pytest.raises(MloraError) as raised, as_own_errors():
        raise CommandError(words, exit_codes.INVALID)
    assert str(raised.value) == shown
