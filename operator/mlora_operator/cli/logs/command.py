"""``mlora logs``: what happened to a task. It has no pod of its own, so this is not what a container printed."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from mlora_operator.cli import exit_codes
from mlora_operator.cli.kube.choice import ClusterChoice
from mlora_operator.cli.logs.story import JSON, Story, StoryLine
from mlora_operator.cli.options import (
    ContextOption,
    KubeconfigOption,
    NamespaceOption,
    OutputOption,
    TimeoutOption,
    duration,
)
from mlora_operator.cli.output import CommandError, OutputFormat, print_json, stderr, stdout
from mlora_operator.cli.task_table import row
from mlora_operator.manifests.names import LABEL_LIMIT, LABEL_PIPELINE, safe_name
from mlora_worker.lines import headed, one_line

if TYPE_CHECKING:
    from mlora_operator.cli.kube.cluster import KubeCluster


def logs(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of a LoRATask.")],
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Show what happens until the task has finished.")
    ] = False,
    progress_every: Annotated[
        float,
        typer.Option(parser=duration, metavar="DURATION", help="Interval between lines of progress."),
    ] = "10s",  # type: ignore[assignment] # goes through the parser
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
    timeout: TimeoutOption = None,
    output: OutputOption = OutputFormat.TEXT,
) -> None:
    """Show a task's conditions, events and progress in the order of time.

    A task has no pod of its own: it trains beside others in the workers of its pipeline. The command for their logs is
    printed at the end. With --follow, the exit code is 0 when the task succeeded, and 1 when it failed.
    """
    choice = ClusterChoice(namespace, context, kubeconfig)
    try:
        code = asyncio.run(_logs(name, choice, follow, progress_every, timeout, output))
    except TimeoutError:
        message = f"loratask/{name} had not finished after {timeout:g} seconds"
        raise CommandError(message, exit_codes.TIMEOUT) from None
    raise typer.Exit(code)


async def _logs(
    name: str,
    choice: ClusterChoice,
    following: bool,
    every: float,
    seconds: float | None,
    output: OutputFormat,
) -> int:
    from mlora_operator.cli.kube.cluster import connect
    from mlora_operator.cli.kube.retry import RetryTimeouts
    from mlora_operator.cli.submit.follow import follow

    story = Story(every)
    async with asyncio.timeout(seconds), connect(choice) as cluster:
        task = await cluster.task(name)
        await _tell(cluster, story, task, output)
        if following:
            changes = follow(cluster, cluster.namespace, name, RetryTimeouts(), time.monotonic, asyncio.sleep)
            async with aclosing(changes):
                async for known in changes:
                    if name not in known:
                        raise CommandError(f"loratask/{name} was deleted", exit_codes.NOT_FOUND)
                    task = known[name]
                    await _tell(cluster, story, task, output)
                    if row(task).finished:
                        break
    if output is OutputFormat.TEXT:
        _say_where_workers_log(task)
    return exit_codes.FAILED if following and row(task).failed else exit_codes.OK


async def _tell(cluster: KubeCluster, story: Story, task: JSON, output: OutputFormat) -> None:
    events = await cluster.events_about(cluster.namespace, task["metadata"]["uid"])
    for line in story.news(task, events, datetime.now(UTC)):
        if output is OutputFormat.JSON:
            print_json(asdict(line))
        else:
            _print(line)


def _print(line: StoryLine) -> None:
    style = "red" if line.bad else "green" if line.good else ""
    stdout().print(Text.assemble((one_line(line.clock), "dim"), "  ", (headed(line.text), style)))


def _say_where_workers_log(task: JSON) -> None:
    namespace, _, pipeline = ((task.get("status") or {}).get("pipeline") or "").partition("/")
    if pipeline:
        label = f"{LABEL_PIPELINE}={safe_name(pipeline, LABEL_LIMIT)}"
        command = f"kubectl logs -n {namespace} -l {label} --prefix --tail=100"
        stderr().print(Text(one_line(f"logs of its pipeline's workers: {command}"), style="dim"))
