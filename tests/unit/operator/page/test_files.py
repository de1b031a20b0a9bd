"""The page's files: nothing inline, nothing from elsewhere, nothing that makes markup of text."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path

import pytest

from mlora_operator.page.curves import COLOURS
from mlora_operator.page.documents import (
    ConditionDocument,
    CurveDocument,
    DataDocument,
    DroppedRows,
    EventDocument,
    Losses,
    NamespaceDocument,
    NamespaceList,
    Overview,
    PipelineDocument,
    SpecField,
    StageDocument,
    TaskDetail,
    TaskDocument,
    TaskList,
    TimelineDocument,
    TimelineSpan,
    TimelineTask,
    Trouble,
)

ROOT = Path(__file__).parents[4]
FILES = resources.files("mlora_operator.page") / "files"
SCRIPTS = sorted(one.name for one in FILES.iterdir() if one.name.endswith(".js"))


def text(name: str) -> str:
    return (FILES / name).read_text(encoding="utf-8")


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.inside: list[str] = []
        self.script = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self.inside.append(tag)

    def handle_data(self, data: str) -> None:
        if self.inside and self.inside[-1] in ("script", "style"):
            self.script += data.strip()


@pytest.fixture(scope="module")
def html() -> Elements:
    parser = Elements()
    parser.feed(text("index.html"))
    return parser


def test_the_html_has_no_inline_script_style_or_handler_and_only_files_of_its_own(html: Elements) -> None:
    assert html.script == ""
    assert not [tag for tag, _ in html.found if tag in ("style", "iframe", "object", "base")]
    for tag, attributes in html.found:
        assert not [name for name in attributes if name.startswith("on") or name == "style"], tag
    links = {attributes.get("src") or attributes.get("href") for _, attributes in html.found} - {None}
    assert {link for link in links if link is not None and not link.startswith("#")} == {
        "page.js",
        "page.css",
    }


def test_no_file_names_another_host() -> None:
    for name in ("index.html", "page.css", *SCRIPTS):
        addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+", text(name)))
        assert addresses <= {"http://www.w3.org"}, name  # the name of SVG's elements, which nobody asks for
        assert "@import" not in text(name)
        assert "url(" not in text(name)


@pytest.mark.parametrize(
    "dangerous",
    [
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        "DOMParser",
        "srcdoc",
        "setHTML",
    ],
)
def test_scripts_make_elements_by_name_and_text_by_text_alone(dangerous: str) -> None:
    assert [name for name in SCRIPTS if dangerous in text(name)] == []


def test_one_script_alone_makes_addresses_and_they_lead_to_the_page_itself() -> None:
    """A link's target could be a script."""
    targets = re.compile(r"\b(href|src|action|formaction|location\s*=|location\.assign|window\.open)\b")
    assert {name for name in SCRIPTS if targets.search(text(name))} == {"address.js"}
    own = text("address.js")
    assert re.findall(r'"href", (.*)\);', own) == ["addressOf(changes)"]
    assert 'return query ? `?${query}` : "./";' in own


def test_scripts_load_nothing_but_each_other_and_none_is_left_out() -> None:
    loaded = {name: set(re.findall(r'from "([^"]*)"', text(name))) for name in SCRIPTS}
    assert set().union(*loaded.values()) | {"./page.js"} == {f"./{name}" for name in SCRIPTS}
    assert [name for name in SCRIPTS if re.search(r"\bimport\s*\(|\bimport \"", text(name))] == []


def test_a_script_is_one_idea() -> None:
    assert [name for name in SCRIPTS if len(text(name).splitlines()) > 200] == []


def test_every_table_has_headers_with_a_scope_and_every_section_a_title(html: Elements) -> None:
    assert all(attributes.get("scope") == "col" for tag, attributes in html.found if tag == "th")
    titled = {attributes.get("id") for tag, attributes in html.found if tag == "h2"}
    sections = [attributes.get("aria-labelledby") for tag, attributes in html.found if tag == "section"]
    assert len(sections) == 6
    assert set(sections) - {None} == titled  # a comparison has its title only once there is one
    assert {"header", "nav", "main", "label"} <= {tag for tag, _ in html.found}


def test_there_is_a_colour_for_each_number_in_light_and_in_dark() -> None:
    style = text("page.css")
    light, dark = style.split("@media (prefers-color-scheme: dark)", 1)
    dark = dark.split("* {", 1)[0]
    for part in (light, dark):
        assert len(set(re.findall(r"--k\d+: (#\w+)", part))) == COLOURS
    assert f"const COLOURS = {COLOURS};" in text("words.js")


def test_the_files_are_in_the_wheel_and_in_what_the_image_copies(tmp_path: Path) -> None:
    build = "import os, setuptools.build_meta as build, sys; os.chdir(sys.argv[1]); print(build.build_wheel(sys.argv[2]))"
    copy = tmp_path / "project"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "operator", "worker"):
        (copy / name).symlink_to(ROOT / name)
    subprocess.run(
        [sys.executable, "-c", build, str(copy), str(tmp_path)], check=True, capture_output=True, cwd=tmp_path
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {f"mlora_operator/page/files/{name}" for name in ("index.html", "page.css", *SCRIPTS)} <= names
    assert "COPY operator/" in (ROOT / "Dockerfile").read_text()


def test_the_manual_lists_every_field_of_the_api() -> None:
    manual = (ROOT / "docs" / "operators" / "page.md").read_text()
    for document in (
        Overview,
        PipelineDocument,
        StageDocument,
        TaskList,
        TaskDocument,
        TaskDetail,
        SpecField,
        DataDocument,
        DroppedRows,
        ConditionDocument,
        EventDocument,
        NamespaceList,
        NamespaceDocument,
        Losses,
        CurveDocument,
        TimelineDocument,
        TimelineTask,
        TimelineSpan,
        Trouble,
    ):
        for field in document.model_fields.values():
            assert f"`{field.alias}`" in manual, f"{document.__name__}.{field.alias}"
