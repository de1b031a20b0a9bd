"""Local processes for the pods: all ranks of one pipeline, started and restarted together."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from mlora_operator.local.machine import Machine
from mlora_operator.reconcile.state.cause import Cause
from mlora_operator.reconcile.state.snapshot import PEER_LOST, Key, Pod, ProcessEnding, WorkerGroup
from mlora_worker.protocol import WorkerConfig

# -P: no module comes from the present folder, which may be one that was fetched.
WORKER = (sys.executable, "-P", "-m", "mlora_worker")
HOST = "127.0.0.1"

_PEERS_LEAVE = 10.0  # seconds that the other ranks get to notice a lost peer and leave by themselves
TERM_GRACE = 15.0  # seconds between SIGTERM and SIGKILL, in which ranks write checkpoints
_LONGEST_PAUSE = 10.0
_PROBE_EVERY = 0.2
_TAIL = 2048  # bytes of a log that are looked at for its last words

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Ports:
    http: int
    link: int
    rendezvous: int


def free_ports() -> Ports:
    """Ports that nobody listens on now; each start takes new ones, so no former group can interfere."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(3)]
        for one in sockets:
            one.bind((HOST, 0))
        return Ports(*(one.getsockname()[1] for one in sockets))


@dataclass(slots=True)
class _Rank:
    number: int
    uid: str
    process: Process
    log: Path

    @property
    def alive(self) -> bool:
        return self.process.returncode is None


class RankGroup:
    """The ranks of one pipeline. ``resize`` says how many there shall be: all stages or none.

    When one rank ends, all end and are started again, as the kubelet would do it: who counts and says when it is enough is
    the reconcile loop. ``given_up`` says why ranks cannot be started at all. ``on_change`` is called when what ``group``
    shows has changed.
    """

    def __init__(
        self,
        key: Key,
        configure: Callable[[Ports], WorkerConfig],
        revision: str,
        machine: Machine,
        logs: Path,
        environment: Mapping[str, str],
        on_change: Callable[[], None],
        command: Sequence[str] = WORKER,
    ) -> None:
        self._key = key
        self._configure = configure
        self._revision = revision
        self._machine = machine
        self._logs = logs
        self._environment = environment
        self._on_change = on_change
        self._command = command
        self._wanted = 0
        self._ranks: list[_Rank] = []
        self._keeper: asyncio.Task[None] | None = None
        self._failures = 0  # since the ranks were last replaced
        self._replacements = 0
        self._replaced = False  # somebody outside ends them
        self._endings: dict[int, ProcessEnding] = {}
        self._last_words: str | None = None
        self._listens_since: datetime | None = None
        self.ports = free_ports()
        self.given_up: str | None = None

    @property
    def group(self) -> WorkerGroup:
        """What is there now, in the words of the reconcile loop."""
        pods = tuple(
            Pod(
                key=Key(self._key.namespace, f"{self._key.name}-{rank.number}"),
                uid=rank.uid,
                revision=self._revision,
                ready=rank.alive and self._listens_since is not None,
                restarts=self._failures,
                ended=self._endings.get(rank.number),
                ready_since=self._listens_since,
            )
            for rank in self._ranks
        )
        whole = len(pods) == self._wanted and all(pod.ready for pod in pods)
        problem = None if whole or self._last_words is None else Cause("Restarting", self._last_words)
        return WorkerGroup(self._wanted, self._revision, pods, problem)

    def resize(self, ranks: int) -> None:
        """Idempotent, and repeated by the reconcile loop until it is so."""
        self._wanted = ranks
        if ranks and self._keeper is None and self.given_up is None:
            self._keeper = asyncio.create_task(self._keep(), name=f"ranks of {self._key}")
        elif not ranks:
            self._cancel()

    def kill(self, uid: str) -> None:
        """End one rank; the group then starts again, with ranks of other uids: this is no failure of its own."""
        for rank in self._ranks:
            if rank.uid == uid and rank.alive:
                self._replaced = True
                rank.process.kill()  # SIGTERM would not reach one that is stopped

    async def stop(self) -> None:
        """End all ranks and wait until they are gone."""
        self.resize(0)
        if self._keeper is not None:
            await asyncio.gather(self._keeper, return_exceptions=True)

    def _cancel(self) -> None:
        # A second cancellation would interrupt the orderly end that the first one began.
        if self._keeper is not None and not self._keeper.cancelling():
            self._keeper.cancel()

    async def _keep(self) -> None:
        """Start, wait for the first end, end the others, start again; until cancelled or given up."""
        try:
            while True:
                await self._start(self._wanted)
                probe = asyncio.create_task(self._probe())
                try:
                    await _wait(self._ranks, asyncio.FIRST_COMPLETED, None)
                finally:
                    probe.cancel()
                self._listens_since = None
                # The others notice the lost peer and leave; what they say then may be the cause.
                await _wait(self._ranks, asyncio.ALL_COMPLETED, _PEERS_LEAVE)
                ended = [rank for rank in self._ranks if not rank.alive]
                await _end(self._ranks)
                self._note_end(ended)
                await asyncio.sleep(min(2.0**self._failures / 4, _LONGEST_PAUSE))
        except OSError as error:  # no memory, no processes, no such program
            self.given_up = f"the ranks cannot be started: {error}"
        finally:
            await asyncio.shield(_end(self._ranks))
            self._ranks = []
            self._listens_since = None
            self._keeper = None
            self._on_change()

    async def _start(self, count: int) -> None:
        self.ports = free_ports()
        config = self._configure(self.ports)
        self._logs.mkdir(parents=True, exist_ok=True)
        fresh: list[_Rank] = []
        try:
            for number in range(count):
                fresh.append(await self._start_rank(number, config))
        except BaseException:
            await asyncio.shield(_end(fresh))
            raise
        self._ranks = fresh  # all at once: half a group would look as if a rank had been taken away
        self._on_change()

    async def _start_rank(self, number: int, config: WorkerConfig) -> _Rank:
        log = self._logs / f"rank-{number}.log"
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                env=self._environment_of(number, config),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for us; we end the ranks in order
                preexec_fn=_dying_with(os.getpid()),
            )
        return _Rank(number, f"{self._key}-{number}-{self._replacements}", process, log)

    async def _probe(self) -> None:
        """Until the coordinator listens: a rank needs a while to import what it trains with."""
        while self._listens_since is None:
            try:
                _, writer = await asyncio.open_connection(HOST, self.ports.http)
            except OSError:
                await asyncio.sleep(_PROBE_EVERY)
                continue
            writer.close()
            self._listens_since = datetime.now(UTC)
        self._on_change()

    def _environment_of(self, number: int, config: WorkerConfig) -> dict[str, str]:
        environment = {name: value for name, value in self._environment.items() if name != "MLORA_POD_NAME"}
        environment |= {"MLORA_RANK": str(number), "MLORA_WORKER_CONFIG": config.to_json()}
        gpu = self._machine.gpu_of(number) if config.device != "cpu" else None
        return environment | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu is not None else {})

    def _note_end(self, ended: Sequence[_Rank]) -> None:
        """Of the ranks that ended by themselves, the one that only lost its peer explains least."""
        if self._replaced:
            self._replaced, self._failures, self._endings = False, 0, {}
            self._replacements += 1
        else:
            self._endings = {rank.number: _ending(rank) for rank in ended}
            cause = min(self._endings.values(), key=lambda ending: ending.code in (0, PEER_LOST))
            self._last_words = cause.words
            self._failures += 1
        self._on_change()


def _ending(rank: _Rank) -> ProcessEnding:
    code = rank.process.returncode
    assert code is not None
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    words = f"rank {rank.number} {how}: {_last_line(rank.log)} (log: {rank.log})"
    return ProcessEnding(code if code >= 0 else 128 - code, words)  # as a shell or a kubelet would say it


async def _wait(ranks: Sequence[_Rank], until: str, seconds: float | None) -> None:
    """Until one or all of the processes have ended, or the time is over."""
    waits = [asyncio.create_task(rank.process.wait()) for rank in ranks if rank.alive]
    if len(waits) < len(ranks) and until == asyncio.FIRST_COMPLETED:
        seconds = 0
    try:
        if waits:
            await asyncio.wait(waits, timeout=seconds, return_when=until)
    finally:
        for wait in waits:
            wait.cancel()


async def _end(ranks: Sequence[_Rank]) -> None:
    """Ask all to end (SIGTERM), after a while kill; return when all are gone."""
    for how, seconds in ((signal.SIGTERM, TERM_GRACE), (signal.SIGKILL, None)):
        for rank in ranks:
            if rank.alive:
                with contextlib.suppress(ProcessLookupError):
                    rank.process.send_signal(how)
        await _wait(ranks, asyncio.ALL_COMPLETED, seconds)


def _dying_with(parent: int) -> Callable[[], None]:
    """Runs in the child before it becomes the worker: a killed `mlora run` leaves no rank behind."""

    def prepare() -> None:
        if _LIBC is not None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # it was gone before the call
                os._exit(1)

    return prepare


def _last_line(log: Path) -> str:
    """The last line with something in it, cut to a readable length."""
    with log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - _TAIL))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][:400] if lines else "it wrote no output"
