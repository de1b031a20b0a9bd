"""All that the page says of one task. Pure.

Of the spec it takes what is named here and nothing else: rows, chat templates, endpoints and the names of Secrets stay
where they are, and addresses lose users, passwords and queries.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping

from mlora_operator.api.meta import timestamp
from mlora_operator.api.task import LoRATaskSpec
from mlora_operator.page.answers import curve_document, task_document
from mlora_operator.page.curves import Drawn
from mlora_operator.page.documents import (
    ConditionDocument,
    DataDocument,
    DroppedRows,
    EventDocument,
    SpecField,
    TaskDetail,
)
from mlora_operator.page.events import KeptEvent, shortened
from mlora_operator.page.numbers import number
from mlora_operator.page.order import Standing
from mlora_worker.protocol import DataCounts, DatasetSpec, Message, without_credentials

MOST_FIELDS = 200  # of a spec
MOST_RULES = 32  # by which rows were dropped
FIRST_LINES = 8  # of those that a rule dropped
HELD_BACK = frozenset({"inline", "chatTemplate", "fields"})  # of a data set: see ``_dataset``


def task_detail(
    one: Standing, drawn: Drawn | None, events: Iterable[KeptEvent], *, by_name: bool
) -> TaskDetail:
    """``by_name``: there is a cluster that knows the task's name; else an adapter is fetched by its address."""
    status, spec = one.status, one.task.spec
    data = status.data or one.task.status.data
    return TaskDetail(
        task=task_document(one, drawn.colour if drawn is not None else None),
        spec=tuple(spec_fields(spec))[:MOST_FIELDS] if spec is not None else (),
        data=_data(data) if data is not None else None,
        conditions=tuple(
            ConditionDocument(
                type=held.type,
                status=held.status,
                reason=held.reason,
                message=shortened(held.message),
                since=held.last_transition_time,
            )
            for held in status.conditions
        ),
        events=tuple(
            EventDocument(at=timestamp(told.at), type=told.type, reason=told.reason, message=told.message)
            for told in events
        ),
        curve=curve_document(one, drawn) if drawn is not None else None,
        best_step=status.best_step,
        best_evaluation_loss=number(status.best_evaluation_loss),
        reward_margin=number(status.reward_margin),
        reward_accuracy=number(status.reward_accuracy),
        chosen_logps=number(status.chosen_logps),
        rejected_logps=number(status.rejected_logps),
        kl=number(status.kl),
        checkpoint_step=status.checkpoint_step,
        resumed_step=status.resumed_step,
        fetch=fetch_command(one, by_name=by_name),
    )


def fetch_command(one: Standing, *, by_name: bool) -> str | None:
    """For a shell. A task that trains or waits is waited for; of one that failed there is nothing to fetch."""
    key = one.task.key
    adapter = one.status.adapter
    if by_name and one.state != "Failed":
        wait = () if one.state == "Succeeded" else ("--wait",)
        return shlex.join(("mlora", "fetch", key.name, "-n", key.namespace, *wait))
    if one.state == "Succeeded" and adapter is not None and adapter.uri.startswith("s3://"):
        return shlex.join(("mlora", "fetch", adapter.uri))
    return None


def spec_fields(spec: LoRATaskSpec) -> Iterator[SpecField]:
    """In the order in which people look for them."""
    yield from _fields("", spec, "base_model", "priority", "suspend")
    for name, part in (("lora", spec.lora), ("training", spec.training)):
        yield from _fields(name, part)
    yield from _dataset(spec.dataset)
    if spec.evaluation is not None:
        yield from _fields("evaluation", spec.evaluation)
    if spec.init_from is not None:
        yield from _fields("initFrom", spec.init_from)
    yield from _fields("output", spec.output)
    yield from _fields(
        "", spec, "start_deadline_seconds", "active_deadline_seconds", "ttl_seconds_after_finished"
    )


def _dataset(dataset: DatasetSpec) -> Iterator[SpecField]:
    """Rows and templates are not for every reader; names of columns are shown where they are not the usual ones."""
    for name, text in (("inline", dataset.inline), ("chatTemplate", dataset.chat_template)):
        if text is not None:
            yield SpecField(name=f"dataset.{name}", value=f"{len(text):,} characters in the task itself")
    yield from _fields("dataset", dataset, but=HELD_BACK)
    columns = dataset.fields.model_dump(by_alias=True, exclude_none=True, exclude_defaults=True)
    yield from _flat("dataset.fields", columns)


def _fields(
    prefix: str, part: Message, *names: str, but: frozenset[str] = frozenset()
) -> Iterator[SpecField]:
    """What is set in ``part`` by the user or by default; only ``names``, where some are given."""
    shown = part.model_dump(by_alias=True, exclude_none=True, mode="json", include=set(names) or None)
    yield from _flat(prefix, {name: value for name, value in shown.items() if name not in but})


def _flat(prefix: str, shown: Mapping[str, object]) -> Iterator[SpecField]:
    for name, value in shown.items():
        path = f"{prefix}.{name}" if prefix else name
        if isinstance(value, Mapping):
            yield from _flat(path, value)
        elif value != []:
            yield SpecField(name=shortened(path), value=shortened(without_credentials(_words(value))))


def _words(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ", ".join(map(_words, value))
    return str(value)


def _data(counts: DataCounts) -> DataDocument:
    return DataDocument(
        rows=counts.rows,
        used=counts.used,
        tokens=counts.tokens,
        supervised_tokens=counts.supervised_tokens,
        truncated=counts.truncated,
        held_out=counts.held_out,
        beyond_limit=counts.beyond_limit,
        special_tokens=counts.special_tokens,
        format=counts.format.value if counts.format is not None else None,
        dropped=tuple(
            DroppedRows(rule=rule, count=count, first=_first(counts, rule))
            for rule, count in list(counts.dropped.items())[:MOST_RULES]
        ),
    )


def _first(counts: DataCounts, rule: str) -> tuple[str, ...]:
    lines = counts.first_dropped.get(rule, ())[:FIRST_LINES]
    files = (counts.first_dropped_in or {}).get(rule, ())
    if len(files) < len(lines):
        return tuple(map(str, lines))
    return tuple(f"{line} of {without_credentials(file)}" for line, file in zip(lines, files, strict=False))
