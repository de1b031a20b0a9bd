"""Are the adapters any good? SmolLM2-135M learns GSM8K here and with PEFT, from the same start, on the same rows, with the
same budget; then both answer questions that neither was trained on.

Each repetition is a task with initial weights, rows and dropout of its own. Here all tasks train at once, as they do in a
worker; PEFT trains them one after the other. One evaluator measures all adapters, and the base model without one: the loss
of the known answers, and of answers that are generated, how many end in GSM8K's own form (#### and a number), and how many
in the right number. The masks of dropout differ between both sides, so losses agree within noise and not to the last
digit: as noise counts how far PEFT's own runs lie apart.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from bench.base import cut_folder, smollm2_folder, transformers_model, whole_stage
from bench.options import parser, repetitions
from bench.ours import Ours
from bench.peers.peft_padded import PeftPadded
from bench.report import last_line, table
from bench.rows import HELD_OUT, deal, gsm8k_rows, pad
from bench.sides import Setting
from mlora_worker.data.prepare import IGNORED, TokenRow
from mlora_worker.data.tokenizing.tokenizer import load_tokenizer

LEARNING_RATE = 5e-4
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
ANSWER = re.compile(r"####\s*(-?[\d,]*\.?\d+)\s*$")


@dataclass(frozen=True)
class Budget:
    steps: int
    batch: int
    test_rows: int  # whose loss is measured
    questions: int  # of these, that are answered
    new_tokens: int  # of an answer, at most


QUICK, USUAL, LONG = Budget(2, 1, 2, 1, 8), Budget(24, 2, 24, 8, 192), Budget(100, 4, 64, 64, 320)


@dataclass(frozen=True)
class Marks:
    loss: float  # mean cross entropy over the answers' tokens
    formed: float  # part of the generated answers that end in #### and a number
    right: float  # part that end in the right number


def main(arguments: list[str]) -> int:
    options = parser("quality", __doc__).parse_args(arguments)
    torch.set_num_threads(options.threads)
    budget = QUICK if options.quick else LONG if options.long else USUAL
    with TemporaryDirectory() as scratch:
        folder = smollm2_folder()
        if options.quick:
            folder = cut_folder(folder, 2, Path(scratch))
        tasks = max(2, repetitions(options, usual=2, long=5))  # one run alone knows no noise
        marks = measured(folder, budget, tasks)
    result = compare(marks)
    rows = [
        [name, *(round(figure(found, kind), 4) for kind in ("loss", "formed", "right"))]
        for name, found in marks.items()
    ]
    print(table(["", "test loss", "ends in #### number", "right number"], rows))
    print(
        f"\nloss here over PEFT's: {result['loss_ratio']:.4f}; they differ by {result['loss_difference']:.4f}, PEFT's runs "
        f"among themselves by {result['loss_noise']:.4f}\n"
    )
    sizes = {
        "steps": budget.steps,
        "batch": budget.batch,
        "test_rows": budget.test_rows,
        "questions": budget.questions,
    }
    print(
        last_line("quality", result | sizes, repetitions=tasks, threads=options.threads, quick=options.quick)
    )
    return 0


def measured(folder: Path, budget: Budget, tasks: int) -> dict[str, list[Marks]]:
    """Marks of the base model, and of each side's adapters."""
    train, test = gsm8k_rows(folder), gsm8k_rows(folder, HELD_OUT)[: budget.test_rows]
    setting = Setting(tasks=tasks, targets=TARGETS)
    ours = Ours(whole_stage(folder, torch.float32), setting, separate_updates=True)
    peft = PeftPadded(transformers_model(folder, torch.float32), setting)
    start = [{name: tensor.clone() for name, tensor in one.items()} for one in ours.adapters()]
    peft.restore(start)
    torch.manual_seed(0)  # of PEFT's dropout
    for step in range(budget.steps):
        batch = deal(train, tasks, budget.batch, step)
        rate = LEARNING_RATE * (1 - step / budget.steps)
        ours.step(batch, rate)
        peft.step(batch, rate)
    tokenizer = load_tokenizer(folder)
    marks = {"peft": [marks_of(model, tokenizer, test, budget) for model in peft.models]}
    peft.restore(start)  # B is zero: the base model
    marks["base"] = [marks_of(peft.models[0], tokenizer, test, budget)]
    peft.restore(ours.adapters())
    marks["ours"] = [marks_of(model, tokenizer, test, budget) for model in peft.models]
    return {name: marks[name] for name in ("base", "peft", "ours")}


@torch.no_grad()
def marks_of(model: Any, tokenizer: Any, rows: Sequence[TokenRow], budget: Budget) -> Marks:
    """Of a PEFT model, whose mode is the same afterwards."""
    was_training = model.training
    model.eval()
    loss = supervised = 0.0
    for row in rows:
        padded = pad([row])
        count = int((row.labels != IGNORED).sum())
        out = model(
            input_ids=padded.ids, attention_mask=padded.mask, labels=padded.unshifted_labels, use_cache=False
        )
        loss += float(out.loss) * count
        supervised += count
    answers = [answer(model, tokenizer, row, budget.new_tokens) for row in rows[: budget.questions]]
    known = [
        final_number(tokenizer.decode(row.labels[row.labels != IGNORED], skip_special_tokens=True))
        for row in rows
    ]
    model.train(was_training)
    return Marks(
        loss / supervised,
        sum(found is not None for found in answers) / budget.questions,
        sum(found is not None and found == wanted for found, wanted in zip(answers, known, strict=False))
        / budget.questions,
    )


def answer(model: Any, tokenizer: Any, row: TokenRow, new_tokens: int) -> str | None:
    """The number that a greedily generated answer to the row's question ends in; None: it does not end so."""
    question = int((row.labels != IGNORED).argmax()) + 1
    ids: Tensor = torch.from_numpy(row.ids[:question].astype("int64"))[None]
    made = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return final_number(tokenizer.decode(made[0, question:], skip_special_tokens=True))


def final_number(text: str) -> str | None:
    found = ANSWER.search(text.strip())
    return found[1].replace(",", "") if found else None


def figure(marks: Sequence[Marks], kind: str) -> float:
    return statistics.fmean(getattr(one, kind) for one in marks)


def compare(marks: Mapping[str, Sequence[Marks]]) -> dict[str, float]:
    """Means over the repetitions, and how far PEFT's own lie apart."""
    result = {
        f"{kind}_{name}": figure(found, kind)
        for name, found in marks.items()
        for kind in ("loss", "formed", "right")
    }
    spread = [one.loss for one in marks["peft"]]
    differences = [one.loss - other.loss for one, other in zip(marks["ours"], marks["peft"], strict=True)]
    return result | {
        "loss_ratio": result["loss_ours"] / result["loss_peft"],
        "loss_difference": abs(statistics.fmean(differences)),
        "loss_noise": max(spread) - min(spread),
    }
