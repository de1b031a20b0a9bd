"""Manifest files become objects, or problems that name file, line and field."""

from __future__ import annotations

import re

import pytest

from mlora_operator.local.manifests import Manifests, read_manifests

TASK = """\
apiVersion: mlora.dev/v1alpha1
kind: LoRATask
metadata:
  name: {name}
spec:
  baseModel: m
  lora: {{rank: 16}}
  dataset: {{uri: s3://data/train.jsonl}}
  training:
    learningRate: 1e-4
    maxSteps: 1e+03
  output: {{uri: s3://adapters/{name}}}
"""
PIPELINE = """\
apiVersion: mlora.dev/v1alpha1
kind: LoRAPipeline
metadata: {name: p, namespace: team-a}
spec: {model: {name: m, uri: s3://models/m}}
"""
SECRET = """\
apiVersion: v1
kind: Secret
metadata: {name: s3-credentials}
data: {AWS_ACCESS_KEY_ID: a2V5, both: b2xk}
stringData: {AWS_SECRET_ACCESS_KEY: secret, both: new}
"""
NAMESPACE = "apiVersion: v1\nkind: Namespace\nmetadata: {name: team-a}\n"


def task(name: str = "a") -> str:
    return TASK.format(name=name)


def read(*texts: str) -> Manifests:
    return read_manifests([(f"f{index}.yaml", text) for index, text in enumerate(texts)])


def test_good_files_become_typed_objects() -> None:
    manifests = read(f"{task('a')}---\n{task('b')}---\n{SECRET}", PIPELINE, NAMESPACE)
    assert manifests.problems == ()
    assert [(one.place.namespace, one.place.name) for one in manifests.tasks] == [
        ("default", "a"),
        ("default", "b"),
    ]
    assert manifests.tasks[0].spec.training.learning_rate == 1e-4
    assert manifests.tasks[0].spec.training.max_steps == 1000
    assert [(one.place.namespace, one.place.name) for one in manifests.pipelines] == [("team-a", "p")]
    assert [one.kind for one in manifests.others] == ["Namespace"]


def test_a_secret_is_decoded_and_its_values_are_not_in_its_repr() -> None:
    (secret,) = read(SECRET).secrets
    assert dict(secret.data) == {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "both": "new",
    }
    assert "secret" not in repr(secret).replace("s3-credentials", "").replace("Secret", "")


def test_a_list_is_read_as_its_items() -> None:
    items = "".join("- " + task(name).replace("\n", "\n  ").rstrip() + "\n" for name in ("a", "b"))
    manifests = read(f"apiVersion: v1\nkind: List\nitems:\n{items}")
    assert manifests.problems == ()
    assert [one.place.line for one in manifests.tasks] == [4, 16]


def changed(old: str, new: str) -> str:
    text = task()
    assert old in text
    return text.replace(old, new)


BAD: dict[str, tuple[str, int, str, str]] = {
    "a quoted number": (changed("1e-4", '"1e-4"'), 10, "spec.training.learningRate", "'1e-4'"),
    "a rank of zero": (changed("rank: 16", "rank: 0"), 7, "spec.lora.rank", "greater than or equal to 1"),
    "a boolean as rank": (changed("rank: 16", "rank: yes"), 7, "spec.lora.rank", "integer"),
    "half a step": (changed("1e+03", "1.5"), 11, "spec.training.maxSteps", "integer"),
    "a misspelt field": (changed("maxSteps", "maxstep"), 11, "spec.training.maxstep", "unknown field"),
    "a missing field": (changed("  baseModel: m\n", ""), 5, "spec.baseModel", "is missing"),
    "a rule": (
        changed("{rank: 16}", "{targetModules: [q_proj, all-linear]}"),
        7,
        "spec.lora",
        "only entry",
    ),
    "no source": (
        changed("{uri: s3://data/train.jsonl}", "{}"),
        8,
        "spec.dataset",
        "exactly one of uri, uris, inline and configMapRef",
    ),
    "no spec": (
        "apiVersion: mlora.dev/v1alpha1\nkind: LoRATask\nmetadata: {name: a}\n",
        1,
        "spec",
        "is missing",
    ),
    "a wrong version": (changed("v1alpha1", "v1"), 1, "apiVersion", "must be mlora.dev/v1alpha1"),
    "a misspelt kind": (changed("LoRATask", "LoraTask"), 2, "kind", "did you mean LoRATask"),
    "a foreign group": (changed("mlora.dev/v1alpha1", "v1"), 1, "apiVersion", "must be mlora.dev/v1alpha1"),
    "no kind": (changed("kind: LoRATask\n", ""), 1, "", "kind is missing"),
    "no name": (changed("  name: a\n", "  labels: {}\n"), 3, "metadata.name", "is missing"),
    "a bad name": (changed("name: a\n", "name: A_b\n"), 4, "metadata.name", "lower-case"),
    "a numeric name": (changed("name: a\n", "name: 12\n"), 4, "metadata.name", "put it in quotes (got 12)"),
    "an annotation that is a number": (
        changed("name: a\n", "name: a\n  annotations:\n    mlora.dev/retry: 1764361800\n"),
        6,
        "metadata.annotations.mlora.dev/retry",
        "must be text; put it in quotes (got 1764361800)",
    ),
    "a label that is a boolean": (
        changed("name: a\n", "name: a\n  labels: {nightly: yes}\n"),
        5,
        "metadata.labels.nightly",
        "must be text; put it in quotes (got True)",
    ),
    "labels that are none": (
        changed("name: a\n", "name: a\n  labels: [a]\n"),
        5,
        "metadata.labels",
        "must be a mapping",
    ),
    "no target modules": (
        changed("{rank: 16}", "{targetModules: []}"),
        7,
        "spec.lora",
        "targetModules must name modules such as q_proj",
    ),
    "a name in the place of a list": (
        changed("{rank: 16}", "{targetModules: q_proj}"),
        7,
        "spec.lora.targetModules",
        "must be a list",
    ),
    "text in the place of a mapping": (changed("{rank: 16}", "small"), 7, "spec.lora", "must be a mapping"),
    "a number as text": (
        changed("baseModel: m", "baseModel: 7"),
        6,
        "spec.baseModel",
        "put it in quotes (got 7)",
    ),
    "a bad namespace": (
        changed("name: a\n", "name: a\n  namespace: x.y\n"),
        5,
        "metadata.namespace",
        "lower-case",
    ),
    "a field beside spec": (task() + "sepc: {}\n", 13, "sepc", "unknown field"),
    "text": ("hello\n", 1, "", "expected an object"),
    "broken YAML": (changed("{rank: 16}", "{rank: 16"), 8, "", "not YAML"),
    "a secret that is not base64": (SECRET.replace("a2V5", "k y"), 4, "data.AWS_ACCESS_KEY_ID", "base64"),
    "a secret that is a number": (
        SECRET.replace("secret,", "12,"),
        5,
        "stringData.AWS_SECRET_ACCESS_KEY",
        "quotes",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_problem_names_file_line_and_field(case: str) -> None:
    text, line, field, words = BAD[case]
    manifests = read(text)
    (problem,) = manifests.problems
    assert (problem.file, problem.line, problem.field) == ("f0.yaml", line, field)
    assert words in problem.message
    assert str(problem).startswith(f"f0.yaml:{line}: ")
    assert (manifests.tasks, manifests.secrets) == ((), ())


def test_all_problems_of_a_file_are_told_at_once() -> None:
    text = changed("rank: 16", "rank: 0").replace("1e-4", "fast").replace("name: a\n", "name: A\n")
    assert [problem.field for problem in read(text).problems] == [
        "metadata.name",
        "spec.lora.rank",
        "spec.training.learningRate",
    ]


def test_the_good_objects_beside_a_bad_one_are_still_read() -> None:
    manifests = read(changed("rank: 16", "rank: 0") + "---\n" + task("b"))
    assert len(manifests.problems) == 1
    assert [one.place.name for one in manifests.tasks] == ["b"]


def test_the_same_object_twice_is_a_problem() -> None:
    (problem, *_) = read(task(), task()).problems
    assert (problem.file, problem.field) == ("f1.yaml", "metadata.name")
    assert "f0.yaml:1" in problem.message


@pytest.mark.parametrize(
    ("second", "where"),
    [
        ("s3://adapters/x/a/b", "a folder above it"),
        ("s3://adapters/x", "a folder below it"),
        ("s3://adapters/x/a/", "the same place"),
        ("s3://adapters/x/ab", None),
        ("s3://other/x/a/b", None),
    ],
)
def test_no_output_lies_in_another_ones(second: str, where: str | None) -> None:
    """The operator would never accept the second one."""
    first = task("a").replace("s3://adapters/a", "s3://adapters/x/a")
    found = read(first, task("b").replace("s3://adapters/b", second)).problems
    told = [f"LoRATask/a at f0.yaml:1 writes to {where}"] if where is not None else []
    assert [problem.message for problem in found] == told


def test_two_tasks_may_not_write_to_the_same_place() -> None:
    (problem,) = read(task("a"), task("b").replace("s3://adapters/b", "s3://adapters/a/")).problems
    assert (problem.object, problem.field) == ("LoRATask/b", "spec.output.uri")
    assert "LoRATask/a" in problem.message


@pytest.mark.parametrize(
    ("lora", "field", "told"),
    [
        ("targetModules: [q_proj, '(?<=self_attn).q_proj']", "targetModules", "it looks behind"),
        ("excludeModules: ['(q)_\\1roj']", "excludeModules", "it refers to a group"),
        ("rankPattern: {'*.mlp': 4}", "rankPattern", r"\* has nothing to repeat"),
        ("alphaPattern: {'.{0,999}.{0,999}.{0,999}': 4}", "alphaPattern", "more than 2000 instructions"),
    ],
)
def test_patterns_that_no_model_could_be_asked_for_are_refused(lora: str, field: str, told: str) -> None:
    (problem,) = read(task().replace("{rank: 16}", f"{{{lora}}}")).problems
    assert (problem.line, problem.field) == (7, f"spec.lora.{field}")
    assert re.search(told, problem.message)


@pytest.mark.parametrize(
    ("story", "priorities", "pipelines", "refused"),
    [
        ("nothing is said", "{}", 1, False),
        ("a bound for all guests", "{default: {max: 4}}", 1, True),
        ("a bound for its namespace", "{namespaces: {default: {max: 4}}}", 1, True),
        ("that it keeps", "{namespaces: {default: {max: 5}}}", 1, False),
        ("another pipeline of these files has none", "{default: {max: 4}}", 2, False),
    ],
)
def test_a_priority_that_no_pipeline_of_the_files_lets_it_have(
    story: str, priorities: str, pipelines: int, refused: bool
) -> None:
    bounded = PIPELINE.replace("}}\n", f"}}, priorities: {priorities}}}\n")
    free = PIPELINE.replace("name: p,", "name: q,") if pipelines == 2 else NAMESPACE
    task = TASK.format(name="t").replace("  baseModel: m\n", "  baseModel: m\n  priority: 5\n")
    problems = read_manifests([("a.yaml", "---\n".join((bounded, free, task)))]).problems
    assert bool(problems) == refused, (story, problems)
    for one in problems:
        assert (one.object, one.field) == ("LoRATask/t", "spec.priority")
        assert one.message.startswith(
            "5 is above 4, the most that tasks of namespace default may have here (spec.prior"
        )
