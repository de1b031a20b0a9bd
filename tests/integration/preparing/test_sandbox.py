"""A task's own chat template: rendered as a model's would be, and bounded where a model's is trusted."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import _compile_jinja_template

from mlora_worker.data.errors import DataError, Interrupted
from mlora_worker.data.prepare import Prepared, prepare
from mlora_worker.data.tokenizing import sandbox_process
from mlora_worker.data.tokenizing.sandbox import InvalidTemplate, TaskTemplate
from mlora_worker.data.tokenizing.sandboxed_template import OwnTemplate, _environment
from mlora_worker.data.training_rows.row_cache import RowCache
from mlora_worker.protocol import Dataset, FailureReason, StorageAccess, Training
from mlora_worker.storage.object_store.store import open_store
from mlora_worker.storage.remote.dataset_source import open_sources

pytestmark = pytest.mark.integration

SOURCE = open_sources(open_store(StorageAccess(), allow_files=True), StorageAccess())
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BRACKETS = (
    "{% for m in messages %}[{{ m['role'] | upper }}] {{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[ASSISTANT] {% endif %}"
)
# What templates of models do: namespaces, macros, loop variables, filters, methods, generation markers, slices, tests.
GOOD = {
    "chatml": CHATML,
    "brackets": BRACKETS,
    "namespace": "{% set ns = namespace(n=0, text='') %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% set ns.text = ns.text ~ loop.index ~ ':' ~ m.content ~ '/' ~ loop.length ~ loop.last %}{% endfor %}"
    "{{ ns.n }}{{ ns.text }}",
    "macro": "{% macro turn(m) -%}<{{ m.role }}>{{ m.content | trim }}{%- endmacro %}"
    "{% for m in messages[::-1] %}{{ turn(m) }}{% endfor %}",
    "methods": "{% for m in messages %}{{ m['content'].split('</think>')[-1].lstrip('\n').replace('a', 'bb') }}"
    "{{ m.content.startswith('x') }}{{ m.items() | list | length }}{% endfor %}",
    "filters": "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join(', ') }}"
    "{{ messages | tojson(indent=2) }}{{ undefined_name | default('none') }}{{ bos_token ~ eos_token }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "loop controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "names": "{{ dict(a=1) }}{{ dict.fromkeys(['a'], 2) }}{{ namespace(self=3).self }}{{ strftime_now('%Y') }}"
    "{{ {'b': 'é<', 'a': [1]} | tojson(sort_keys=true, ensure_ascii=true, separators=(',', ':')) }}",
    "numbers": "{{ 7 % 3 }}{{ 2 ** 10 }}{{ 'ab' * 3 }}{{ [1, 2] + [3] }}{{ (messages | length) * 2 }}",
}
TURN = st.fixed_dictionaries(
    {"role": st.sampled_from(("user", "assistant")), "content": st.text(max_size=30)}
)


@pytest.mark.parametrize("name", GOOD)
@settings(max_examples=25, deadline=None)
@given(messages=st.lists(TURN, max_size=5), prompt=st.booleans())
def test_it_renders_what_transformers_renders(
    name: str, messages: list[dict[str, str]], prompt: bool
) -> None:
    names = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": prompt, "tools": None}
    expected = _compile_jinja_template(GOOD[name]).render(messages=messages, **names)
    assert TaskTemplate(GOOD[name]).render(messages, **names) == expected


def test_who_asks_for_the_time_is_told_the_one_that_was_given() -> None:
    source, then = (
        "{% for m in messages %}{{ strftime_now('%d %b %Y %H:%M') }}{% endfor %}",
        datetime(2026, 2, 27),
    )
    assert TaskTemplate(source, then).render(HELLO) == "27 Feb 2026 00:00"
    with closing(OwnTemplate(source, then)) as own:
        assert own.render(HELLO) == "27 Feb 2026 00:00"


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("{% for m in messages %}\n{{ m.content }\n{% endfor %}", r"line 2: unexpected '}'"),
        ("a\nb\n{% endfor %}", r"line 3: .*endfor"),
        ("{% for m in messages %}", r"line 1: .*end"),
        ("\n{{ 'a' | center(10) }}", r"line 2: the filter center is not allowed"),
        ("{{ 'a' | nothing }}", r"the filter nothing is not allowed"),
        ("{% include 'x' %}", r"line 1: a chat template cannot load others"),
        ("{% extends 'x' %}", r"a chat template cannot load others"),
        ("{{ " + "(" * 2000 + "1" + ")" * 2000 + " }}", r"cannot be compiled"),
        ("{{ " + "1" * 5000 + " }}", r"cannot be compiled: ValueError"),
        ("x" * 65_537, r"it has 65,537 characters, but at most 65,536"),
        ("\ud800", r"half a character"),
    ],
)
def test_what_is_wrong_is_told_with_its_line_when_it_is_compiled(source: str, told: str) -> None:
    for made in (TaskTemplate, OwnTemplate):
        with pytest.raises(InvalidTemplate, match=told):
            made(source)


SIXTY = "{% set ns = namespace(a=START) %}{% for i in range(60) %}{% set ns.a = NEXT %}{% endfor %}"


def sixty(start: str, following: str) -> str:
    """Each value of the one before."""
    return SIXTY.replace("START", start).replace("NEXT", following)


HOSTILE = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
    "{% endmacro %}{{ f(60) }}",
    "a macro without an end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a text times a number": "{{ 'a' * 999999999 }}",
    "a number times a text": "{{ 999999999 * 'a' }}",
    "a text that doubles": sixty("'ab'", "ns.a + ns.a"),
    "a text that doubles by ~": sixty("'ab'", "ns.a ~ ns.a"),
    "a list that doubles": sixty("[1]", "ns.a + ns.a"),
    "lists in lists": sixty("[1]", "[ns.a, ns.a]") + "{{ ns.a }}",
    "lists in lists as JSON": sixty("[1]", "[ns.a, ns.a]") + "{{ ns.a | tojson }}",
    "replace": "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "replace by a filter": "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
    "replace between all": "{{ ('a' * 100000).replace('', 'b' * 100000) }}",
    "join": "{{ ('b' * 100000).join('a' * 100000) }}",
    "join by a filter": "{{ ('a' * 100000) | list | join('b' * 100000) }}",
    "a large number": "{{ 9 ** (9 ** 9) }}",
    "a number that grows": sixty("9", "ns.a * ns.a"),
    "format": "{{ '{:>999999999}'.format('a') }}",
    "format by %": "{{ '%999999999d' % 1 }}",
    "ljust": "{{ 'a'.ljust(999999999) }}",
    "expandtabs": "{{ ('\t' * 100000).expandtabs(100000) }}",
    "join of a range": "{{ range(20000) | join('x' * 5000) }}",
    "join of what a filter yields": "{{ range(20000) | map('string') | join('x' * 50000) }}",
    "tojson": "{{ [[1]] | tojson(indent=999999) }}",
    "tojson with a text": "{{ ([1] * 200) | tojson(indent='x' * 500000) }}",
    "tojson with separators": "{{ ([1] * 200) | tojson(separators=('x' * 500000, ':')) }}",
    "half a character": "{{ '\\ud800' }}",
    "much text of a loop": "{% for i in range(99999) %}" + "x" * 60_000 + "{% endfor %}",
    "much text kept": "{% set a %}{% for i in range(99999) %}" + "x" * 60_000 + "{% endfor %}{% endset %}",
    "the class of a text": "{{ ''.__class__.__mro__[1].__subclasses__() }}{{ x.y }}",
    "nothing of nothing": "{{ undefined_name.attribute }}",
    "a sum of texts": "{{ 'a' + 1 }}",
    "a hidden name": "{{ namespace(__class__=1) }}",
    "its own refusal": "{{ raise_exception('no') }}",
}  # fmt: skip


@cache
def refused_here(story: str) -> tuple[str, float]:
    """The words of a hostile template's refusal, and the processor time until then."""
    template = TaskTemplate(HOSTILE[story])
    began = time.process_time()
    with pytest.raises(TemplateError) as refusal:
        template.render([{"role": "user", "content": "hello"}])
    return str(refusal.value), time.process_time() - began


@pytest.mark.parametrize("story", HOSTILE)
def test_what_would_take_the_worker_down_ends_soon(story: str) -> None:
    _, seconds = refused_here(story)
    assert seconds < 20  # of a machine with little to spare


def test_a_budget_is_one_renderings_and_grows_with_the_conversation() -> None:
    template = TaskTemplate("{% for m in messages %}{{ m.content.replace('a', 'b') }}{% endfor %}")
    long = [{"role": "user", "content": "a" * 2_000_000}] * 3
    for _ in range(3):
        assert template.render(long) == "b" * 6_000_000


# --- in a process of its own ------------------------------------------------------------------------------------------

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module", params=list(GOOD))
def both(request: pytest.FixtureRequest) -> Iterator[tuple[TaskTemplate, OwnTemplate]]:
    source = GOOD[request.param]
    with closing(OwnTemplate(source)) as own:
        yield TaskTemplate(source), own


@settings(max_examples=25, deadline=None)
@given(messages=st.lists(TURN, max_size=5), prompt=st.booleans())
def test_the_process_renders_what_is_rendered_here(
    both: tuple[TaskTemplate, OwnTemplate], messages: list[dict[str, str]], prompt: bool
) -> None:
    names = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": prompt, "tools": None}
    here, own = both
    expected = here.render(messages, **names)
    assert own.render(messages, **names) == expected
    assert own.render_all([(messages, names)] * 3) == [expected] * 3


IN_LOOPS = "{% for i in range(9) %}{% for j in range(30000) %}STEP{% endfor %}{% endfor %}"
GREEDY = "slices that are kept"
# What no budget foresees: it breaks Python itself, or is one long operation, or many, or large.
BEYOND = {
    "nested values hashed": (
        "{% set ns = namespace(t=0) %}"
        + IN_LOOPS.replace("STEP", "{% set ns.t = (ns.t,) %}").replace("range(9)", "range(7)")
        + "{% set d = {ns.t: 1} %}",
        r"broke the process that renders it \(SIGSEGV\)|processor time",  # which is first on a slow machine
    ),
    "searches in a long list": (
        "{% set long = [0] * 900000 %}" + IN_LOOPS.replace("STEP", "{% if 1 in long %}{% endif %}"),
        r"more than 1 s of processor time: look for nested loops",
    ),
    GREEDY: (
        "{% set long = [0] * 900000 %}{% set ns = namespace(t=()) %}"
        + IN_LOOPS.replace("STEP", "{% set ns.t = (ns.t, long[1:]) %}"),
        r"memory",
    ),
}


IMPATIENT = """
import os
from mlora_worker.data.tokenizing import sandbox_process
sandbox_process.RENDERING_SECONDS = 1.0
sandbox_process.main()
os._exit(0)
"""


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that take a second of processor time for one rendering, at most."""
    assert sandbox_process.RENDERING_SECONDS == 5.0
    monkeypatch.setattr(sandbox_process, "RENDERING_SECONDS", 1.0)
    program = (sys.executable, "-P", "-c", IMPATIENT)
    monkeypatch.setattr("mlora_worker.data.tokenizing.sandboxed_template._PROGRAM", program)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("story", [story for story in BEYOND if story != GREEDY])
def test_what_no_budget_foresees_ends_the_process_and_nothing_else(story: str) -> None:
    ends_its_process(story)


def test_more_memory_than_there_is_ends_the_process_and_nothing_else() -> None:
    """On a busy machine a second of processor time may be over before the memory is."""
    ends_its_process(GREEDY)


def ends_its_process(story: str) -> None:
    source, told = BEYOND[story]
    began = time.monotonic()
    with closing(OwnTemplate(source)) as own:
        for _ in range(2):
            with pytest.raises(TemplateError, match=told):
                own.render(HELLO)
        pid = own.pid
    assert time.monotonic() - began < 60
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("story", HOSTILE)
def test_what_the_budget_refuses_is_refused_in_the_same_words(story: str) -> None:
    here, _ = refused_here(story)
    with closing(OwnTemplate(HOSTILE[story])) as own:
        for _ in range(2):  # and it goes on
            with pytest.raises(TemplateError) as there:
                own.render(HELLO)
            assert str(there.value)[:1000] == here[:1000]


def test_a_process_that_is_stopped_or_killed_may_be_the_machines_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mlora_worker.data.tokenizing.sandboxed_template._ANSWER_SECONDS", 0.5)
    with closing(OwnTemplate(CHATML)) as own:
        os.kill(own.pid, signal.SIGSTOP)
        with pytest.raises(Interrupted, match="did not respond within"):
            own.render(HELLO)
    with closing(OwnTemplate(CHATML)) as own:
        os.kill(own.pid, signal.SIGKILL)
        with pytest.raises(
            Interrupted,
            match=r"was killed, most likely because it ran out of memory: look for lists and texts that grow in loops$",
        ) as killed:
            own.render([{"role": "user", "content": "a" * 3_000_000}])
    assert killed.value.reason is FailureReason.INVALID_ROW, "in the end, where each try is killed"


def test_a_process_that_does_not_start_is_the_machines_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlora_worker.data.tokenizing.sandboxed_template._START_SECONDS", 0.0)
    with pytest.raises(Interrupted, match="does not start: it did not respond") as late:
        OwnTemplate(CHATML)
    assert late.value.reason is FailureReason.INTERNAL_ERROR


def test_all_renderings_together_may_take_so_much_for_each() -> None:
    kind, told = sandbox_process._rendered(TaskTemplate(CHATML), HELLO, {}, 0.0)
    assert kind == sandbox_process.REFUSED
    assert "far more than these conversations need" in told


def test_a_long_conversation_and_many_at_once_pass_through() -> None:
    long = [{"role": "user", "content": "é" * 2_000_000}] * 3
    asked = [(long, {}), *[(HELLO, {})] * 1500]
    with closing(OwnTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")) as own:
        assert own.render_all(asked) == ["é" * 6_000_000, *["hello"] * 1500]


def test_the_process_knows_no_secret_and_ends_with_its_parents_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    with closing(OwnTemplate(CHATML)) as own:
        assert b"hidden" not in Path(f"/proc/{own.pid}/environ").read_bytes()
        assert "AWS_SECRET_ACCESS_KEY" not in _environment()
        limits = Path(f"/proc/{own.pid}/limits").read_text()
        for name, most in (("core file size", 0), ("file size", 0), ("open files", 16)):
            assert re.search(rf"Max {name} +{most} +{most} ", limits)
        assert re.search(r"Max cpu time +7200 +7210 ", limits), (
            "where both are the same, the kernel sends a SIGKILL"
        )
        assert re.search(r"Max address space +\d{9} +\d{9} ", limits)
        assert own._process.stdin is not None
        own._process.stdin.close()
        assert own._process.wait(30) == 0


def test_no_process_is_left_whatever_becomes_of_the_preparation(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    popen = subprocess.Popen

    def watched(*args: Any, **kwargs: Any) -> Any:
        made = popen(*args, **kwargs)
        started.append(made.pid)
        return made

    monkeypatch.setattr("mlora_worker.data.tokenizing.sandboxed_template.subprocess.Popen", watched)
    run(tokenizer, BRACKETS)
    for bad in ("x\n{% endfor %}", "{{ messages[0].nothing.more }}", BEYOND["nested values hashed"][0]):
        with pytest.raises(DataError):
            run(tokenizer, bad)
    assert len(started) == 4
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]


def test_a_template_that_breaks_its_process_names_the_row(tokenizer: Any) -> None:
    with pytest.raises(
        DataError, match=r"line 1 was rejected by the chat template: (it broke|one)"
    ) as caught:
        run(tokenizer, BEYOND["nested values hashed"][0])
    assert caught.value.reason is FailureReason.INVALID_ROW


# --- in a data set ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(make_tokenizer: Callable[..., Any]) -> Any:
    return make_tokenizer(CHATML, specials=["<|im_start|>", "<|im_end|>"], eos_token="<|im_end|>")


@pytest.fixture(scope="module")
def bare(make_tokenizer: Callable[..., Any]) -> Any:
    return make_tokenizer(None, specials=["<|im_start|>", "<|im_end|>"], eos_token="<|im_end|>")


def run(tokenizer: Any, template: str | None, cache: RowCache | None = None) -> Prepared:
    messages = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "Four."}]
    dataset = Dataset.model_validate({"format": "messages", "inline": json.dumps({"messages": messages})})
    return prepare(dataset, Training(), tokenizer, SOURCE, 1000, template=template, cache=cache)


def learnt(prepared: Prepared, tokenizer: Any) -> str:
    row = prepared.rows[0]
    return str(tokenizer.decode([label for label in row.labels.tolist() if label >= 0]))


def test_the_tasks_template_takes_the_place_of_the_models(tokenizer: Any, bare: Any) -> None:
    for made in (tokenizer, bare):
        prepared = run(made, BRACKETS)
        assert made.decode(prepared.rows[0].ids) == "[USER] What?<|im_end|>[ASSISTANT] Four.<|im_end|>"
        assert learnt(prepared, made) == "Four.<|im_end|>"
    assert tokenizer.decode(run(tokenizer, None).rows[0].ids).startswith("<|im_start|>user")


def test_rows_whose_answer_it_does_not_show_are_dropped_and_none_is_guessed(tokenizer: Any) -> None:
    hides = BRACKETS.replace(
        "{% if add_generation_prompt %}[ASSISTANT] {% endif %}", "{% if add_generation_prompt %}> {% endif %}"
    )
    with pytest.raises(DataError, match="TemplateMismatch 1") as caught:
        run(tokenizer, hides)
    assert caught.value.reason is FailureReason.NO_TRAINABLE_ROWS


def test_a_template_that_is_none_fails_before_a_row_is_read(tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"dataset.chatTemplate: line 2: .*endfor") as caught:
        run(tokenizer, "x\n{% endfor %}")
    assert caught.value.reason is FailureReason.INVALID_SPEC


def test_a_mistake_that_a_row_shows_names_the_row(tokenizer: Any) -> None:
    with pytest.raises(
        DataError, match=r"line 1 was rejected by the chat template: .*no attribute"
    ) as caught:
        run(tokenizer, "{{ messages[0].nothing.more }}")
    assert caught.value.reason is FailureReason.INVALID_ROW


def test_rows_of_one_template_are_never_taken_for_anothers(tokenizer: Any, tmp_path: Path) -> None:
    cache = RowCache(tmp_path, "team-a")
    texts = [
        tokenizer.decode(run(tokenizer, one, cache).rows[0].ids)
        for one in (None, BRACKETS, CHATML, None, BRACKETS)
    ]
    assert texts[0] == texts[2] == texts[3]
    assert texts[1] == texts[4] != texts[0]
    assert len(list(tmp_path.glob("*/*/meta.json"))) == 3
