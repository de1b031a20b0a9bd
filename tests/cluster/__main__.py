"""Command line of the test cluster; the Makefile's targets call it."""

import argparse
import os
import sys
import time
from collections.abc import Callable

from tests.cluster import gobinaries, images, lifecycle
from tests.cluster.cache import locked
from tests.cluster.command import CommandFailed
from tests.cluster.debian import BROWSER, install_missing
from tests.cluster.layout import this_state
from tests.cluster.nodes import containerd_socket
from tests.cluster.pause import pause_archive
from tests.cluster.rootfs import root_filesystem


def main() -> None:
    """Run the command that the arguments name."""
    parser = argparse.ArgumentParser(prog="python3 -m tests.cluster", description=__doc__)
    parser.add_argument("command", choices=sorted(COMMANDS), metavar="|".join(COMMANDS))
    try:
        COMMANDS[parser.parse_args().command]()
    except (RuntimeError, OSError) as error:
        sys.exit(f"cluster: {error}")


def up() -> None:
    """Start the cluster unless it runs."""
    lifecycle.up(this_state(), say)


def down() -> None:
    """End the cluster and remove what it left."""
    lifecycle.down(this_state(), say)


def env() -> None:
    """Print the shell commands that point kubectl and helm to the cluster."""
    state = this_state()
    sys.stdout.write(f"export KUBECONFIG={state.kubeconfig}\nexport PATH={state.tools}:$PATH\n")


def image() -> None:
    """Build the project's images into the cluster, which must be up."""
    install_missing()
    state = this_state()
    with locked(state.lock):
        imported = images.build_and_import(state, containerd_socket(state))
    say(f"images: {' and '.join(imported) or 'nothing'} new in the cluster")


def prepare() -> None:
    """Make everything that is slow to make and kept; needs no Python environment."""
    install_missing()
    try:
        install_missing(BROWSER)
    except CommandFailed as error:  # only the tests of the page need it, and they say so
        say(f"prepare: no browser: {error}")
    slow: list[tuple[str, Callable[[], object]]] = [
        ("Kubernetes (a Go program, up to 10 minutes)", gobinaries.testcluster),
        ("the pause image", pause_archive),
        ("Helm", gobinaries.helm),
        ("a Debian root file system", root_filesystem),
    ]
    for what, make in slow:
        say(f"prepare: {what}")
        began = time.monotonic()
        make()
        if (took := time.monotonic() - began) > 1:
            say(f"prepare: {what}: done after {took:.0f} s")


def say(line: str) -> None:
    """Tell a person what goes on; standard output is for what other programs read."""
    sys.stderr.write(line + "\n")


COMMANDS: dict[str, Callable[[], None]] = {
    "up": up,
    "down": down,
    "env": env,
    "image": image,
    "prepare": prepare,
}

if __name__ == "__main__":
    os.umask(0o022)
    main()
