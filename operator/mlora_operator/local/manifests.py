"""The user's manifest files as tasks, pipelines and Secrets, or as problems with file, line and field.

The same models and rules as in the CRDs decide (``api``), so that what passes here passes at the API server.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

from pydantic import ValidationError

from mlora_operator.api import API_VERSION, GROUP, pipeline, task
from mlora_operator.api.meta import Model
from mlora_operator.api.patterns import wrong_patterns
from mlora_operator.api.pipeline import LoRAPipelineSpec
from mlora_operator.api.pipeline_status import PipelineStatus
from mlora_operator.api.problem import words
from mlora_operator.api.rule import Rule
from mlora_operator.api.rules import PIPELINE_RULES, TASK_RULES, broken
from mlora_operator.api.schema import structural
from mlora_operator.api.spec_size import oversized
from mlora_operator.api.suggestions import unknown_field
from mlora_operator.api.task import LoRATaskSpec
from mlora_operator.local.documents import Document, DocumentError, Path, parse
from mlora_operator.reconcile.assignment.priority_bounds import bound_message, bound_of
from mlora_operator.reconcile.state.output_folders import Folder, folders_in

SECRET = "Secret"
DEFAULT_NAMESPACE = "default"

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_QUOTES = "must be text; put it in quotes"
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")


_TOP = frozenset({"apiVersion", "kind", "metadata", "spec", "status"})
_METADATA = frozenset(
    {
        "annotations", "creationTimestamp", "deletionGracePeriodSeconds", "deletionTimestamp", "finalizers",
        "generateName", "generation", "labels", "managedFields", "name", "namespace", "ownerReferences",
        "resourceVersion", "selfLink", "uid",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ObjectSource:
    """Where an object stands in the user's files, and which it is."""

    file: str
    line: int
    kind: str
    namespace: str
    name: str


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, for people and, as JSON, for programs."""

    file: str
    line: int
    object: str  # kind/name, or empty when it could not be read that far
    field: str  # path such as spec.lora.rank, or empty
    message: str

    def __str__(self) -> str:
        about = " ".join(part for part in (self.object, self.field) if part)
        return ": ".join(part for part in (f"{self.file}:{self.line}", about, self.message) if part)


@dataclass(frozen=True, slots=True)
class TaskManifest:
    place: ObjectSource
    spec: LoRATaskSpec


@dataclass(frozen=True, slots=True)
class PipelineManifest:
    """``status`` is there in files that came from a cluster (`kubectl get -o yaml`)."""

    place: ObjectSource
    spec: LoRAPipelineSpec
    status: PipelineStatus = field(default_factory=PipelineStatus)


@dataclass(frozen=True, slots=True)
class SecretManifest:
    place: ObjectSource
    data: Mapping[str, str] = field(repr=False)  # decoded


@dataclass(frozen=True, slots=True)
class Manifests:
    """What the files say. ``others`` are objects of kinds that mLoRA leaves alone, such as a Namespace."""

    tasks: tuple[TaskManifest, ...] = ()
    pipelines: tuple[PipelineManifest, ...] = ()
    secrets: tuple[SecretManifest, ...] = ()
    others: tuple[ObjectSource, ...] = ()
    problems: tuple[Problem, ...] = ()


_Spec = TypeVar("_Spec", bound=Model)
Manifest = TaskManifest | PipelineManifest | SecretManifest


@dataclass(frozen=True, slots=True)
class FileContents:
    """What one file says by itself, in its order."""

    found: tuple[Manifest, ...]
    others: tuple[ObjectSource, ...]
    problems: tuple[Problem, ...]


def read_manifests(texts: Sequence[tuple[str, str]]) -> Manifests:
    """Reads all of ``texts``, pairs of file name and content. Never raises for what is in them."""
    return together([read_file(file, text) for file, text in texts])


def together(files: Sequence[FileContents]) -> Manifests:
    """What the files say, with what is wrong between objects of one or several of them."""
    found = [one for file in files for one in file.found]
    tasks = tuple(one for one in found if isinstance(one, TaskManifest))
    pipelines = tuple(one for one in found if isinstance(one, PipelineManifest))
    between = [*_twice(found), *_shared_outputs(tasks), *_too_high(tasks, pipelines)]
    return Manifests(
        tasks=tasks,
        pipelines=pipelines,
        secrets=tuple(one for one in found if isinstance(one, SecretManifest)),
        others=tuple(one for file in files for one in file.others),
        problems=(*(one for file in files for one in file.problems), *between),
    )


def read_file(file: str, text: str) -> FileContents:
    """Of the ``text`` of one file, which messages call ``file``. Never raises for what is in it."""
    found: list[Manifest] = []
    others: list[ObjectSource] = []
    problems: list[Problem] = []
    try:
        for document in parse(text):
            for item, prefix in _items(document):
                result = _object(file, document, item, prefix)
                if isinstance(result, list):
                    problems += result
                elif isinstance(result, ObjectSource):
                    others.append(result)
                else:
                    found.append(result)
    except DocumentError as error:
        problems.append(Problem(file, error.line, "", "", str(error)))
    return FileContents(tuple(found), tuple(others), tuple(problems))


def _items(document: Document) -> Iterator[tuple[Any, Path]]:
    """The document itself, or the items of a ``kind: List``, each with its path in the document."""
    value = document.value
    if isinstance(value, dict) and value.get("kind") == "List" and isinstance(value.get("items"), list):
        yield from ((item, ("items", index)) for index, item in enumerate(value["items"]))
    else:
        yield value, ()


def _object(
    file: str, document: Document, value: Any, prefix: Path
) -> Manifest | ObjectSource | list[Problem]:
    def problem(about: str, path: Path, message: str) -> Problem:
        return Problem(file, document.line_of((*prefix, *path)), about, _dotted(path), message)

    if not isinstance(value, dict):
        return [problem("", (), "expected an object with apiVersion, kind and metadata")]
    kind, version = value.get("kind"), value.get("apiVersion")
    if not isinstance(kind, str) or not isinstance(version, str):
        missing = "kind" if not isinstance(kind, str) else "apiVersion"
        return [problem("", (), f"{missing} is missing")]
    metadata = value.get("metadata")
    names = metadata if isinstance(metadata, dict) else {}
    name, namespace = names.get("name"), names.get("namespace", DEFAULT_NAMESPACE)
    about = f"{kind}/{name}" if isinstance(name, str) else kind

    problems = [problem(about, path, message) for path, message in _bad_names(name, namespace)]
    problems += [problem(about, path, message) for path, message in _bad_texts(names)]
    ours = version.split("/")[0] == GROUP or kind.lower() in (task.KIND.lower(), pipeline.KIND.lower())
    if not ours and (version, kind) != ("v1", SECRET):
        return problems or ObjectSource(file, document.line_of(prefix), kind, str(namespace), str(name))
    if ours and version != API_VERSION:
        return [problem(about, ("apiVersion",), f"must be {API_VERSION} (got {version!r})"), *problems]
    if ours and kind not in (task.KIND, pipeline.KIND):
        kinds = f"{task.KIND} or {pipeline.KIND}"
        return [
            problem(about, ("kind",), f"{GROUP} does not have this kind; did you mean {kinds}?"),
            *problems,
        ]

    place = ObjectSource(file, document.line_of(prefix), kind, str(namespace), str(name))
    if kind == SECRET:
        data, wrong = _secret_data(value)
        problems += [problem(about, path, message) for path, message in wrong]
        return problems or SecretManifest(place, data)
    for key in names.keys() - _METADATA:
        problems.append(problem(about, ("metadata", str(key)), unknown_field(key, _METADATA)))
    for key in value.keys() - _TOP:
        problems.append(problem(about, (key,), unknown_field(key, _TOP)))
    if kind == task.KIND:
        spec, wrong = _spec(value, LoRATaskSpec, TASK_RULES)
        made: Manifest | None = TaskManifest(place, spec) if spec is not None else None
    else:
        pipeline_spec, wrong = _spec(value, LoRAPipelineSpec, PIPELINE_RULES)
        made = PipelineManifest(place, pipeline_spec, _status(value)) if pipeline_spec is not None else None
    problems += [problem(about, path, message) for path, message in wrong]
    return made if made is not None and not problems else problems


def _bad_names(name: Any, namespace: Any) -> Iterator[tuple[Path, str]]:
    rule = "lower-case letters, digits and '-'"
    if name is None or name == "":
        yield ("metadata", "name"), "is missing"
    elif not isinstance(name, str):
        yield ("metadata", "name"), f"{_QUOTES} (got {name!r})"
    elif len(name) > 253 or not _NAME.fullmatch(name):
        yield ("metadata", "name"), f"must be at most 253 {rule} or '.' (got {name!r})"
    if not isinstance(namespace, str) or len(namespace) > 63 or not _LABEL.fullmatch(namespace):
        yield ("metadata", "namespace"), f"must be at most 63 {rule} (got {namespace!r})"


def _bad_texts(metadata: Mapping[str, Any]) -> Iterator[tuple[Path, str]]:
    """A number without quotes, such as the time in ``mlora.dev/retry``, is refused by the API server."""
    for part in ("labels", "annotations"):
        held = metadata.get(part) or {}
        if not isinstance(held, dict):
            yield ("metadata", part), "must be a mapping"
            continue
        for key, text in held.items():
            if not isinstance(text, str):
                yield ("metadata", part, key), f"{_QUOTES} (got {text!r})"


def _spec(
    value: Mapping[str, Any], model: type[_Spec], rules: tuple[Rule, ...]
) -> tuple[_Spec | None, list[tuple[Path, str]]]:
    """The validated spec, or what is wrong with it by path from the object's root."""
    if "spec" not in value:
        return None, [(("spec",), "is missing")]
    try:
        spec = model.model_validate(_without_nulls(value["spec"]), by_alias=True, by_name=False)
    except ValidationError as error:
        return None, [(("spec", *problem["loc"]), _message(problem, model)) for problem in error.errors()]
    filled = spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    wrong: list[tuple[Path, str]] = [(("spec", *path), message) for path, message in broken(filled, rules)]
    size = oversized(filled)
    if size is not None:
        wrong.append((("spec",), size))
    patterns = wrong_patterns(spec.lora) if isinstance(spec, LoRATaskSpec) else None
    if patterns is not None:
        wrong.append((("spec", *patterns[0]), patterns[1]))
    return (None, wrong) if wrong else (spec, [])


def _without_nulls(value: Any) -> Any:
    """As the API server takes it: a field that is null is as if it were not there. In lists, null stays."""
    if not isinstance(value, Mapping):
        return value
    return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}


def _status(value: Mapping[str, Any]) -> PipelineStatus:
    """What a cluster knew of it; nothing when it cannot be read."""
    try:
        return PipelineStatus.model_validate(value.get("status") or {})
    except ValidationError:
        return PipelineStatus()


def _message(problem: Any, model: type[Model]) -> str:
    if problem["type"] == "extra_forbidden":
        *above, name = problem["loc"]
        return unknown_field(name, _fields_at(model, above))
    if problem["type"] == "missing":  # what was given is no help
        return words(problem)
    given = problem.get("input")
    message = words(problem).removeprefix("Value error, ")
    if isinstance(given, str | int | float | bool) and len(str(given)) <= 64:
        message += f" (got {given!r})"
    return message


@cache
def _schema(model: type[Model]) -> Mapping[str, Any]:
    return structural(model, defaults=False)


def _fields_at(model: type[Model], path: Sequence[str | int]) -> Sequence[str]:
    """The fields that there are below ``path``."""
    node = _schema(model)
    for part in path:
        below = node.get("items") if isinstance(part, int) else node.get("properties", {}).get(part)
        node = below or {}
    return tuple(node.get("properties", ()))


def _secret_data(value: Mapping[str, Any]) -> tuple[dict[str, str], list[tuple[Path, str]]]:
    """The decoded values of a Secret; ``stringData`` wins over ``data``, as in the API server."""
    decoded: dict[str, str] = {}
    wrong: list[tuple[Path, str]] = []
    for part in ("data", "stringData"):
        entries = value.get(part) or {}
        if not isinstance(entries, dict):
            wrong.append(((part,), "expected a mapping"))
            continue
        for key, text in entries.items():
            if not isinstance(text, str):
                wrong.append(((part, key), _QUOTES))
            elif part == "stringData":
                decoded[key] = text
            else:
                try:
                    decoded[key] = base64.b64decode(text, validate=True).decode()
                except (binascii.Error, UnicodeDecodeError):
                    wrong.append(((part, key), "is not base64-encoded text; put plain text into stringData"))
    return decoded, wrong


def _twice(found: Sequence[Manifest]) -> Iterator[Problem]:
    first: dict[tuple[str, str, str], ObjectSource] = {}
    for one in found:
        place = one.place
        other = first.setdefault((place.kind, place.namespace, place.name), place)
        if other is not place:
            where = f"{other.file}:{other.line}"
            about = f"{place.kind}/{place.name}"
            yield Problem(place.file, place.line, about, "metadata.name", f"is already defined at {where}")


def _shared_outputs(tasks: Sequence[TaskManifest]) -> Iterator[Problem]:
    """Two adapters below one prefix would overwrite each other's files. The operator would not accept the later one."""
    at: dict[Folder, ObjectSource] = {}
    above: dict[Folder, ObjectSource] = {}  # every folder that some output lies in
    for one in tasks:
        place, targets = one.place, folders_in(one.spec.storage, one.spec.output.uri)
        ways = [(at.get(folder), "a folder above it") for target in targets for folder in _above(target)]
        for target in targets:
            ways += [(at.get(target), "the same place"), (above.get(target), "a folder below it")]
        for other, where in ways:
            if other is not None and (other.namespace, other.name) != (place.namespace, place.name):
                message = f"{other.kind}/{other.name} at {other.file}:{other.line} writes to {where}"
                yield Problem(
                    place.file, place.line, f"{place.kind}/{place.name}", "spec.output.uri", message
                )
                break
        for target in targets:
            at.setdefault(target, place)
            for folder in _above(target):
                above.setdefault(folder, place)


def _above(target: Folder) -> Iterator[Folder]:
    return (target[:length] for length in range(1, len(target)))


def _too_high(tasks: Sequence[TaskManifest], pipelines: Sequence[PipelineManifest]) -> Iterator[Problem]:
    """Priorities that no pipeline of these files that serves the task's base model lets it have. What the platform team
    gives in the operator's chart is not known here."""
    for one in tasks:
        place, priority = one.place, one.spec.priority
        own = [each for each in pipelines if each.spec.model.name == one.spec.base_model]
        bounds = [bound_of(each.spec, each.place.namespace, place.namespace, None) for each in own]
        known = [bound for bound in bounds if bound is not None]
        if not known or len(known) < len(bounds):
            continue
        highest = max(known, key=lambda bound: bound.most)
        if priority > highest.most:
            about, words = f"{place.kind}/{place.name}", bound_message(priority, place.namespace, highest)
            yield Problem(place.file, place.line, about, "spec.priority", words)


def _dotted(path: Path) -> str:
    dotted = ""
    for part in path:
        dotted += f"[{part}]" if isinstance(part, int) else f".{part}" if dotted else part
    return dotted
