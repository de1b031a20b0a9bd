"""What the cluster takes from the checkout's Python environment."""

from pathlib import Path

from tests.cluster.layout import CHECKOUT


def site_packages() -> Path:
    """The packages of the checkout's Python environment, which every container sees."""
    found = sorted((CHECKOUT / ".venv/lib").glob("python3*/site-packages"))
    if not found:
        raise RuntimeError("there is no Python environment yet: run `make setup`")
    return found[0]


def program_of_environment(name: str) -> Path:
    """A program that a Python package brought."""
    path = CHECKOUT / ".venv/bin" / name
    if not path.exists():
        raise RuntimeError(f"{name} is not in the Python environment: run `make setup`")
    return path
