"""The ``mlora`` command: one file a command, each a thin edge over the packages below.

``app`` puts them together, ``exit_codes`` says how they end, ``output`` how they speak. docs/users/cli.md is
the page for users.
"""

from mlora_operator.cli.app import main

__all__ = ["main"]
