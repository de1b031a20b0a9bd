"""The closing table of the demonstrations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from examples.compare import Comparison


@dataclass(frozen=True)
class Trained:
    """What a task's status says at its end."""

    name: str
    rank: int
    modules: str
    priority: int
    steps: str
    tokens_per_second: str


def wide_console() -> Console:
    """Wide enough for the table, in a pipe or a log too."""
    console = Console()
    return console if console.width >= 120 else Console(width=120)


def print_table(
    console: Console, tasks: Sequence[Trained], comparison: Comparison, facts: Mapping[str, str]
) -> None:
    """One line a task, then the figures of the whole run."""
    table = Table(
        title=f"Held-out loss on {comparison.rows} rows ({comparison.supervised_tokens} answer tokens)"
    )
    for column in ("task", "rank", "modules", "priority", "steps", "tokens/s"):
        table.add_column(column, justify="left" if column in ("task", "modules") else "right")
    for column in ("base loss", "adapter loss", "change", "PEFT vs trainer logits"):
        table.add_column(column, justify="right")
    for task in tasks:
        result = comparison.adapters[task.name]
        change = result.heldout_loss / comparison.base_loss - 1
        table.add_row(
            task.name,
            str(task.rank),
            task.modules,
            str(task.priority),
            task.steps,
            task.tokens_per_second,
            f"{comparison.base_loss:.3f}",
            f"{result.heldout_loss:.3f}",
            f"{change:+.0%}",
            f"{result.logit_difference:.1e}",
        )
    console.print(table)
    for name, value in facts.items():
        console.print(f"{name}: {value}")


LEAST_GAIN = 0.2  # of the base's held-out loss
# Of the largest logit. Two orders of summation in float32 differ by a few 1e-6 after 30 layers.
MOST_DIFFERENCE = 2e-5


def verdict(
    comparison: Comparison, *, least_gain: float = LEAST_GAIN, most_difference: float = MOST_DIFFERENCE
) -> list[str]:
    """What falls short, in words; empty when every adapter is better than the base and PEFT agrees with the trainer."""
    problems = []
    for name, result in comparison.adapters.items():
        gain = 1 - result.heldout_loss / comparison.base_loss
        if gain < least_gain:
            problems.append(
                f"{name}: held-out loss is only {gain:.0%} below the base's, expected {least_gain:.0%}"
            )
        if not result.logit_difference <= most_difference:
            problems.append(
                f"{name}: PEFT's logits differ from the trainer's by {result.logit_difference:.1e} of the largest, "
                f"expected {most_difference:.0e} at most"
            )
    return problems
