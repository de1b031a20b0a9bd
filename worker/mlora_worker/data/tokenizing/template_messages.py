"""What a chat template that fails may tell: words of its own source, and never a row.

A failed task's status and its worker's log are read by people who may not read the rows. So what reaches them is made of
the template's source and of kinds of values alone:

1. ``raise_exception`` tells the literal text of its call; what the call puts between is shown as ``...``.
2. Any other text that it is given, and any other error's message, is replaced by the line and the error's kind.
3. Of a name that is undefined and of an operation on the wrong kinds of values, the message stays: the name stands in the
   source, and kinds are Python's.

Whoever writes a template chooses which of its texts it raises, so a few bits of a failed row can still be shown by choice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Any, Final

from jinja2 import nodes
from jinja2.exceptions import TemplateError, UndefinedError

LONGEST: Final = 300  # characters
_RAISE: Final = "raise_exception"
_LEFT_OUT: Final = "..."

_WORD = re.compile(r"\w+")
_UNDEFINED = re.compile(
    r"'(\w{1,64})' is undefined"
    r"|(?:'[\w. ]{1,64}'|[\w. ]{1,64}) has no (?:attribute|element) '?(\w{1,64})'?"
)
_KINDS = re.compile(
    r"can only concatenate \w+ \(not \"\w+\"\) to \w+"
    r"|unsupported operand type\(s\) for [^\w\s]{1,3}: '\w+' and '\w+'"
    r"|'\S{1,2}' not supported between instances of '\w+' and '\w+'"
    r"|'\w+' object is not (?:callable|iterable|subscriptable)"
)


class TemplateMistake(TemplateError):
    """One whose message holds nothing of a row."""


class _Hidden(TemplateError):
    """``raise_exception`` with a text that is not in the template."""


def keep_literal(tree: nodes.Template) -> frozenset[str]:
    """The texts that calls of ``raise_exception`` in ``tree`` may tell. Each call is changed to tell one of these, unless
    the template gives that name another meaning."""
    named = (one.ctx != "load" for one in tree.find_all(nodes.Name) if one.name == _RAISE)
    redefined = any(named) or any(one.name == _RAISE for one in tree.find_all(nodes.Macro))
    found = set()
    for call in tree.find_all(nodes.Call):
        if not isinstance(call.node, nodes.Name) or call.node.name != _RAISE or len(call.args) != 1:
            continue
        text = _literal(call.args[0])
        if not text.replace(_LEFT_OUT, "").strip() or (redefined and _LEFT_OUT in text):
            continue
        found.add(text)
        if not redefined:
            call.args[0] = nodes.Const(text, lineno=call.lineno, environment=call.environment)
    return frozenset(found)


def _literal(node: nodes.Node) -> str:
    match node:
        case nodes.Const() | nodes.TemplateData():
            return str(node.value if isinstance(node, nodes.Const) else node.data)
        case nodes.Concat():
            return "".join(map(_literal, node.nodes))
        case nodes.Add():
            return _literal(node.left) + _literal(node.right)
        case nodes.Mod():
            return _literal(node.left)
        case nodes.Call(node=nodes.Getattr(attr="format", node=text)):
            return _literal(text)
    return _LEFT_OUT


def raising(literal: Collection[str]) -> Callable[[Any], None]:
    """``raise_exception`` for a template whose ``keep_literal`` are these."""

    def raise_exception(message: Any) -> None:
        if isinstance(message, str) and message in literal:
            raise TemplateMistake(message if len(message) <= LONGEST else message[:LONGEST] + _LEFT_OUT)
        raise _Hidden

    return raise_exception


def message_without_rows(error: Exception, source: str) -> str:
    """Of what the rendering of ``source`` raised."""
    if isinstance(error, TemplateMistake):
        return str(error)
    line = _line_of(error.__traceback__)
    where = f"line {line}: " if line is not None else ""
    if isinstance(error, _Hidden):
        return f"{where}{_RAISE} with a text that is not shown, since it may contain rows: use a literal text"
    words = _harmless(error, source)
    return f"{where}{type(error).__name__}" + (f": {words}" if words else "")


def _harmless(error: Exception, source: str) -> str:
    message = error.args[0] if error.args and isinstance(error.args[0], str) else ""
    if isinstance(error, UndefinedError) and (found := _UNDEFINED.fullmatch(message)) is not None:
        name = found[1] or found[2]
        return message if name in _WORD.findall(source) else ""
    return message if isinstance(error, TypeError) and _KINDS.fullmatch(message) else ""


def _line_of(trace: TracebackType | None) -> int | None:
    """The innermost of the template, whether Jinja has rewritten the trace or not."""
    line = None
    while trace is not None:
        known = trace.tb_frame.f_globals
        if "__jinja_exception__" in known:
            line = trace.tb_lineno
        elif (template := known.get("__jinja_template__")) is not None:
            line = template.get_corresponding_lineno(trace.tb_lineno)
        trace = trace.tb_next
    return line
