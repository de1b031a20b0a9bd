"""The ``mlora`` command: one file a command, each a thin edge over the packages below.

``app`` puts them together, ``exit_codes`` says how they end, ``output`` how they speak. docs/users/cli.md is
the page for users. ``fetch`` and ``sync`` go another way in, since they must run where nothing but boto3 is installed.
``bare_options`` is what those two share.
"""

from __future__ import annotations

import errno
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from mlora_operator.cli import exit_codes
from mlora_operator.cli.encoding import spell_out_what_cannot_be_shown

_BARE = ("fetch", "sync")  # all other commands need the extra ``operator``:
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NEEDED = ("typer", "pydantic", "kubernetes", "yaml")


def main() -> None:
    """Entry point: an expected error is one line on standard error and a number, never a stack trace."""
    guarded(_main)


def guarded(call: Callable[[], None]) -> None:
    """``call``, whose unexpected errors are shown with their trace and end with a number of their own."""
    try:
        call()
    except KeyboardInterrupt:  # while modules were loading; commands say more
        sys.exit(exit_codes.INTERRUPTED)
    except OSError as error:
        if error.errno not in _FULL:
            _broken(error)
        if error.filename is None:
            # What is left in the buffer would fail once more when the program ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        written = error.filename if error.filename is not None else "the output"
        print(f"error: {written} cannot be written: {error.strerror}", file=sys.stderr)
        sys.exit(exit_codes.INVALID)
    except Exception as error:
        _broken(error)


def _broken(error: Exception) -> NoReturn:
    sys.excepthook(type(error), error, error.__traceback__)
    sys.exit(exit_codes.BROKEN)


def _main() -> None:
    spell_out_what_cannot_be_shown()
    if os.environ.get("COLUMNS") == "0":  # of a terminal that does not know its width: nothing would be shown
        del os.environ["COLUMNS"]
    whole = all(importlib.util.find_spec(name) is not None for name in _NEEDED)
    helped = whole and bool({"-h", "--help"} & set(sys.argv[2:]))  # in the style of the others
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in _BARE and not helped:
        command = importlib.import_module(f"mlora_operator.cli.{name}.command")
        sys.exit(command.main(sys.argv[2:]))
    if not whole:
        print(
            "error: only `mlora fetch` and `mlora sync` are installed here; for all other commands run pip install "
            "'mlora-operator[operator]'",
            file=sys.stderr,
        )
        sys.exit(exit_codes.INVALID)
    from mlora_operator.cli.app import main as all_commands

    all_commands()


__all__ = ["guarded", "main"]
