"""Running other programs: quiet when they succeed, with all they said when they fail."""

import subprocess
from collections.abc import Mapping
from pathlib import Path


class CommandFailed(RuntimeError):
    """A program ended with an error; the message holds its command line and its output."""


def run(
    *command: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None, stdin: str = ""
) -> str:
    """Standard output of ``command``. Raises ``CommandFailed`` when it does not end with 0."""
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words, cwd=cwd, env=env, input=stdin, capture_output=True, text=True, check=False
        )
    except FileNotFoundError as missing:
        raise CommandFailed(f"{words[0]}: not found on this machine") from missing
    if done.returncode != 0:
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-40:])
        raise CommandFailed(f"`{' '.join(words)}` ended with {done.returncode}:\n{said}")
    return done.stdout
