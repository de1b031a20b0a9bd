"""What the process that renders a task's own template cannot do, whatever runs in it.

Each attempt is made by Python code in a process that has done to itself what a template's process does before it sees the
template: so it is what an attacker would have who broke out of the sandbox.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from mlora_worker.data.tokenizing.sandbox_process import PACKAGES
from mlora_worker.data.tokenizing.sandboxed_template import OwnTemplate, _environment
from mlora_worker.runtime import fences
from mlora_worker.runtime.system_calls import filter_of, packed
from tests.integration.preparing.test_sandbox import GOOD

pytestmark = pytest.mark.integration

BEFORE = """
import ctypes, json, os, socket, sys
from mlora_worker.data.tokenizing import sandbox_process as process
from mlora_worker.data.tokenizing.sandbox import TaskTemplate
from mlora_worker.runtime import fences
given = json.loads(sys.argv[1])
process._warm_up()
process.limit_itself()
for name in given.get("without", ()):
    def none(*_): raise fences._NoFence("not in this test")
    setattr(fences, name, none)
if given.get("as_in_a_pod"):
    os.setgroups([]); os.setresgid(65532, 65532, 65532); os.setresuid(65532, 65532, 65532)
stood = fences.stand(process.PACKAGES)
"""
ATTEMPTS = """
libc = ctypes.CDLL(None, use_errno=True)
def connects(family, address):
    with socket.socket(family) as one:
        one.settimeout(5)
        one.connect(address)
def calls(number, *values):
    if libc.syscall(number, *values) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
attempts = {
    "reads a file of the rank": lambda: open(given["file"]).read(),
    "lists the rank's folder": lambda: os.listdir(os.path.dirname(given["file"])),
    "writes a file": lambda: open(given["file"] + ".new", "w"),
    "removes a file": lambda: os.unlink(given["file"]),
    "reads its parent's environment": lambda: open(f"/proc/{given['parent']}/environ").read(),
    "reads what a pod is given": lambda: open("/etc/hostname").read(),
    "connects to a port": lambda: connects(socket.AF_INET, ("127.0.0.1", given["port"])),
    "connects to a socket in a folder": lambda: connects(socket.AF_UNIX, given["unix"]),
    "starts a process": lambda: os.fork() or os._exit(0),
    "becomes a program": lambda: os.execv("/nowhere", ["nowhere"]),
    "signals its parent": lambda: os.kill(given["parent"], 0),
    "limits its parent": lambda: calls(302, given["parent"], 7, None, None),
    "makes an io_uring": lambda: calls(425, 1, None),
    "leaves for other namespaces": lambda: calls(272, 0x10000000),
}
told = {}
for name, attempt in attempts.items():
    try:
        attempt()
        told[name] = "done"
    except OSError as error:
        told[name] = type(error).__name__
print(json.dumps([stood, told]))
"""
RENDERINGS = """
told = []
for source, messages in given["renderings"]:
    told.append(TaskTemplate(source).render(messages, bos_token="<s>", eos_token="</s>", add_generation_prompt=True))
print(json.dumps([stood, told]))
"""
NEEDS = {
    "reads a file of the rank": fences.FILES,
    "lists the rank's folder": fences.FILES,
    "writes a file": fences.FILES,
    "removes a file": fences.FILES,
    "reads its parent's environment": fences.FILES,
    "reads what a pod is given": fences.FILES,
    "connects to a port": fences.NETWORK,
    "connects to a socket in a folder": fences.PROCESSES,
    "starts a process": fences.PROCESSES,
    "becomes a program": fences.PROCESSES,
    "signals its parent": fences.PROCESSES,
    "limits its parent": fences.PROCESSES,
    "makes an io_uring": fences.PROCESSES,
    "leaves for other namespaces": fences.PROCESSES,
}


def run(code: str, **given: Any) -> tuple[fences.Fences, Any]:
    done = subprocess.run(
        [sys.executable, "-P", "-c", BEFORE + code, json.dumps({"parent": os.getpid(), **given})],
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    stood, told = json.loads(done.stdout)
    found = fences.parsed(json.dumps(stood))
    assert found is not None
    return found, told


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """A file that everybody may read, and who listens."""
    file, place = tmp_path / "rows", tmp_path / "socket"
    file.write_text("rows of others")
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o755)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as near:
        near.bind(str(place))
        near.listen()
        place.chmod(0o777)
        yield {"file": str(file), "port": server.getsockname()[1], "unix": str(place)}


def lacking(found: fences.Fences, *names: str) -> None:
    """Skips where the kernel lacks what a test is about."""
    for name, why in found.lacks:
        if name in names:
            pytest.skip(f"this kernel has not the fence {name}: {why}")


def test_without_fences_all_of_it_can_be_done(rank: dict[str, Any]) -> None:
    """So that the others show the fences, and nothing else."""
    _, told = run(ATTEMPTS, **rank, without=list(PUT))
    done = {name for name, outcome in told.items() if outcome == "done"}
    assert {"reads a file of the rank", "lists the rank's folder", "connects to a port"} <= done
    assert {"reads its parent's environment", "signals its parent", "limits its parent"} <= done


PUT = ("_be_another_user", "_keep_to_own_files", "_keep_to_few_calls", "_leave_network")


@pytest.mark.parametrize("as_in_a_pod", [False, True])
def test_behind_its_fences_it_reaches_no_file_no_network_and_no_process(
    rank: dict[str, Any], as_in_a_pod: bool
) -> None:
    """``as_in_a_pod``: as a user without any right, where nothing but that makes a difference."""
    if as_in_a_pod and os.geteuid() != 0:
        pytest.skip("only root can become another user")
    found, told = run(ATTEMPTS, **rank, as_in_a_pod=as_in_a_pod)
    lacking(found, fences.FILES, fences.NETWORK, fences.PROCESSES)
    assert told.keys() == NEEDS.keys()
    assert set(told.values()) == {"PermissionError"}
    assert Path(rank["file"]).read_text() == "rows of others"


@pytest.mark.parametrize(
    ("without", "left"),
    [
        ("_keep_to_own_files", {fences.FILES, fences.NETWORK, fences.PROCESSES}),
        ("_keep_to_few_calls", {fences.FILES, fences.NETWORK}),
    ],
)
def test_where_the_kernel_has_one_of_them_the_other_stands(
    rank: dict[str, Any], without: str, left: set[str]
) -> None:
    found, told = run(ATTEMPTS, **rank, without=[without])
    lacking(found, *left)
    assert left <= set(found.holds)
    for name, needed in NEEDS.items():
        if needed in left and not (without == "_keep_to_few_calls" and name == "removes a file"):
            assert told[name] != "done", name


def test_what_does_not_stand_is_told_with_its_reason() -> None:
    found, _ = run(RENDERINGS, renderings=[], without=[one for one in PUT if one != "_keep_to_own_files"])
    assert {name for name, why in found.lacks if why == "not in this test"} >= {
        fences.PROCESSES,
        fences.NETWORK,
    }
    assert "(not own user: not in this test; " in str(found)
    assert fences.parsed("nonsense") is None


@pytest.mark.parametrize("without", [[], ["_keep_to_own_files"], ["_keep_to_few_calls"]])
def test_behind_its_fences_it_renders_what_it_renders_without(without: list[str]) -> None:
    """Also where no file can be opened, so that nothing more can be imported."""
    messages = [{"role": "user", "content": "é"}, {"role": "assistant", "content": "x"}]
    asked = [(source, messages) for source in GOOD.values()]
    _, told = run(RENDERINGS, renderings=asked, without=without)
    _, expected = run(RENDERINGS, renderings=asked, without=list(PUT))
    assert told == expected


def test_the_process_of_a_template_stands_behind_what_it_tells() -> None:
    with closing(OwnTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")) as own:
        lacking(own.fences, fences.PROCESSES)
        status = Path(f"/proc/{own.pid}/status").read_text()
        assert "\nSeccomp:\t2\n" in status
        assert "\nNoNewPrivs:\t1\n" in status
        assert set(own.fences.holds) >= {fences.FILES, fences.NETWORK, fences.PROCESSES}
        assert {*own.fences.holds, *(name for name, _ in own.fences.lacks)} == {*fences.ALL}


def test_nothing_of_a_worker_lies_where_it_may_read() -> None:
    for path in fences.own_files(PACKAGES):
        assert not any(
            Path(one).is_relative_to(path) for one in ("/cache", "/tmp", "/run/secrets", "/etc/mlora")
        )


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_a_filter_is_short_and_its_jumps_end_within_it(machine: str) -> None:
    program = filter_of(machine, 7, opens_files=True)
    assert program is not None
    closed = filter_of(machine, 7, opens_files=False)
    assert closed is not None
    assert len(closed) == len(program) - 1
    assert len(packed(program)) == 8 * len(program)
    for number, one in enumerate(program):
        for jump in (one.then, one.otherwise):
            assert 0 <= jump < 256
            assert number + jump + 1 < len(program) or one.code == 6
    assert filter_of("vax", 7, opens_files=True) is None


def outcome(machine: str, architecture: int, number: int, argument: int, pid: int = 7) -> str:
    """What the kernel would say, by this test's own reading of the program."""
    program = filter_of(machine, pid, opens_files=True)
    assert program is not None
    held, at = 0, 0
    while True:
        one = program[at]
        at += 1
        match one.code:
            case 0x20:
                held = {0: number, 4: architecture, 16: argument}[one.value]
            case 0x15:
                at += one.then if held == one.value else one.otherwise
            case 0x06:
                return {0x7FFF0000: "allowed", 0x00050001: "refused"}[one.value]


@pytest.mark.parametrize(
    ("story", "machine", "architecture", "number", "argument", "expected"),
    [
        ("read", "x86_64", 0xC000003E, 0, 0, "allowed"),
        ("faccessat2, the last one", "x86_64", 0xC000003E, 439, 0, "allowed"),
        ("socket", "x86_64", 0xC000003E, 41, 2, "refused"),
        ("read by the numbers of 32 bits", "x86_64", 0x40000003, 3, 0, "refused"),
        ("read by the numbers of x32", "x86_64", 0xC000003E, 0x40000000, 0, "refused"),
        ("kill itself", "x86_64", 0xC000003E, 62, 7, "allowed"),
        ("kill another", "x86_64", 0xC000003E, 62, 8, "refused"),
        ("kill all", "x86_64", 0xC000003E, 62, 0xFFFFFFFF, "refused"),
        ("read", "aarch64", 0xC00000B7, 63, 0, "allowed"),
        ("socket", "aarch64", 0xC00000B7, 198, 2, "refused"),
        ("kill itself", "aarch64", 0xC00000B7, 129, 7, "allowed"),
        ("kill another", "aarch64", 0xC00000B7, 131, 8, "refused"),
    ],
)  # fmt: skip
def test_which_calls_pass(
    story: str, machine: str, architecture: int, number: int, argument: int, expected: str
) -> None:
    assert outcome(machine, architecture, number, argument) == expected, story
