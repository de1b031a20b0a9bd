"""Rules that a schema alone cannot say: in CEL for the API server, in Python for ``mlora validate``.

Each rule stands once, with both forms side by side and one message that says what to do. A rule without a
Python form is either checked by the pydantic model itself or compares with the former object, which only
the API server has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from mlora_operator.api.column_rules import COLUMN_RULES
from mlora_operator.api.objective_rules import OBJECTIVE_RULES
from mlora_operator.api.rule import Path, Rule
from mlora_worker import addresses
from mlora_worker.protocol import (
    CONFIG_KEY,
    DNS_NAME,
    DORA_WITH_DROPOUT,
    KMS_KEY,
    NO_TARGETS,
    ODD_RANK,
    ONLY_VERA,
    OTHER_START,
    PARAMETERS_BY_LAYER,
    PLAIN_PARAMETERS,
    STARTS,
    USUAL_ALPHA,
    VERA_ALONE,
)

# CEL has networks only from Kubernetes 1.31 on. What this leaves through and is none is a nonsense with colons.
NETWORK = (
    r"^((25[0-5]|(2[0-4]|1[0-9]|[1-9])?[0-9])(\.(25[0-5]|(2[0-4]|1[0-9]|[1-9])?[0-9])){3}(/(3[0-2]|[12]?[0-9]))?"
    r"|[0-9a-fA-F]*:[0-9a-fA-F:.]*(/(12[0-8]|1[01][0-9]|[1-9]?[0-9]))?)$"
)

# Of the operator's settings.
COORDINATOR_URL = (
    r"^(\{scheme\}|https?)://([A-Za-z0-9._~!$&()*+,;=:%/\[\]-]|\{(host|port|namespace|name)\})+$"
)

_PLAINLY = ": without a user name, backslashes, white space, empty segments, and the segments . and .."

# What a text has to look like is a pattern at its field; a pattern alone tells a user nothing.
REFUSALS: Mapping[str, str] = {
    addresses.FOLDER: "must be an address such as s3://bucket/prefix" + _PLAINLY,
    addresses.MODEL: "must be a folder such as s3://bucket/prefix, hf://OWNER/NAME (with its revision in revision), "
    "https://host/folder or file:///path" + _PLAINLY,
    addresses.DATA: "must be an address such as s3://bucket/key, https://host/path or hf://datasets/OWNER/NAME/path"
    + _PLAINLY,
    addresses.ENDPOINT: "must be a URL such as https://s3.example.org:9000: a host or an IP address in its usual form, "
    "without a user name, backslashes, white space or a trailing dot",
    addresses.REVISION: "must be a branch, tag or commit: letters, digits, -, _, ., + and /",
    addresses.REGION: "must be a region such as us-east-1: letters, digits and -",
    r"^[A-Za-z0-9_]+$": "must be a name of letters, digits and _, such as train",
    r"^([0-9]+(\.[0-9]+)?(ms|s|m|h))+$": "must be a duration such as 90s, 10m or 1h30m",
    r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi|E|Ei)?$": "must be an amount of bytes such as 20Gi",
    r"^([1-9][0-9]*(\.[0-9]+)?|0\.[0-9]+)(k|Ki|M|Mi|G|Gi|T|Ti|P|Pi|E|Ei)?$": "must be an amount of bytes above 0, such as "
    "20Gi or 500M",
    COORDINATOR_URL: "must be a URL whose placeholders in braces are scheme, host, port, namespace and "
    "name only; without a user name, backslashes or white space",
    NETWORK: "must be a network such as 10.0.0.0/8",
    r"\S": "must not be blank: give it a value or remove it",
    DNS_NAME: "must be a Kubernetes name: lower-case letters, digits, - and ., such as s3-credentials",
    KMS_KEY: "must be the id, the ARN or the alias of a key: letters, digits, :, /, _, . and -",
    CONFIG_KEY: "must be a key of a ConfigMap: letters, digits, -, _ and ., such as train.jsonl",
}


# Quantities: a whole number is one without a unit.
_OF_NUMBERS_TOO = frozenset(pattern for pattern, words in REFUSALS.items() if "amount of bytes" in words)
_BELOW_A_BUCKET = re.compile(r"^s3://[^/]+/+[^/]")


def looks_like(pattern: str) -> Rule:
    """``pattern`` as a rule with its words. Raises KeyError when it has none."""
    value = "string(self)" if pattern in _OF_NUMBERS_TOO else "self"
    return Rule(path=(), cel=f"{value}.matches(r'{pattern}')", message=REFUSALS[pattern])


def _immutable(field: str) -> Rule:
    return Rule(
        path=(field,),
        cel="self == oldSelf",
        message=f"{field} cannot be changed; delete the task and apply it again, or use another name",
    )


# Of both kinds.
_KEY_OF_KMS = Rule(
    path=("storage",),
    cel="!has(self.kmsKeyId) || (has(self.serverSideEncryption) && self.serverSideEncryption.startsWith('aws:kms'))",
    message="kmsKeyId has a meaning only with serverSideEncryption: aws:kms or aws:kms:dsse",
    holds=lambda storage: (
        "kmsKeyId" not in storage or storage.get("serverSideEncryption", "").startswith("aws:kms")
    ),
    new_alone=True,
)

MUTABLE = frozenset({("output", "overwrite")})  # in a field that cannot be changed else

# All of a task's spec but whose turn it is, its times and what it may replace is immutable: a running task has read it
# already, and a finished adapter must be what its task says.
TASK_RULES: tuple[Rule, ...] = (
    *(_immutable(field) for field in ("baseModel", "lora", "dataset", "training", "storage")),
    *(_immutable(field) for field in ("evaluation", "initFrom")),
    Rule(
        path=("output",),
        cel="self.uri == oldSelf.uri && self.dtype == oldSelf.dtype && "
        "has(self.baseModelName) == has(oldSelf.baseModelName) && "
        "(!has(self.baseModelName) || self.baseModelName == oldSelf.baseModelName)",
        message="output cannot be changed; delete the task and apply it again, or use another name (overwrite alone can be "
        "changed)",
    ),
    Rule(
        path=(),
        cel="has(self.evaluation) == has(oldSelf.evaluation) && has(self.initFrom) == has(oldSelf.initFrom)",
        message="evaluation and initFrom cannot be added or removed; delete the task and apply it again",
    ),
    Rule(
        path=("output", "uri"),
        cel=f"!self.startsWith('s3://') || self.matches(r'{_BELOW_A_BUCKET.pattern}')",
        message="must name a prefix below the bucket, such as s3://bucket/prefix: an adapter needs its own folder",
        holds=lambda uri: not uri.startswith("s3://") or _BELOW_A_BUCKET.match(uri) is not None,
        new_alone=True,
    ),
    Rule(
        path=(),
        cel="!has(self.evaluation) || has(self.evaluation.uri) || has(self.dataset.heldOut)",
        message="evaluation needs rows: set evaluation.uri, or dataset.heldOut",
        holds=lambda spec: (
            "evaluation" not in spec or "uri" in spec["evaluation"] or "heldOut" in spec["dataset"]
        ),
    ),
    Rule(
        path=("dataset",),
        cel="[has(self.uri), has(self.uris), has(self.inline), has(self.configMapRef)].filter(there, there).size() == 1",
        message="exactly one of uri, uris, inline and configMapRef must be set",
    ),
    Rule(
        path=("dataset",),
        cel="!has(self.format) || self.format != 'text' || !has(self.trainOn) || self.trainOn == 'everything'",
        message="rows of format text have no answers: remove trainOn, or set it to everything",
        holds=lambda dataset: (
            dataset.get("format") != "text" or dataset.get("trainOn", "everything") == "everything"
        ),
    ),
    *COLUMN_RULES,
    Rule(
        path=("dataset",),
        cel="!has(self.chatTemplate) || !has(self.chatTemplateRef)",
        message="only one of chatTemplate and chatTemplateRef can be set",
        holds=lambda dataset: "chatTemplate" not in dataset or "chatTemplateRef" not in dataset,
    ),
    Rule(
        path=("dataset",),
        cel="!has(self.format) || self.format != 'text' || (!has(self.chatTemplate) && !has(self.chatTemplateRef))",
        message="rows of format text do not use a template: remove chatTemplate",
        holds=lambda dataset: (
            dataset.get("format") != "text" or not {"chatTemplate", "chatTemplateRef"} & {*dataset}
        ),
    ),
    Rule(
        path=("dataset",),
        cel="!has(self.split) || has(self.uri) || has(self.uris)",
        message="split selects files: set uri or uris, or remove split",
        holds=lambda dataset: "split" not in dataset or "uri" in dataset or "uris" in dataset,
    ),
    Rule(
        path=("dataset",),
        cel="!has(self.fileFormat) || self.fileFormat != 'parquet' || has(self.uri) || has(self.uris)",
        message="a Parquet file is not text: it must be at uri or uris",
        holds=lambda dataset: dataset.get("fileFormat") != "parquet" or "uri" in dataset or "uris" in dataset,
    ),
    Rule(
        path=("lora",),
        cel="!('all-linear' in self.targetModules) || size(self.targetModules) == 1",
        message="all-linear must be the only entry of targetModules; it already means every linear module",
        holds=lambda lora: "all-linear" not in lora["targetModules"] or len(lora["targetModules"]) == 1,
    ),
    Rule(
        path=("lora",),
        cel="size(self.targetModules) > 0 || size(self.targetParameters) > 0",
        message=NO_TARGETS,
        holds=lambda lora: bool(lora["targetModules"] or lora["targetParameters"]),
    ),
    Rule(
        path=("lora",),
        cel="size(self.targetParameters) == 0 || (self.type == 'lora' && !self.useDora && self.dropout == 0.0 && "
        "self.initLoraWeights != 'orthogonal')",
        message=PLAIN_PARAMETERS,
        holds=lambda lora: (
            not lora["targetParameters"]
            or (
                lora["type"] == "lora"
                and not (lora["useDora"] or lora["dropout"] or lora["initLoraWeights"] == "orthogonal")
            )
        ),
    ),
    Rule(
        path=("lora",),
        cel="size(self.targetParameters) == 0 || size(self.layersToTransform) == 0",
        message=PARAMETERS_BY_LAYER,
        holds=lambda lora: not lora["targetParameters"] or not lora["layersToTransform"],
    ),
    Rule(
        path=("training",),
        cel="!has(self.maxSteps) || self.warmupSteps <= self.maxSteps",
        message="warmupSteps must not be more than maxSteps, or the learning rate never reaches its peak",
        holds=lambda training: "maxSteps" not in training or training["warmupSteps"] <= training["maxSteps"],
    ),
    Rule(
        path=("training",),
        cel="!has(self.warmupRatio) || self.warmupSteps == 0",
        message="only one of warmupSteps and warmupRatio can be set",
        holds=lambda training: "warmupRatio" not in training or training["warmupSteps"] == 0,
    ),
    Rule(
        path=("training",),
        cel="!has(self.optimizer) || self.optimizer.type != 'adamw8bit'",
        message="optimizer.type must be adamw or lion: adamw8bit is not offered. It saves 6 bytes for each number of the "
        "adapter (0.25 GB of 16 GB for rank 16 on an 8B model); lion saves 4, and a quantized base far more",
        holds=lambda training: training.get("optimizer", {}).get("type") != "adamw8bit",
    ),
    Rule(
        path=("training",),
        cel="!has(self.optimizer) || self.optimizer.type != 'lion' || !has(self.optimizer.epsilon)",
        message="optimizer type lion has no epsilon: remove it, or set type to adamw",
        holds=lambda training: (
            training.get("optimizer", {}).get("type") != "lion" or "epsilon" not in training["optimizer"]
        ),
    ),
    Rule(
        path=("lora",),
        cel="self.initLoraWeights in ['default', 'gaussian', 'orthogonal']",
        message=OTHER_START,
        holds=lambda lora: lora["initLoraWeights"] in STARTS,
    ),
    Rule(
        path=("lora",),
        cel="self.initLoraWeights != 'orthogonal' || (self.rank % 2 == 0 && "
        "self.rankPattern.all(key, self.rankPattern[key] % 2 == 0))",
        message=ODD_RANK,
        holds=lambda lora: (
            lora["initLoraWeights"] != "orthogonal"
            or not any(rank % 2 for rank in (lora["rank"], *lora["rankPattern"].values()))
        ),
    ),
    Rule(
        path=("lora",),
        cel="self.type != 'vera' || (self.alpha == 32.0 && size(self.rankPattern) == 0 && size(self.alphaPattern) == 0 && "
        "!self.useRslora && !self.useDora && self.initLoraWeights == 'default' && !has(self.loraplusLrRatio))",
        message=VERA_ALONE,
        holds=lambda lora: (
            lora["type"] != "vera"
            or (
                lora["alpha"] == USUAL_ALPHA
                and not (lora["rankPattern"] or lora["alphaPattern"] or lora["useRslora"] or lora["useDora"])
                and lora["initLoraWeights"] == "default"
                and "loraplusLrRatio" not in lora
            )
        ),
    ),
    Rule(
        path=("lora",),
        cel="self.type == 'vera' || !has(self.dInitial)",
        message=ONLY_VERA,
        holds=lambda lora: lora["type"] == "vera" or "dInitial" not in lora,
    ),
    Rule(
        path=(),
        cel="!has(self.initFrom) || self.lora.type == 'lora'",
        message="initFrom cannot be used with lora.type vera: remove it",
        holds=lambda spec: "initFrom" not in spec or spec["lora"]["type"] == "lora",
    ),
    Rule(
        path=("lora",),
        cel="!self.useDora || self.dropout == 0.0",
        message=DORA_WITH_DROPOUT,
        holds=lambda lora: not lora["useDora"] or not lora["dropout"],
    ),
    *OBJECTIVE_RULES,
    _KEY_OF_KMS,
)

PIPELINE_RULES: tuple[Rule, ...] = (
    Rule(
        path=("replicas",),
        cel="self.min <= self.max",
        message="min must not be more than max",
        holds=lambda replicas: replicas["min"] <= replicas["max"],
    ),
    Rule(
        path=("model", "uri"),
        cel="!self.startsWith('hf://datasets/')",
        message="the address of a base model must not name a data set: write hf://OWNER/NAME",
        holds=lambda uri: not uri.startswith("hf://datasets/"),
    ),
    Rule(
        path=("allowedNamespaces",),
        cel="self.from != 'Selector' || (has(self.selector) && size(self.selector) > 0)",
        message="from: Selector needs at least one label in selector",
        holds=lambda allowed: allowed["from"] != "Selector" or bool(allowed.get("selector")),
    ),
    Rule(
        path=("allowedNamespaces",),
        cel="self.from == 'Selector' || !has(self.selector)",
        message="remove selector: it requires from: Selector",
        holds=lambda allowed: allowed["from"] == "Selector" or "selector" not in allowed,
    ),
    _KEY_OF_KMS,
)


def broken(spec: Mapping[str, Any], rules: tuple[Rule, ...]) -> Iterator[tuple[Path, str]]:
    """The path and message of each rule that ``spec`` breaks.

    ``spec`` is the JSON of a validated model: camelCase names, defaults filled in, absent fields left out.
    """
    for rule in rules:
        if rule.holds is None:
            continue
        value: Any = spec
        for name in rule.path:
            value = value.get(name, {})
        if not rule.holds(value):
            yield rule.path, rule.message
