"""One style of help for all commands: what follows an option is a word in capitals or its choices, after a flag nothing.

Typer by itself writes ``<bool>`` behind flags and ``<str>`` behind names.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

_WORDS = {
    "<bool>": "",
    "<str>": "TEXT",
    "<list[str]>": "TEXT",
    "<int>": "N",
    "<int range>": "N",
    "<float>": "N",
    "<float range>": "N",
    "<path>": "PATH",
}


class StyledCommand(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return [_styled(param, ctx) for param in super().get_params(ctx)]


class StyledGroup(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return [_styled(param, ctx) for param in super().get_params(ctx)]


def _styled(param: Any, ctx: Any) -> Any:
    """``param`` itself. Versions of Typer that write no types have nothing to replace."""
    shown = getattr(param, "display_type_rich", None)
    if shown is not None:
        argument = param.param_type_name == "argument"  # its name is a word in capitals already
        label = "" if argument else _WORDS.get(shown(ctx), shown(ctx))
        param.display_type_rich = lambda ctx: label  # noqa: ARG005
    return param
