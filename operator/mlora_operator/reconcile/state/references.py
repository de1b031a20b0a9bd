"""What tasks and pipelines name: Secrets with keys, ConfigMaps with rows and templates. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mlora_operator.api import conditions
from mlora_operator.api.meta import Storage
from mlora_operator.api.pipeline import LoRAPipelineSpec
from mlora_operator.reconcile.state.cause import Cause
from mlora_operator.reconcile.state.snapshot import ConfigMapText, Key, SecretData, Snapshot, Task
from mlora_worker.bounds import MOST_KEY
from mlora_worker.protocol import ConfigMapReference, StorageAccess

ACCESS_KEY = "AWS_ACCESS_KEY_ID"
HUB_TOKEN = "HF_TOKEN"
SECRET_KEY = "AWS_SECRET_ACCESS_KEY"
SESSION_TOKEN = "AWS_SESSION_TOKEN"
_KEYS = (ACCESS_KEY, SECRET_KEY, SESSION_TOKEN, HUB_TOKEN)
CA_CERTIFICATE = "ca.crt"  # of those who may sign the store's own


def unread(field: str, what: str, cause: str | None = None) -> Cause:
    why = f" ({cause})" if cause else ""
    message = f"{field}: the operator cannot read {what} at present{why}; it retries automatically"
    return Cause(conditions.REASON_READ_ERROR, message)


def _unread_object(field: str, kind: str, key: Key, snapshot: Snapshot) -> Cause:
    what = f"{kind} {key.name} in namespace {key.namespace}"
    return unread(field, what, snapshot.unread.get((kind, key)))


ConfigMaps = Mapping[Key, Mapping[str, ConfigMapText] | None]
MOST_TEMPLATE = 4 * 65_536  # bytes: as many characters as dataset.chatTemplate may have


def dataset_text(task: Task, config_maps: ConfigMaps) -> ConfigMapText | None:
    """The rows that its ConfigMap holds; None where it names none, or that is not there."""
    assert task.spec is not None
    return _text_of(task, task.spec.dataset.config_map_ref, config_maps)


def template_text(task: Task, config_maps: ConfigMaps) -> ConfigMapText | None:
    """Its chat template, in the same way."""
    assert task.spec is not None
    return _text_of(task, task.spec.dataset.chat_template_ref, config_maps)


def _text_of(
    task: Task, reference: ConfigMapReference | None, config_maps: ConfigMaps
) -> ConfigMapText | None:
    if reference is None:
        return None
    return (config_maps.get(Key(task.key.namespace, reference.name)) or {}).get(reference.key)


def text_problem(task: Task, snapshot: Snapshot) -> Cause | None:
    """What is wrong with the ConfigMaps of a task's rows and chat template, or None."""
    assert task.spec is not None
    config_maps = snapshot.config_maps
    dataset = task.spec.dataset
    for field, reference, instead in (
        ("configMapRef", dataset.config_map_ref, "dataset.inline or a file"),
        ("chatTemplateRef", dataset.chat_template_ref, "dataset.chatTemplate"),
    ):
        found = _text_of(task, reference, config_maps)
        if found is not None and field == "chatTemplateRef" and found.size > MOST_TEMPLATE:
            return Cause(
                conditions.REASON_INVALID_SPEC,
                f"spec.dataset.{field}: the text has {found.size} bytes, and a chat template must have at most "
                f"{MOST_TEMPLATE}: shorten it",
            )
        if reference is None or found is not None:
            continue
        key = Key(task.key.namespace, reference.name)
        if key not in config_maps:
            return _unread_object(f"spec.dataset.{field}", "ConfigMap", key, snapshot)
        there = config_maps[key]
        lacks = (
            f"no ConfigMap {reference.name}"
            if there is None
            else f"ConfigMap {reference.name} has no text under the key {reference.key}"
        )
        return Cause(
            conditions.REASON_CONFIG_MAP_NOT_FOUND,
            f"spec.dataset.{field}: {lacks} in namespace {task.key.namespace}: create it, and the task continues "
            f"automatically (`mlora run` does not read ConfigMaps: use {instead} there)",
        )
    return None


def is_read_later(task: Task, snapshot: Snapshot) -> bool:
    """What the task names is read with a next pass: there was no time for it in this one."""
    assert task.spec is not None
    dataset, namespace = task.spec.dataset, task.key.namespace
    texts = (dataset.config_map_ref, dataset.chat_template_ref)
    named = {("ConfigMap", Key(namespace, one.name)) for one in texts if one is not None}
    if task.secret is not None:
        named.add(("Secret", task.secret))
    return not named.isdisjoint(snapshot.later)


def keys_of_pipeline(spec: LoRAPipelineSpec) -> tuple[str, ...]:
    """What the Secret of a pipeline has to hold: keys of a store where it has something in one, else the hub's token."""
    remote = spec.model.uri.startswith(("hf://", "http://", "https://"))
    if not remote or (spec.checkpoints.uri or "").startswith("s3://"):
        return (ACCESS_KEY, SECRET_KEY)
    return (HUB_TOKEN,) if spec.model.uri.startswith("hf://") else ()


def secret_problem(
    key: Key,
    snapshot: Snapshot,
    field: str,
    needed: Sequence[str] = (ACCESS_KEY, SECRET_KEY),
) -> Cause | None:
    """What is wrong with a Secret, which must hold what is ``needed``, or None; or that it could not be read."""
    if key not in snapshot.secrets:
        return _unread_object(field, "Secret", key, snapshot)
    data = snapshot.secrets[key]
    if data is None:
        return Cause(
            conditions.REASON_SECRET_NOT_FOUND,
            f"{field}: no Secret {key.name} in namespace {key.namespace}: create it with "
            f"{' and '.join(needed) or 'the required keys'}, and the operator continues automatically",
        )
    missing = [name for name in needed if not data.get(name, "").strip()]
    if missing:
        return Cause(
            conditions.REASON_SECRET_INCOMPLETE,
            f"{field}: Secret {key.name} in namespace {key.namespace} has no {' and no '.join(missing)}",
        )
    too_long = [name for name in _KEYS if _is_too_long(data.get(name, ""))]
    if too_long:
        return Cause(
            conditions.REASON_SECRET_INCOMPLETE,
            f"{field}: in Secret {key.name} in namespace {key.namespace}, {' and '.join(too_long)} must have at most "
            f"{MOST_KEY} characters: store only the key there",
        )
    return None


def storage_access(
    task: Task, secrets: Mapping[Key, SecretData | None], *, needs_keys: bool = True
) -> StorageAccess | None:
    """The task's store with its keys, white space stripped; None when its Secret is not usable now. Without keys where
    it has none, or with ``needs_keys`` false."""
    assert task.spec is not None
    storage = task.spec.storage
    if storage.secret_ref is None or not needs_keys:
        return access_with(storage, {})
    data = secrets.get(Key(task.key.namespace, storage.secret_ref.name)) or {}
    if not data.get(ACCESS_KEY, "").strip() or not data.get(SECRET_KEY, "").strip():
        return None
    if any(_is_too_long(data.get(name, "")) for name in _KEYS):
        return None
    return access_with(storage, data)


def _is_too_long(key: str) -> bool:
    return len(key.strip()) > MOST_KEY


def access_with(storage: Storage, keys: Mapping[str, str]) -> StorageAccess:
    """A store as a manifest has it, with what a Secret holds, white space stripped; an empty value is none, nor is one
    that is too long to be a key."""
    held = {
        name: value.strip() or None
        for name, value in keys.items()
        if name not in _KEYS or not _is_too_long(value)
    }
    return StorageAccess.model_validate(
        {
            "endpoint": storage.endpoint,
            "region": storage.region,
            "addressing": storage.addressing,
            "checksums": storage.checksums,
            "serverSideEncryption": storage.server_side_encryption,
            "kmsKeyId": storage.kms_key_id,
            "caCertificate": held.get(CA_CERTIFICATE),
            "accessKey": held.get(ACCESS_KEY),
            "secretKey": held.get(SECRET_KEY),
            "sessionToken": held.get(SESSION_TOKEN),
            "hubToken": held.get(HUB_TOKEN),
        }
    )
