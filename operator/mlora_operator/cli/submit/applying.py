"""Bringing a submission into a cluster: all of it, or nothing where that can be known before."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from mlora_operator.cli import exit_codes
from mlora_operator.cli.kube.client import JSON, KubeError
from mlora_operator.cli.kube.retry import Clock, RetryTimeouts, Sleep, insist
from mlora_operator.cli.output import CommandError
from mlora_operator.cli.submit.conflict import Step, decide
from mlora_operator.cli.submit.manifests import Submission, title, within

_DELETION = 300.0  # seconds until a deleted task must be gone
T = TypeVar("T")


class TaskWriter(Protocol):
    """The part of ``cluster.Cluster`` that is needed here."""

    namespace: str

    async def find_task(self, namespace: str, name: str) -> JSON | None: ...

    async def is_namespaced(self, manifest: JSON) -> bool: ...

    async def apply(self, manifest: JSON, *, force: bool, dry_run: bool = False) -> JSON: ...

    async def try_create(self, manifest: JSON) -> None: ...

    async def delete(self, namespace: str, name: str, uid: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Submitted:
    """A task of the submission as it is in the cluster now."""

    namespace: str
    name: str
    uid: str
    step: Step
    task: JSON


@dataclass(frozen=True, slots=True)
class ApplyContext:
    """The tools of this module: whom to ask, how long to insist, and the clock."""

    target: TaskWriter
    force: bool
    patience: RetryTimeouts
    now: Clock
    sleep: Sleep

    async def insist(self, call: Callable[[], Awaitable[T]], seconds: float) -> T:
        return await insist(call, seconds, self.now, self.sleep)


async def apply_submission(
    tools: ApplyContext, submission: Submission, *, replace: bool, say: Callable[[str], None]
) -> list[Submitted]:
    """Applies ``submission``, tasks last, and returns the tasks. ``say`` is told of each object.

    1. For each task it is decided what to do; if one is refused, nothing is written.
    2. The API server is asked for all objects whether it would take them (dry run); if it refuses one, nothing is
       written. Left out are objects in a namespace that the submission itself makes.
    3. Objects that are no tasks are applied in the order of the files, then the tasks.

    Every write may be repeated, so it is insisted on while the cluster does not answer. Raises CommandError.
    """
    target = tools.target
    tasks = [within(one, target.namespace) for one in submission.tasks]
    there = [
        await tools.insist(lambda one=one: _find(target, one), tools.patience.first)  # type: ignore[misc]
        for one in tasks
    ]
    steps = _decided(tasks, there, replace)
    others = [await _placed(tools, one) for one in submission.others]
    new = {one["metadata"]["name"] for one in others if one["kind"] == "Namespace"}
    for manifest, step in [*((one, Step.APPLY) for one in others), *zip(tasks, steps, strict=True)]:
        if step is not Step.KEEP and manifest["metadata"].get("namespace") not in new:
            await _dry_run(tools, manifest, step)
    for manifest in others:
        await _apply(tools, manifest, force=tools.force)
        say(f"{title(manifest)} applied")
    submitted = []
    for manifest, found, step in zip(tasks, there, steps, strict=True):
        if step is not Step.KEEP:
            if found is not None and step is not Step.APPLY:
                await _gone(tools, found, delete=step is Step.REPLACE)
            found = await _apply(tools, manifest, force=True)
        assert found is not None
        meta = found["metadata"]
        submitted.append(Submitted(meta["namespace"], meta["name"], meta["uid"], step, found))
        say(f"{title(manifest)} {step}")
    return submitted


def _decided(tasks: list[JSON], there: list[JSON | None], replace: bool) -> list[Step]:
    """Raises one CommandError for all tasks that are refused."""
    steps, refusals = [], []
    for wanted, found in zip(tasks, there, strict=True):
        try:
            steps.append(decide(wanted, found, replace=replace))
        except CommandError as error:
            refusals.append(error)
    if refusals:
        raise CommandError("\n".join(map(str, refusals)), refusals[0].exit_code)
    return steps


def _find(target: TaskWriter, manifest: JSON) -> Awaitable[JSON | None]:
    return target.find_task(manifest["metadata"]["namespace"], manifest["metadata"]["name"])


async def _placed(tools: ApplyContext, manifest: JSON) -> JSON:
    """In its namespace, if objects of its kind have one."""
    namespaced = await tools.insist(lambda: tools.target.is_namespaced(manifest), tools.patience.first)
    return within(manifest, tools.target.namespace) if namespaced else manifest


async def _dry_run(tools: ApplyContext, manifest: JSON, step: Step) -> None:
    if step is Step.REPLACE:  # what is there now could not be changed into it
        await _asked(tools, manifest, lambda: tools.target.try_create(manifest))
    else:
        force = tools.force or step is not Step.APPLY or manifest["kind"] == "LoRATask"
        await _asked(tools, manifest, lambda: tools.target.apply(manifest, force=force, dry_run=True))


async def _apply(tools: ApplyContext, manifest: JSON, *, force: bool) -> JSON:
    return await _asked(tools, manifest, lambda: tools.target.apply(manifest, force=force))


async def _asked(tools: ApplyContext, manifest: JSON, call: Callable[[], Awaitable[T]]) -> T:
    try:
        return await tools.insist(call, tools.patience.later)
    except KubeError as error:
        raise refusal(manifest, error) from error


async def _gone(tools: ApplyContext, found: JSON, *, delete: bool) -> None:
    """Returns when this very task is no longer there."""
    meta = found["metadata"]
    namespace, name, uid = meta["namespace"], meta["name"], meta["uid"]
    if delete:
        await tools.insist(lambda: tools.target.delete(namespace, name, uid), tools.patience.later)
    end = tools.now() + _DELETION
    while True:
        now_there = await tools.insist(lambda: tools.target.find_task(namespace, name), tools.patience.later)
        if now_there is None or now_there["metadata"]["uid"] != uid:
            return
        if tools.now() > end:
            message = (
                f"loratask/{name} is still being deleted after {_DELETION:g} seconds: check that the operator is "
                f"running"
            )
            raise CommandError(message, exit_codes.TIMEOUT)
        await tools.sleep(0.5)


def refusal(manifest: JSON, error: KubeError) -> CommandError:
    """The API server's words, and a number that says whose turn it is."""
    what = f"{title(manifest)}: {error}"
    if error.status == 401 or (error.status == 403 and " cannot " in str(error)):  # not known, or no right
        return CommandError(what, exit_codes.UNREACHABLE)
    if error.status == 404:
        return CommandError(what, exit_codes.NOT_FOUND)
    if error.status == 409:
        return CommandError(f"{what} (use --force-conflicts to take over the fields)", exit_codes.REFUSED)
    return CommandError(what, exit_codes.REFUSED if error.status < 500 else exit_codes.UNREACHABLE)
