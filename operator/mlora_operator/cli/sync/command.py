"""``mlora sync``: a folder, and servers, in step with finished adapters.

With addresses it needs boto3 and the standard library alone, so its options are read by argparse. With labels of tasks it
asks the cluster, through the packages of the extra ``operator``.
"""

from __future__ import annotations

import argparse
import os
import posixpath
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from mlora_operator.cli import exit_codes
from mlora_operator.cli.bare_options import (
    add_addressing,
    add_kubeconfig,
    check_boto3,
    check_cluster_packages,
    duration,
)
from mlora_operator.cli.fetch.command import EXIT_CODES
from mlora_operator.cli.kube.choice import ClusterChoice
from mlora_operator.cli.output import CommandError, print_json
from mlora_operator.cli.program import program
from mlora_operator.download import Access, DownloadError, open_source
from mlora_operator.sync import (
    News,
    NewsKind,
    Places,
    SyncPass,
    joined,
    open_folder,
    parse_server,
    places_below,
)
from mlora_operator.sync.news import problem
from mlora_operator.sync.requests import ServerError
from mlora_worker.lines import headed, one_line

SERVER_KEY = "MLORA_SERVER_API_KEY"
EVERY = 30.0  # seconds

_WORDS = {
    NewsKind.ADDED: "verified and added from",
    NewsKind.REPLACED: "verified and replaced from",
    NewsKind.REMOVED: "removed",
    NewsKind.LOADED: "loaded into",
    NewsKind.RELOADED: "replaced in",
    NewsKind.UNLOADED: "unloaded from",
}


def main(arguments: Sequence[str]) -> int:
    """The exit code; errors are reported on standard error."""
    # The first process of a container would not end by it otherwise.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(exit_codes.OK))
    try:
        return sync(parser().parse_intermixed_args(arguments))
    except CommandError as error:
        print(f"error: {headed(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        prog=f"{program()} sync",
        description="Keep a folder, and servers, in step with finished adapters: those below addresses of a store, or "
        "those of a cluster's tasks with given labels. Each is verified against its manifest and replaced in one step. "
        "With addresses, the keys come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or from any other source of the "
        "AWS SDK; this needs only boto3.",
    )
    options.add_argument(
        "uris", nargs="*", metavar="URI", help="s3://bucket/prefix with adapters directly below it, or of one"
    )
    options.add_argument("-d", "--output-dir", type=Path, metavar="DIR", required=True, help="folder to keep")
    options.add_argument(
        "-l", "--selector", metavar="LABELS", help="LoRATasks with these labels, as in kubectl"
    )
    options.add_argument(
        "--server",
        dest="servers",
        action="append",
        default=[],
        metavar="KIND=URL",
        help="server to load them into: vllm=URL or sglang=URL; can be given several times",
    )
    options.add_argument(
        "--server-dir", metavar="DIR", help="where the servers see the folder, if elsewhere than here"
    )
    options.add_argument("--base-model", metavar="NAME", help="only adapters of this base model")
    options.add_argument("--prune", action="store_true", help="remove what the store no longer has")
    options.add_argument("--once", action="store_true", help="end after one pass")
    options.add_argument(
        "--every", type=duration, metavar="DURATION", help="time between two passes (default: 30s)"
    )
    options.add_argument("--endpoint", metavar="URL", help="S3 endpoint")
    add_addressing(options)
    options.add_argument("-n", "--namespace", help="namespace of the tasks (default: that of the context)")
    options.add_argument("-A", "--all-namespaces", action="store_true", help="tasks of all namespaces")
    add_kubeconfig(options)
    options.add_argument(
        "-o",
        "--output",
        choices=["text", "json"],
        default="text",
        help="text for people, json for programs",
    )
    return options


def sync(options: argparse.Namespace, pause: Callable[[float], None] = time.sleep) -> int:
    """The exit code: that of the first problem of the one pass; otherwise it does not end. Raises CommandError."""
    sources = _sources(options)
    try:
        key = (os.environ.get(SERVER_KEY) or "").strip() or None
        servers = [parse_server(text, key, pause) for text in options.servers]
    except ValueError as error:
        raise CommandError(str(error), exit_codes.INVALID) from error
    if key is not None and not (key.isascii() and key.isprintable()):
        raise CommandError(
            f"{SERVER_KEY} is not a key: it has characters no header may have", exit_codes.INVALID
        )
    told: set[object] = set()
    try:
        with open_folder(options.output_dir) as folder:
            while True:
                one = SyncPass(folder, _seen_as(options), servers, options.prune, options.base_model, pause)
                problems = []
                for news in one.run(joined(source() for source in sources)):
                    if news.kind is NewsKind.PROBLEM:
                        problems.append(news)
                    if news.key not in told:
                        _tell(news, options.output)
                if options.once:
                    return _exit_code(problems)
                told = {news.key for news in problems}  # said once, until it is over
                pause(EVERY if options.every is None else options.every)
    except DownloadError as error:
        raise CommandError(str(error), EXIT_CODES.get(type(error), exit_codes.INVALID)) from error


def _sources(options: argparse.Namespace) -> list[Callable[[], Places]]:
    """What is asked for adapters in each pass. Raises CommandError."""
    if options.once and options.every is not None:
        raise CommandError("give --once or --every, not both", exit_codes.INVALID)
    if options.every is not None and options.every < 1:
        raise CommandError("--every is at least 1s", exit_codes.INVALID)
    if not options.uris and options.selector is None:
        message = "give an address such as s3://bucket/prefix, or labels of tasks with -l"
        raise CommandError(message, exit_codes.INVALID)
    check_boto3(options.uris)
    access = Access(endpoint=options.endpoint, addressing=options.addressing or "auto")
    sources: list[Callable[[], Places]] = []
    try:
        for uri in options.uris:
            folders = open_source(uri, access)
            sources.append(lambda uri=uri, folders=folders: places_below(uri, folders))  # type: ignore[misc]
    except ValueError as error:
        raise CommandError(str(error), exit_codes.INVALID) from error
    if options.selector is not None:
        sources.append(_of_tasks(options))
    return sources


def _of_tasks(options: argparse.Namespace) -> Callable[[], Places]:
    check_cluster_packages(
        "-l asks a cluster for its tasks, which needs more packages: run pip install 'mlora-operator[operator]', or give "
        "the adapters' s3:// address"
    )
    from mlora_operator.cli.sync.labelled_tasks import labelled_tasks

    choice = ClusterChoice(options.namespace, options.context, options.kubeconfig)

    def ask() -> Places:
        try:
            return labelled_tasks(options.selector, choice, options.all_namespaces, options.endpoint)
        except CommandError as error:
            if options.once:
                raise
            return Places(problems=(problem("", "the cluster", error),), complete=False)

    return ask


def _seen_as(options: argparse.Namespace) -> str:
    seen: str | None = options.server_dir
    if seen is None:
        return os.path.normpath(Path(options.output_dir).absolute())
    if not seen.startswith("/"):
        raise CommandError(f"--server-dir {seen}: give an absolute path", exit_codes.INVALID)
    return posixpath.normpath(seen)


def _exit_code(problems: Sequence[News]) -> int:
    if not problems:
        return exit_codes.OK
    cause = problems[0].cause
    if isinstance(cause, CommandError):
        return cause.exit_code
    if isinstance(cause, ServerError):
        return exit_codes.UNREACHABLE
    return EXIT_CODES.get(type(cause), exit_codes.INVALID)  # type: ignore[arg-type]


def _tell(news: News, output: str) -> None:
    if output == "json":
        print_json({"type": news.kind.value, "name": news.name, "place": news.place, "message": news.message})
    elif news.kind is NewsKind.PROBLEM:
        who = news.name or news.place
        print(f"problem: {headed(f'{who}: {news.message}')}", file=sys.stderr, flush=True)
    else:
        detail = f"{news.place} ({news.message})"
        if news.kind in (NewsKind.LOADED, NewsKind.RELOADED, NewsKind.UNLOADED):
            detail = news.message
        elif news.kind is NewsKind.REMOVED:
            detail = f"since {news.message}"
        print(one_line(f"{news.name} {_WORDS[news.kind]} {detail}"), flush=True)
