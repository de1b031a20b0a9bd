"""``mlora submit``: tasks into a cluster and, with ``--wait``, through it: the command of a CI pipeline."""

from __future__ import annotations

import asyncio
import signal
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from mlora_operator.cli import exit_codes
from mlora_operator.cli.kube.choice import ClusterChoice
from mlora_operator.cli.options import (
    ContextOption,
    KubeconfigOption,
    NamespaceOption,
    OutputOption,
    TimeoutOption,
    duration,
)
from mlora_operator.cli.output import CommandError, OutputFormat
from mlora_operator.cli.validate.command import read_texts

if TYPE_CHECKING:
    from mlora_operator.cli.kube.cluster import KubeCluster
    from mlora_operator.cli.submit.awaiting import Waiting
    from mlora_operator.cli.submit.manifests import Submission
    from mlora_operator.cli.submit.output import SubmitProgress

_LEAVING = 30.0  # seconds to suspend or delete what was left when the wait ends early


class Leave(StrEnum):
    """What happens to unfinished tasks when the wait ends early."""

    KEEP = "keep"
    SUSPEND = "suspend"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class SubmitOptions:
    choice: ClusterChoice
    replace: bool
    force_conflicts: bool
    wait: bool
    timeout: float | None
    leave: Leave
    refused_after: float
    progress_every: float


def submit(
    files: Annotated[
        list[str],
        typer.Option("--filename", "-f", metavar="FILE", help="Manifest file; - is standard input."),
    ],
    wait: Annotated[bool, typer.Option("--wait", help="Follow the tasks until all have finished.")] = False,
    timeout: TimeoutOption = None,
    leave: Annotated[
        Leave,
        typer.Option("--on-timeout", help="Action for unfinished tasks after --timeout or an interrupt."),
    ] = Leave.KEEP,
    replace: Annotated[
        bool,
        typer.Option(
            "--replace",
            help="Delete a task of the same name that failed or has another spec, and train again.",
        ),
    ] = False,
    name_suffix: Annotated[
        str | None,
        typer.Option(metavar="SUFFIX", help="Append -SUFFIX to each task's name and output folder."),
    ] = None,
    force_conflicts: Annotated[
        bool,
        typer.Option("--force-conflicts", help="Take over fields that other managers own, as in kubectl."),
    ] = False,
    refused_after: Annotated[
        float,
        typer.Option(
            parser=duration,
            metavar="DURATION",
            help="Stop waiting for a task that the operator has rejected for this long (exit code 7).",
        ),
    ] = "1m",  # type: ignore[assignment] # goes through the parser
    progress_every: Annotated[
        float,
        typer.Option(parser=duration, metavar="DURATION", help="Interval between progress lines of a task."),
    ] = "10s",  # type: ignore[assignment]
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
    output: OutputOption = OutputFormat.TEXT,
) -> None:
    """Validate manifests, apply them to the cluster and, with --wait, follow the tasks to their end.

    The exit code is 0 when all tasks succeeded, 1 when one failed, 7 when one was rejected, 3 after --timeout, and 4
    when the cluster does not respond. Tasks that have already finished are not trained again.
    """
    from mlora_operator.cli.submit.manifests import read_submission
    from mlora_operator.cli.submit.output import SubmitProgress

    submission = read_submission(read_texts(files), namespace, name_suffix)
    options = SubmitOptions(
        ClusterChoice(namespace, context, kubeconfig),
        replace,
        force_conflicts,
        wait,
        timeout,
        leave,
        refused_after,
        progress_every,
    )
    try:
        code = asyncio.run(_submit(submission, options, SubmitProgress(output is OutputFormat.JSON)))
    except KeyboardInterrupt:
        raise CommandError("interrupted", exit_codes.INTERRUPTED) from None
    raise typer.Exit(code)


async def _submit(submission: Submission, options: SubmitOptions, telling: SubmitProgress) -> int:
    from mlora_operator.cli.kube.cluster import connect
    from mlora_operator.cli.kube.retry import RetryTimeouts
    from mlora_operator.cli.submit.applying import ApplyContext, apply_submission
    from mlora_operator.cli.submit.awaiting import Waiting
    from mlora_operator.cli.submit.outcomes import TaskResult, exit_code

    start = time.monotonic()
    patience = RetryTimeouts()
    async with connect(options.choice) as cluster:
        tools = ApplyContext(cluster, options.force_conflicts, patience, time.monotonic, asyncio.sleep)
        submitted = await apply_submission(tools, submission, replace=options.replace, say=telling.said)
        telling.submitted(submitted)
        waiting = Waiting(submitted, options.refused_after)
        waiting.look(lambda _: None, start)
        if options.wait:
            left = None if options.timeout is None else options.timeout - (time.monotonic() - start)
            early = await _wait(cluster, waiting, options, left, telling)
        else:
            early = None
        for key, outcome in waiting.outcomes.items():
            if outcome in (TaskResult.FAILED, TaskResult.REFUSED):
                task = waiting.tasks[key]
                events = await cluster.warnings_about(key[0], task["metadata"]["uid"])
                telling.failure(task, outcome, events)
        code = exit_code(waiting.outcomes.values()) or (early or exit_codes.OK)
        telling.ended(waiting, code)
    return code


async def _wait(
    cluster: KubeCluster,
    waiting: Waiting,
    options: SubmitOptions,
    seconds: float | None,
    telling: SubmitProgress,
) -> int | None:
    """The exit code of an early end, or None. SIGTERM, which CI systems send, ends it as Ctrl-C does."""
    from mlora_operator.cli.kube.retry import RetryTimeouts
    from mlora_operator.cli.submit.awaiting import wait_for
    from mlora_operator.cli.submit.journal import Journal

    journal = Journal(options.progress_every)

    def seen(task: dict[str, object]) -> None:
        for entry in journal.entries(task, time.monotonic()):
            telling.entry(entry)

    loop = asyncio.get_running_loop()
    main = asyncio.current_task()
    assert main is not None
    signals = (signal.SIGINT, signal.SIGTERM)
    for one in signals:
        loop.add_signal_handler(one, main.cancel)
    try:
        async with asyncio.timeout(seconds):
            await wait_for(cluster, waiting, RetryTimeouts(), seen, time.monotonic)
        return None
    except TimeoutError:
        early, why = exit_codes.TIMEOUT, f"not all tasks finished within {options.timeout:g} seconds"
    except asyncio.CancelledError:
        main.uncancel()
        early, why = exit_codes.INTERRUPTED, "interrupted"
    finally:
        for one in signals:
            loop.remove_signal_handler(one)  # the next one ends the command at once
    telling.note(f"{why}; {await _left(cluster, waiting, options.leave)}")
    return early


async def _left(cluster: KubeCluster, waiting: Waiting, leave: Leave) -> str:
    """Does what the user wants with the unfinished tasks, and says it."""
    from mlora_operator.cli.kube.client import KubeError
    from mlora_operator.cli.kube.cluster import NO_ANSWER

    names = ", ".join(name for _, name in waiting.open)
    if leave is Leave.KEEP:
        return f"still in the cluster: {names}"
    try:
        async with asyncio.timeout(_LEAVING):
            for namespace, name in waiting.open:
                if leave is Leave.SUSPEND:
                    await cluster.suspend(namespace, name)
                else:
                    uid = waiting.tasks[namespace, name]["metadata"]["uid"]
                    await cluster.delete(namespace, name, uid)
    except (KubeError, *NO_ANSWER) as error:
        return f"cannot {leave} {names}: {error or 'no answer'}"
    return f"{'suspended' if leave is Leave.SUSPEND else 'deleted'}: {names}"
