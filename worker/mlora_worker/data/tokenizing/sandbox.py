"""A task's own chat template: what it may use, and how much work one rendering may be.

It is rendered as transformers renders a model's template: in the same sandbox, with the same names, which are written here
once more, because the process that renders (``sandbox_process``) would start for seconds if it imported that library. But
it comes from somebody who shares the worker with others, so beyond that:

1. Only filters and methods of texts are known whose result can be foreseen; templates cannot load others.
2. Each step of a loop, each call, filter and text that is put together takes from the rendering's budget, by the size of
   what it works on.
3. No text may become longer than a multiple of the conversation.

What is wrong is reported with its line when the template is compiled, where that can be seen there. This finds
mistakes, and has words for them; what it cannot foresee is bounded by the process that renders (``sandbox_process``).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from jinja2 import Environment, Template, TemplateSyntaxError, nodes, pass_eval_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from mlora_worker.data.reading.tool_turns import texts_in
from mlora_worker.data.tokenizing.template_messages import (
    TemplateMistake,
    keep_literal,
    message_without_rows,
    raising,
)

LONGEST_TEMPLATE: Final = 65_536  # characters
_LEAST_BUDGET: Final = 1_000_000  # units of work
_CALL: Final = 10  # units of a call, which takes so much longer than a step of a loop
_LEAST_TEXT: Final = 1_000_000  # characters of any text
_TEXT_FACTOR: Final = 8  # and so many times the conversation's
_CHARACTERS_A_UNIT: Final = 64
_MOST_BITS: Final = 4096  # of a number
_WIDEST_INDENT: Final = 16  # of JSON

_EACH, _JOINED = "__each", "__joined"
_FILTERS: Final = frozenset(
    """
    abs attr capitalize count d default dictsort e escape first float groupby int items join last length list lower map max
    min reject rejectattr replace reverse round safe select selectattr sort string sum title tojson trim unique upper
    """.split()  # noqa: SIM905 - a list of names is read best so
)
_METHODS: Final = frozenset(
    """
    capitalize casefold count endswith find index isalnum isalpha isdecimal isdigit islower isnumeric isspace istitle
    isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition rsplit rstrip split
    splitlines startswith strip swapcase title upper
    """.split()  # noqa: SIM905
)


class InvalidTemplate(Exception):
    """``str(error)`` names the line."""


class TaskTemplate:
    """For one thread."""

    def __init__(self, source: str, now: datetime | None = None) -> None:
        """``now``: what it gets when it asks for the time; None: the time. Raises InvalidTemplate."""
        check_source(source)
        self._source = source
        self._environment = _Limited(source, now)
        try:
            self._template: Template = self._environment.from_string(source)
        except TemplateSyntaxError as error:
            raise InvalidTemplate(f"line {error.lineno}: {error.message}") from None
        except Exception as error:  # such as ValueError for a number of five thousand digits
            raise InvalidTemplate(f"cannot be compiled: {type(error).__name__}: {error}") from None

    def render(self, messages: Sequence[Mapping[str, Any]], **names: Any) -> str:
        """Raises TemplateMistake: the template's own refusal, a mistake in it, or more work than one rendering may be."""
        characters = characters_of(messages, names)
        self._environment.begin(characters)
        try:
            text = self._template.render(messages=messages, **names)
        except RecursionError:
            raise TemplateMistake("it recurses without end, or nests values too deeply") from None
        except MemoryError:
            raise TemplateMistake(
                "it needs far more memory than a chat template should: look for lists and texts that grow in loops"
            ) from None
        except Exception as error:  # whatever its expressions raise is a mistake in it
            raise TemplateMistake(message_without_rows(error, self._source)) from None
        if len(text) > longest_text(characters):
            raise TemplateMistake(_too_long(len(text)))
        if not _is_unicode(text):
            raise TemplateMistake(
                "it writes half a character (a lone surrogate), which tokenizers cannot read"
            )
        return text


def check_source(source: str) -> None:
    """Raises InvalidTemplate for what need not be compiled."""
    if len(source) > LONGEST_TEMPLATE:
        raise InvalidTemplate(
            f"it has {len(source):,} characters, but at most {LONGEST_TEMPLATE:,} are allowed: remove the parts for "
            f"images, which rows do not have"
        )
    if not _is_unicode(source):
        raise InvalidTemplate("it holds half a character (a lone surrogate): write it in UTF-8")


def characters_of(messages: Sequence[Mapping[str, Any]], names: Mapping[str, Any]) -> int:
    """Of a conversation and, among the ``names`` that a template is given, of its tools."""
    beside = [value for one in messages for key, value in one.items() if key not in ("role", "content")]
    texts = texts_in([beside, names.get("tools") or ()])
    return sum(len(one["content"]) for one in messages) + sum(map(len, texts))


def longest_text(characters: int) -> int:
    """Characters of any text in the rendering of a conversation of so many."""
    return _LEAST_TEXT + _TEXT_FACTOR * characters


def _too_long(characters: int) -> str:
    return f"it turns a much shorter conversation into {characters:,} characters"


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class _Generation(Extension):
    """``{% generation %}`` around an answer. Its places are not asked for here."""

    tags: set[str] = {"generation"}  # noqa: RUF012 - as the class above declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_shown", []), [], [], body).set_lineno(line)

    @pass_eval_context
    def _shown(self, _: nodes.EvalContext, caller: Macro) -> str:
        shown: str = caller()
        return shown


class _Dict:
    """``dict`` without a way to its class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Namespace(Namespace):
    def __init__(*args: Any, **kwargs: Any) -> None:  # namespace(self=...) is a name like any other
        self, given = args[0], args[1:]
        values = dict(*given, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise TemplateMistake("a name of a namespace cannot begin with _: rename it")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own would escape for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _Limited(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, source: str, now: datetime | None) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            finalize=self._shown,
        )
        for name in ("lipsum", "cycler", "joiner"):
            del self.globals[name]

        def strftime_now(written: str) -> str:
            return (now or datetime.now()).strftime(written)

        self.globals |= {
            "strftime_now": strftime_now,
            "dict": _Dict(),
            "namespace": _Namespace,
        }
        known = {name: _tojson if name == "tojson" else self.filters[name] for name in _FILTERS}
        self.filters = {name: self._charged(name, each) for name, each in known.items()}
        self.filters |= {_EACH: self._each, _JOINED: self._joined}
        self._step = 1 + len(source) // _CHARACTERS_A_UNIT  # a loop's body may write all of it
        self._left, self._longest = _LEAST_BUDGET, _LEAST_TEXT

    def begin(self, characters: int) -> None:
        """A rendering of a conversation of so many."""
        self._left = _LEAST_BUDGET + characters
        self._longest = longest_text(characters)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for node in tree.find_all((nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)):
            raise TemplateSyntaxError("a chat template cannot load others", node.lineno)
        for one in tree.find_all(nodes.Filter):
            if one.name not in _FILTERS:
                raise TemplateSyntaxError(f"the filter {one.name} is not allowed", one.lineno)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = _filtered(loop.iter, _EACH)
        self.globals["raise_exception"] = raising(keep_literal(tree))
        _replace_concatenations(tree)
        return tree

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        self = __self
        self._spend(_CALL + self._step)
        owner, method = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if hasattr(__obj, "__wrapped__"):  # format of a text, which the sandbox has replaced
            owner, method = "", "format"
        if isinstance(owner, str):
            if method not in _METHODS:
                raise TemplateMistake(f"the method {method} of a text is not allowed")
            self._foresee(method, (owner, *args))
        self._measure((*args, *kwargs.values()))
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self._spend(1)
        if isinstance(left, int) and isinstance(right, int):
            bits = (
                left.bit_length() * max(right, 0)
                if operator == "**"
                else left.bit_length() + right.bit_length()
            )
            if bits > _MOST_BITS and operator in ("*", "**"):
                raise TemplateMistake("it computes a number that is too large")
        elif operator == "%" and isinstance(left, str):
            raise TemplateMistake("% of a text is not allowed: join texts with ~")
        elif operator == "*":
            size, times = (left, right) if isinstance(right, int) else (right, left)
            if hasattr(size, "__len__") and isinstance(times, int):
                self._allow(len(size) * max(times, 0))
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            self._allow(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def _charged(self, name: str, each: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(each)
        def charged(*args: Any, **kwargs: Any) -> Any:
            self._spend(1)
            if name == "join":  # also of a range, or of what another filter yields
                args = tuple(
                    list(self._each(one)) if isinstance(one, Iterator | range) else one for one in args
                )
            # A filter may be given the environment, which is none of a template's values.
            given = [one for one in args if not isinstance(one, Environment | Context | nodes.EvalContext)]
            self._measure((*given, *kwargs.values()))
            self._foresee(name, (*given, *kwargs.values()))
            return each(*args, **kwargs)

        return charged

    def _each(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self._spend(self._step)
            yield value

    def _joined(self, values: Sequence[Any]) -> str:
        self._measure(values)
        texts = [str(value) for value in values]
        self._allow(sum(map(len, texts)))
        return "".join(texts)

    def _shown(self, value: Any) -> Any:
        self._measure((value,))
        return value

    def _foresee(self, name: str, given: Sequence[Any]) -> None:
        """Refuse what would make too long a text of short ones."""
        if name == "replace" and len(given) >= 3 and all(isinstance(one, str) for one in given[:3]):
            text, old, new = given[:3]
            self._allow(len(text) + (text.count(old) if old else len(text) + 1) * len(new))
        elif name == "join" and len(given) >= 2:
            text, values = given[:2] if isinstance(given[0], str) else (given[1], given[0])
            if isinstance(text, str) and hasattr(values, "__len__"):
                self._allow((len(text) + 1) * len(values))
        elif name == "tojson" and any(_width(one) > _WIDEST_INDENT for one in given[1:]):
            raise TemplateMistake(f"tojson indents by at most {_WIDEST_INDENT}")

    def _measure(self, values: Iterable[Any]) -> None:
        """Take the size of ``values``, with all that is in them, from the budget: as a text they would be as long."""
        waiting = list(values)
        while waiting:
            value = waiting.pop()
            self._spend(1)
            if isinstance(value, str):
                self._spend(len(value) // _CHARACTERS_A_UNIT)
            elif isinstance(value, dict):
                waiting += [*value, *value.values()]
            elif isinstance(value, list | tuple):
                self._spend(len(value))
                waiting += value

    def _allow(self, characters: int) -> None:
        if characters > self._longest:
            raise TemplateMistake(_too_long(characters))
        self._spend(characters // _CHARACTERS_A_UNIT)

    def _spend(self, units: int) -> None:
        self._left -= units
        if self._left < 0:
            raise TemplateMistake("it does far more work than a chat template should: look for nested loops")


def _width(value: Any) -> int:
    """Of an indentation or a separator, a number of spaces or a text, or of several."""
    if isinstance(value, list | tuple):
        return sum(map(_width, value[:3]))
    return len(value) if isinstance(value, str) else value if isinstance(value, int) else 0


def _filtered(value: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno, environment=value.environment)


def _replace_concatenations(node: nodes.Node) -> None:
    """``a ~ b`` becomes a filter, so that it is measured."""
    for field, value in node.iter_fields():
        if isinstance(value, nodes.Node):
            setattr(node, field, _replaced(value))
        elif isinstance(value, list):
            value[:] = [_replaced(one) if isinstance(one, nodes.Node) else one for one in value]


def _replaced(node: nodes.Node) -> nodes.Node:
    _replace_concatenations(node)
    if not isinstance(node, nodes.Concat):
        return node
    parts = nodes.List(node.nodes, lineno=node.lineno, environment=node.environment)
    return _filtered(parts, _JOINED)
