"""The images hold what was pinned, byte for byte: every package by its hash, at the version that is tested."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
IMAGES = {"operator": ("operator",), "worker": ("worker", "arrow", "quantised", "recurrent")}
_HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


def entries(text: str) -> dict[str, tuple[Requirement, list[str]]]:
    """Requirement with its hashes, by name and markers."""
    found = {}
    for entry in re.sub(r"\s*\\\n\s*", " ", text).splitlines():
        if not entry.strip() or entry.lstrip().startswith("#"):
            continue
        first = entry.partition(" --hash=")[0]
        found[first.strip()] = (Requirement(first), _HASH.findall(entry))
    return found


def lock(image: str) -> str:
    return (ROOT / "requirements" / f"{image}.txt").read_text()


@pytest.mark.parametrize("image", IMAGES)
def test_each_package_has_a_version_and_hashes_and_no_address(image: str) -> None:
    for requirement, hashes in entries(lock(image)).values():
        assert [one.operator for one in requirement.specifier] == ["=="], requirement
        assert hashes, requirement
        assert requirement.url is None
    assert "://" not in lock(image)
    assert not re.search(r"^\s*--?(i|index|extra|find|trusted)", lock(image), re.MULTILINE)


@pytest.mark.parametrize("image", IMAGES)
def test_the_versions_are_those_that_are_tested(image: str) -> None:
    pinned = {str(one) for one, _ in entries((ROOT / "constraints.txt").read_text()).values()}
    versions = {one.partition(";")[0].strip() for one in pinned}
    for requirement, _ in entries(lock(image)).values():
        assert f"{requirement.name}{requirement.specifier}" in versions, requirement


@pytest.mark.parametrize(("image", "extras"), IMAGES.items())
def test_whatever_the_image_needs_is_listed(image: str, extras: tuple[str, ...]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = {
        Requirement(one).name.lower().replace("_", "-")
        for extra in extras
        for one in project["project"]["optional-dependencies"][extra]
    } | {Requirement(one).name for one in project["build-system"]["requires"]}
    assert wanted <= {one.name for one, _ in entries(lock(image)).values()}


@pytest.mark.parametrize("image", IMAGES)
def test_the_build_takes_nothing_without_a_hash(image: str) -> None:
    assert f"COPY requirements/{image}.txt" in DOCKERFILE
    assert "!requirements" in (ROOT / ".dockerignore").read_text()
    installs = re.findall(r"pip install [^&;]*", re.sub(r"\\\n", " ", DOCKERFILE))
    assert len(installs) == 2 * len(IMAGES)
    for one in installs:
        hashed = "--require-hashes" in one and "--only-binary :all:" in one
        offline = "--no-index" in one and "--no-deps" in one and "--no-build-isolation" in one
        assert hashed or offline, one
