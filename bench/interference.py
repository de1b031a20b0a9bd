"""``python -m bench interference``: does a task whose rows are prepared slow those that train?

A real rank trains one task whose rows are all the same, so that every step is the same work. In turns nothing else happens,
or a task comes with a file of GSM8K's rows with other digits in each, which are read, rendered and tokenised meanwhile and
never trained on. In a third turn the same file is prepared by a process that has nothing to do with the rank: what steps
take longer then is what the machine itself takes from two programs at a time (caches, memory, the clock of its cores), and
no design of ours. The lengths of steps are read off the rank's own timeline.

``training_ratio``            steps per second with the preparation over those without
``training_ratio_stranger``   the same beside the process that has nothing to do with the rank
``training_ratio_over_stranger``  the first over the second: what is ours
``largest_step_over_median``  the longest step beside a preparation over the median of those beside it
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from bench.base import cut_folder, smollm2_folder
from bench.data import write_rows
from bench.options import parser, repetitions
from bench.ranks import MODEL_NAME, Ranks
from bench.report import last_line, table
from bench.rows import FIELDS, GSM8K, MAX_SEQ_LENGTH
from bench.sides import LEARNING_RATE, Setting, in_turns
from mlora_worker.preparing.client import RowProcess
from mlora_worker.preparing.messages import Setup
from mlora_worker.protocol import Dataset, ModelSource, TaskPhase, TaskPlan, Training, WorkerConfig

ROWS, QUICK_ROWS = 250_000, 5_000
GOALS = {"training_ratio": 0.95, "largest_step_over_median": 1.3}
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
BATCH, WARM = 2, 2
LEAST_STEPS = 20  # of a window
WITH, WITHOUT, STRANGER = "with", "without", "stranger"


@dataclass(frozen=True)
class Window:
    """Steps of the task that trains, one after the other, and what was prepared beside them."""

    seconds: Sequence[float]  # of each step
    prepared_rows: int = 0

    @property
    def rate(self) -> float:
        """Steps per second."""
        return len(self.seconds) / sum(self.seconds)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def largest_over_median(self) -> float:
        return max(self.seconds) / self.median


def main(arguments: list[str]) -> int:
    made = parser("interference", __doc__)
    made.add_argument(
        "--rows", type=int, default=None, help=f"that are prepared (default: {ROWS}; --quick: {QUICK_ROWS})"
    )
    made.add_argument("--stages", type=int, default=1, help="ranks that train (default: 1)")
    options = made.parse_args(arguments)
    rows = options.rows or (QUICK_ROWS if options.quick else ROWS)
    count = repetitions(options, usual=3, long=7)
    pairs: list[dict[str, Window]] = []
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        folder = cut_folder(smollm2_folder(), 2, scratch / "model") if options.quick else smollm2_folder()
        file = scratch / "large.jsonl"
        write_rows(file, rows)
        with (
            Ranks(folder, options.stages, scratch / "ranks", options.threads) as ranks,
            stranger(folder, scratch / "stranger") as rows_of_a_stranger,
        ):
            trains = training_task(scratch)
            ranks.plan([trains])
            wait_for_steps(ranks, WARM)
            for repetition in range(count):
                pair: dict[str, Window] = {}
                for side in in_turns((WITHOUT, WITH, STRANGER), repetition):
                    prepares = preparing_task(file, repetition, scratch)
                    if side == WITH:
                        pair[side] = beside(ranks, trains, prepares)
                    elif side == STRANGER:
                        pair[side] = beside_stranger(ranks, rows_of_a_stranger, prepares)
                    else:
                        pair[side] = alone(ranks)
                pairs.append(pair)
                print(f"pair {repetition + 1}: {told(pair)}", flush=True)
    result = {
        "training_ratio": statistics.median(pair[WITH].rate / pair[WITHOUT].rate for pair in pairs),
        "training_ratio_stranger": statistics.median(
            pair[STRANGER].rate / pair[WITHOUT].rate for pair in pairs
        ),
        "training_ratio_over_stranger": statistics.median(
            pair[WITH].rate / pair[STRANGER].rate for pair in pairs
        ),
        "largest_step_over_median": max(pair[WITH].largest_over_median for pair in pairs),
        "largest_step_over_median_without": max(pair[WITHOUT].largest_over_median for pair in pairs),
        "step_seconds": {
            side: statistics.median(pair[side].median for pair in pairs) for side in (WITHOUT, WITH, STRANGER)
        },
        "preparation_seconds": statistics.median(sum(pair[WITH].seconds) for pair in pairs),
        "rows": rows,
        "stages": options.stages,
    }
    print(table(["figure", "value", "goal"], [[name, result[name], goal] for name, goal in GOALS.items()]))
    print(last_line("interference", result, repetitions=count, threads=options.threads, quick=options.quick))
    return 0


def training_task(scratch: Path) -> TaskPlan:
    """Trains for ever on one row, again and again."""
    first = GSM8K.read_text(encoding="utf-8").splitlines()[0]
    file = scratch / "same.jsonl"
    file.write_text(f"{first}\n" * 64, encoding="utf-8")
    training = Training(
        batch_size=BATCH, max_steps=10**6, learning_rate=LEARNING_RATE, checkpoint_every_steps=0
    )
    return _task("trains", file, training, scratch)


def preparing_task(file: Path, repetition: int, scratch: Path) -> TaskPlan:
    """Is not let in. Rows of another repetition, which the rank keeps, are of no use to it."""
    training = Training(max_seq_length=MAX_SEQ_LENGTH + repetition)
    return _task(f"prepares-{repetition}", file, training, scratch).model_copy(update={"admitted": False})


def _task(uid: str, file: Path, training: Training, scratch: Path) -> TaskPlan:
    return TaskPlan(
        uid=uid,
        namespace="bench",
        name=uid,
        admitted=True,
        base_model=MODEL_NAME,
        lora=Setting(1, TARGETS).lora,
        dataset=Dataset(uri=file.as_uri(), fields=FIELDS),
        training=training,
        output_uri=f"file://{scratch}/{uid}",
    )


def wait_for_steps(ranks: Ranks, more: int) -> None:
    """Until the task that trains has done so many more."""
    first: int | None = None
    for _, report in ranks.reports():
        done = next((task.step for task in report.tasks if task.uid == "trains"), 0)
        if first is None:
            first = done
        if done >= first + more:
            return


def alone(ranks: Ranks) -> Window:
    begun = time.monotonic_ns()
    wait_for_steps(ranks, LEAST_STEPS + 1)
    return Window(steps_since(ranks, begun, time.monotonic_ns()))


def beside(ranks: Ranks, trains: TaskPlan, prepares: TaskPlan) -> Window:
    """From the moment at which the other task is planned until its rows are there."""
    begun = time.monotonic_ns()
    ranks.plan([trains, prepares])
    rows = 0
    for _, report in ranks.reports(3600):
        found = next((task for task in report.tasks if task.uid == prepares.uid), None)
        if found is not None and found.phase is TaskPhase.PREPARED:
            assert found.data is not None
            rows = found.data.used
            break
    ended = time.monotonic_ns()
    ranks.plan([trains])
    return Window(steps_since(ranks, begun, ended), rows)


@contextmanager
def stranger(folder: Path, scratch: Path) -> Iterator[RowProcess]:
    """A preparation process as a rank has one, of no rank."""
    scratch.mkdir()
    token = scratch / "token"
    token.write_text("0" * 32)
    config = WorkerConfig(
        pipeline="bench/stranger",
        coordinator_host="127.0.0.1",
        stages=1,
        model=ModelSource(name=MODEL_NAME, uri=folder.as_uri()),
        microbatch_tokens=1024,
        token_file=str(token),
        allow_file_uris=True,
        cache_dir=str(scratch / "cache"),
    )
    facts = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    rows = RowProcess().start()
    try:
        rows.set_up(
            Setup(
                config=config,
                folder=str(folder),
                max_positions=facts["max_position_embeddings"],
                vocabulary=facts["vocab_size"],
            )
        )
        yield rows
    finally:
        rows.close()


def beside_stranger(ranks: Ranks, rows: RowProcess, prepares: TaskPlan) -> Window:
    begun = time.monotonic_ns()
    found = rows.make(prepares, None, lambda: True)
    return Window(steps_since(ranks, begun, time.monotonic_ns()), found.counts.used)


def steps_since(ranks: Ranks, begun: int, ended: int) -> list[float]:
    """Seconds of each step that was whole between two moments (monotonic nanoseconds)."""
    updates = [span.end for span in ranks.timeline().spans if span.kind == "update" and span.stage == 0]
    moments = [moment for moment in sorted(updates) if begun <= moment <= ended]
    return [(later - earlier) / 1e9 for earlier, later in pairwise(moments)]


def told(pair: dict[str, Window]) -> str:
    return ", ".join(
        f"{side}: {len(window.seconds)} steps of {window.median:.3f} s, at most {max(window.seconds):.3f} s"
        for side, window in pair.items()
    )
