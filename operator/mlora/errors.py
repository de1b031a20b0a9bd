"""What may go wrong, by what there is to do about it: one class for each exit code of the ``mlora`` command.

    MloraError
    ├── InvalidInput       2  a field, a name, a folder: correct it
    ├── TaskNotSuccessful  1  a task failed, or nothing here can serve it
    ├── TaskRefused        7  the cluster or the operator does not take it, or its name is taken by another spec
    ├── TimedOut           3  the time given ran out first
    ├── NotReachable       4  the cluster or the store does not answer, or refuses the keys
    ├── AdapterMissing     5  no such task, or no finished adapter there
    └── AdapterDamaged     6  files are not what their manifest says

The messages are the command's own, with the client's parameters in place of its options. ``CommandError``, which the
command raises, is the root of them all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from mlora_operator.cli import exit_codes
from mlora_operator.cli.fetch.command import EXIT_CODES
from mlora_operator.cli.output import CommandError
from mlora_operator.download import DownloadError


class MloraError(CommandError):
    """Root of all below. ``exit_code`` is that of the command."""

    code = exit_codes.BROKEN

    def __init__(self, message: str) -> None:
        super().__init__(message, self.code)


class TaskNotSuccessful(MloraError):
    code = exit_codes.FAILED


class InvalidInput(MloraError):
    code = exit_codes.INVALID


class TimedOut(MloraError):
    code = exit_codes.TIMEOUT


class NotReachable(MloraError):
    code = exit_codes.UNREACHABLE


class AdapterMissing(MloraError):
    code = exit_codes.NOT_FOUND


class AdapterDamaged(MloraError):
    code = exit_codes.CORRUPT


class TaskRefused(MloraError):
    code = exit_codes.REFUSED


_OPTIONS = (
    (re.compile(r"--model (\S+?)=(\S+?)(?=:?(?:\s|$))"), r'models={"\1": "\2"}'),
    (re.compile(r"--s3-endpoint "), "s3_endpoint="),
    (re.compile(r"--(kubeconfig|namespace|endpoint)\b"), r"\1="),
    (re.compile(r"--replace\b"), "replace=True"),
    (re.compile(r" \(--name-suffix\)"), ""),
)
_KINDS = {kind.code: kind for kind in MloraError.__subclasses__()}


def error_of(message: str, exit_code: int) -> MloraError:
    """Of the command's ``message``."""
    for option, parameter in _OPTIONS:
        message = option.sub(parameter, message)
    return _KINDS.get(exit_code, MloraError)(message)


@contextmanager
def as_own_errors() -> Iterator[None]:
    """What the modules behind the command raise, as the classes above."""
    try:
        yield
    except MloraError:
        raise
    except CommandError as error:
        raise error_of(str(error), error.exit_code) from error
    except DownloadError as error:
        raise error_of(str(error), EXIT_CODES[type(error)]) from error
