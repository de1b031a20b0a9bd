"""Nothing in a spec or a status is of any size, and what a status has out of its bounds is as if it were not there."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from mlora_operator.api import pipeline, pipeline_status, task
from mlora_operator.api.bounded import DEEPEST, MOST_CHARACTERS, MOST_VALUES
from mlora_operator.api.crd import pipeline_crd, task_crd
from mlora_operator.api.meta import Condition
from mlora_operator.api.pipeline import Worker
from mlora_operator.api.readable import readable
from tests.bounds import unbounded
from tests.fixtures.pod_fields import is_of_a_pod

# Parts of a pod that the API server knows and this project does not: whatever is in them, ``bounded`` limits how much and
# how deep it is, and they travel no further than into the StatefulSet.
OPAQUE = (
    pipeline.Resources,
    pipeline.Toleration,
    pipeline.Affinity,
    pipeline.EnvVar,
    pipeline.Volume,
    pipeline.VolumeMount,
    pipeline.LocalObjectReference,
)


@pytest.mark.parametrize(
    "model",
    [task.LoRATaskSpec, task.TaskStatus, pipeline.LoRAPipelineSpec, pipeline_status.PipelineStatus],
    ids=lambda one: one.__name__,
)
def test_every_number_text_and_list_of_specs_and_statuses_has_bounds(model):
    assert unbounded(model, justified=OPAQUE) == []


def test_only_parts_of_a_pod_are_left_out():
    loose = unbounded(pipeline.LoRAPipelineSpec)
    assert loose
    assert all(".worker:Worker." in line for line in loose)


@pytest.mark.parametrize("definition", [task_crd(), pipeline_crd()], ids=["LoRATask", "LoRAPipeline"])
def test_the_schema_in_the_cluster_has_these_bounds(definition):
    """But those of keys, which a structural schema cannot say."""
    schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    assert list(_loose(schema["spec"], "spec")) == []
    assert list(_loose(schema["status"], "status")) == []


def _loose(node, path):
    if is_of_a_pod(path.replace("[]", "")):
        return
    kind = node.get("type", "string")
    if kind == "object" and "properties" in node:
        for name, child in node["properties"].items():
            yield from _loose(child, f"{path}.{name}")
    elif kind == "object" and "additionalProperties" in node:
        if "maxProperties" not in node:
            yield path
        yield from _loose(node["additionalProperties"], f"{path}[]")
    elif kind == "object":
        assert ".worker." in path, path
    elif kind == "array":
        if "maxItems" not in node:
            yield path
        yield from _loose(node["items"], f"{path}[]")
    else:
        number = kind in ("integer", "number") and not {"minimum", "maximum"} <= node.keys()
        if number or (kind == "string" and not {"maxLength", "enum"} & node.keys()):
            yield path


def _nested(depth):
    value = {}
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("affinity", "words"),
    [
        (_nested(DEEPEST + 1), "nested too deeply"),
        ({"a": [_nested(100_000)]}, "nested too deeply"),
        ({"a": ["x"] * MOST_VALUES}, "too large"),
        ({"a": "x" * MOST_CHARACTERS}, "too large"),
        ({"x" * (MOST_CHARACTERS + 1): 1}, "too large"),
        ({"a": 10**400}, "more than 64 bits"),
    ],
    ids=["deep", "very deep", "values", "characters", "key", "digits"],
)
def test_a_part_of_a_pod_that_is_too_large_is_refused(affinity, words):
    with pytest.raises(ValidationError, match=words):
        Worker(affinity=affinity)


def test_a_part_of_a_pod_of_a_usual_size_is_passed_on_as_it_is():
    term = {"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["a100", "h100"]}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term] * 100}}
    affinity = {"nodeAffinity": required}
    assert Worker(affinity=affinity).affinity == affinity


def test_a_message_that_is_too_long_is_cut():
    made = Condition(
        type="Ready",
        status="True",
        reason="Ready",
        message="x" * 10_000,
        last_transition_time="2026-01-01T00:00:00Z",
    )
    assert len(made.message) == 4096


DONE = {
    "type": "Succeeded", "status": "True", "reason": "AdapterUploaded", "lastTransitionTime": "2026-01-01T00:00:00Z"
}  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "absent"),
    [
        ({"step": 10**400}, "step"),
        ({"step": -1}, "step"),
        ({"step": "many"}, "step"),
        ({"loss": "9" * 1000}, "loss"),
        ({"startTime": "2026-01-01T00:00:00Z" + " " * 100}, "start_time"),
        ({"data": {"rows": 10**400, "used": 1}}, "data"),
        ({"data": {"rows": 1, "used": 1, "dropped": {"x" * 1000: 1}}}, "data.dropped"),
        ({"data": {"rows": 1, "used": 1, "tokens": 10**400}}, "data.tokens"),
        ({"adapter": "s3://here"}, "adapter"),
        ({"conditions": [DONE, {"type": "Failed", "status": "Perhaps"}]}, "conditions.1"),
        ({"conditions": [DONE, {"type": "x" * 1000} | DONE | {"type": "x" * 1000}]}, "conditions.1"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_of_a_status_is_out_of_its_bounds_is_absent_and_the_rest_holds(wrong, absent):
    """A task that succeeded stays so, whatever else its status says: it would train again."""
    status = readable(task.TaskStatus, {"conditions": [DONE], "run": "r", "totalSteps": 7} | wrong)
    assert [one.type for one in status.conditions] == ["Succeeded"]
    assert (status.run, status.total_steps) == ("r", 7)
    first, _, second = absent.partition(".")
    found = getattr(status, first)
    if first == "conditions":
        return
    if second:
        default = task.DataCounts(rows=1, used=1)
        assert getattr(found, second) == getattr(default, second)
        assert found.rows == 1
    else:
        assert found is None


@pytest.mark.parametrize(
    "document", [None, [], "?", 7, {"conditions": "?"}, {"conditions": [[[]]]}, {"data": []}]
)
@pytest.mark.parametrize(
    "model", [task.TaskStatus, pipeline_status.PipelineStatus], ids=lambda one: one.__name__
)
def test_a_status_that_is_none_at_all_is_an_empty_one(model, document):
    assert readable(model, document) == model()


def _aliases(model):
    return [field.alias or name for name, field in model.model_fields.items()]


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.just(10**400)
    | st.floats()
    | st.text(max_size=8)
    | st.just("x" * 5000)
    | st.just("2026-01-01T00:00:00Z"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["stage", "modules", "rows", "used", "count", "tokens", "uri", "since", "pods", "name"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
_NAMES = sorted(
    {name for model in (task.TaskStatus, pipeline_status.PipelineStatus) for name in _aliases(model)}
)


@given(document=st.dictionaries(st.sampled_from([*_NAMES, "other"]), _JSON, max_size=6))
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_status_makes_its_reader_fail(document):
    for model in (task.TaskStatus, pipeline_status.PipelineStatus):
        read = readable(model, {**document, "conditions": [DONE]})
        assert [one.type for one in read.conditions] == ["Succeeded"]
