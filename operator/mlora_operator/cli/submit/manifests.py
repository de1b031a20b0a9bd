"""What a user's files ask a cluster for. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from mlora_operator.api import API_VERSION, task
from mlora_operator.api.rules import MUTABLE, TASK_RULES
from mlora_operator.api.task import LoRATaskSpec
from mlora_operator.cli import exit_codes
from mlora_operator.cli.output import CommandError
from mlora_operator.local.documents import parse
from mlora_operator.local.manifests import read_manifests

JSON = dict[str, Any]

_SUFFIX = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
# What the API server writes itself: there in files that came from a cluster.
_SERVERS_OWN = (
    "uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp", "managedFields", "selfLink",
)  # fmt: skip
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_IMMUTABLE = {rule.path[0] for rule in TASK_RULES if rule.path and "oldSelf" in rule.cel}


@dataclass(frozen=True, slots=True)
class Submission:
    """Objects as they go to the API server; ``others`` first, in the order of the files."""

    tasks: tuple[JSON, ...]
    others: tuple[JSON, ...]


def read_submission(
    texts: Sequence[tuple[str, str]], namespace: str | None, suffix: str | None
) -> Submission:
    """Of files by name and content, checked as ``mlora validate`` does.

    ``namespace`` is what the user said on the command line, where a file may not say another one. ``suffix`` is
    put behind each task's name and its output folder. Raises CommandError.
    """
    problems = read_manifests(texts).problems
    if problems:
        raise CommandError("\n".join(map(str, problems)), exit_codes.INVALID)
    if suffix is not None and not _SUFFIX.fullmatch(suffix):
        message = f"--name-suffix {suffix}: a name can end only in lower-case letters, digits and '-'"
        raise CommandError(message, exit_codes.INVALID)
    tasks: list[JSON] = []
    others: list[JSON] = []
    for item in _items(texts):
        manifest = _without_servers_own(item)
        _check_namespace(manifest, namespace)
        if (manifest["apiVersion"], manifest["kind"]) == (API_VERSION, task.KIND):
            tasks.append(manifest if suffix is None else _with_suffix(manifest, suffix))
        else:
            others.append(manifest)
    if not tasks:
        raise CommandError("these files contain no LoRATask", exit_codes.INVALID)
    return Submission(tuple(tasks), tuple(others))


def within(manifest: JSON, namespace: str) -> JSON:
    """``manifest`` in ``namespace``, unless it says its own."""
    metadata = {"namespace": namespace} | manifest["metadata"]
    return manifest | {"metadata": metadata}


def title(manifest: Mapping[str, Any]) -> str:
    return f"{manifest['kind'].lower()}/{manifest['metadata']['name']}"


@dataclass(frozen=True, slots=True)
class Difference:
    """A field of a task's spec that is ``there`` as another value than ``wanted``; None: not set."""

    path: tuple[str, ...]
    there: Any
    wanted: Any

    @property
    def immutable(self) -> bool:
        return self.path[0] in _IMMUTABLE and self.path not in MUTABLE

    def __str__(self) -> str:
        return f"spec.{'.'.join(self.path)} is {self.there!r} in the cluster and {self.wanted!r} in the file"


def differences(there: JSON, wanted: JSON) -> list[Difference]:
    """Fields of two specs that mean something else; one that is left out means its default.

    A cluster whose CRD is newer than this program has fields that are not known here: they are not compared.
    """
    known = _filled(there)
    both = (known if known is not None else there, _filled(wanted) or wanted)
    return [
        difference
        for difference in _compared((), *both)
        if known is not None or difference.wanted is not None
    ]


def _compared(path: tuple[str, ...], there: Any, wanted: Any) -> Iterator[Difference]:
    if isinstance(there, dict) and isinstance(wanted, dict):
        for key in sorted(there.keys() | wanted.keys()):
            yield from _compared((*path, key), there.get(key), wanted.get(key))
    elif there != wanted:
        yield Difference(path, there, wanted)


def _filled(spec: JSON) -> JSON | None:
    """With its defaults; None when it cannot be read."""
    try:
        return LoRATaskSpec.model_validate(spec).model_dump(mode="json", by_alias=True, exclude_none=True)
    except ValidationError:
        return None


def _items(texts: Sequence[tuple[str, str]]) -> Iterator[JSON]:
    for _, text in texts:
        for document in parse(text):
            value: JSON = document.value
            yield from value["items"] if value["kind"] == "List" and "items" in value else (value,)


def _without_servers_own(item: JSON) -> JSON:
    metadata = {key: value for key, value in item["metadata"].items() if key not in _SERVERS_OWN}
    annotations = dict(metadata.get("annotations") or {})
    if annotations.pop(_LAST_APPLIED, None) is not None:
        metadata["annotations"] = annotations
    return {key: value for key, value in item.items() if key != "status"} | {"metadata": metadata}


def _check_namespace(manifest: JSON, namespace: str | None) -> None:
    stated = manifest["metadata"].get("namespace")
    if namespace is not None and stated not in (None, namespace):
        message = f"{title(manifest)} is for namespace {stated!r}, and --namespace says {namespace!r}"
        raise CommandError(message, exit_codes.INVALID)


def _with_suffix(manifest: JSON, suffix: str) -> JSON:
    """Two tasks may not share an output, so it gets the suffix, too."""
    name = f"{manifest['metadata']['name']}-{suffix}"
    if len(name) > 253:
        raise CommandError(f"{name}: a name must have at most 253 characters", exit_codes.INVALID)
    spec = manifest["spec"]
    output = spec["output"] | {"uri": f"{spec['output']['uri'].rstrip('/')}-{suffix}"}
    return manifest | {"metadata": manifest["metadata"] | {"name": name}, "spec": spec | {"output": output}}
