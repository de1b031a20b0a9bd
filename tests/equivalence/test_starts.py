"""How A and B start: what a task may ask for, and what PEFT makes and a task begins with, equal PEFT's training.

PiSSA, OLoRA and CorDA take what A and B start with out of the base's weights. Such a start, saved with PEFT, is what
``initFrom`` names, on a pipeline whose base is the one that PEFT has left. PEFT then makes an adapter of the plain base.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor

from mlora_worker.coordinator.preparation.initial import read_initial
from mlora_worker.coordinator.task.prepared import InitialState
from mlora_worker.model.facts import model_facts
from mlora_worker.protocol import InitialWeights, LoRAConfig, Schedule, Training
from mlora_worker.storage.artifacts.adapter import CONFIG_NAME, WEIGHTS_NAME, adapter_config, save_weights
from mlora_worker.stream.targets import published_names, targets_of
from tests.equivalence.plain_peft import train_with_peft
from tests.equivalence.tasks import Base, Row, Task, Trained, assert_same, engines_of, train
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.threaded import ThreadedPipeline

STEPS = 20
MODULES = ("q_proj", "v_proj", "down_proj")
LORA = LoRAConfig(rank=8, alpha=16, target_modules=MODULES)
TRAINING = Training(
    batch_size=3, gradient_accumulation_steps=2, learning_rate=1e-3, schedule=Schedule.COSINE, warmup_steps=3,
    max_grad_norm=0.8, weight_decay=0.05, seed=5,
)  # fmt: skip


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_an_orthogonal_start_begins_as_the_base_and_trains_as_in_peft(
    base: Base, rows: Callable[..., list[Row]], stages: int
) -> None:
    lora = LORA.model_copy(update={"init_lora_weights": InitialWeights.ORTHOGONAL})
    subject, other = (
        Task("t", lora, TRAINING, rows(29, 3), STEPS),
        Task("o", LORA, TRAINING, rows(29, 4), STEPS),
    )
    ours = train(base, stages, [subject])["t"]
    assert all(tensor.any() for tensor in ours.start.values())
    plain = train(base, 1, [Task("p", LORA, TRAINING, subject.rows, 1)])["p"]
    assert ours.losses[0] == pytest.approx(plain.losses[0], rel=1e-5)
    assert_same(ours, train_with_peft(base, subject, ours.start), losses=1e-4, weights=1e-4)
    assert_same(train(base, stages, [other, subject])["t"], ours, losses=1e-5, weights=1e-4)


def started(base: Base, start: str, folder: Path) -> Base:
    """As the manual has it: the start is in ``folder/start``, the base that is left in ``folder/base``."""
    config = LoraConfig(
        r=LORA.rank, lora_alpha=LORA.alpha, target_modules=list(MODULES), init_lora_weights=start, task_type="CAUSAL_LM"
    )  # fmt: skip
    torch.manual_seed(1)
    model = get_peft_model(copy.deepcopy(base.model), config)
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(folder / "start")
    left = copy.deepcopy(model).unload()
    left.save_pretrained(folder / "base")
    return Base(folder / "base", left)


def trained_from(
    base: Base, stages: int, task: Task, initial: InitialState, start: Mapping[str, Tensor]
) -> Trained:
    run = task.prepared()
    assert run.prepared is not None
    run.prepared = replace(run.prepared, initial=initial)
    pipeline = ThreadedPipeline(engines_of(base, stages), {task.name: run}).run()
    assert pipeline.error is None
    losses = [pipeline.losses[task.name][step] for step in range(1, task.steps + 1)]
    return Trained(dict(start), pipeline.adapters[task.name], losses)


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("start", ["pissa", "pissa_niter_4", "olora"])
def test_a_start_that_peft_takes_out_of_the_base_trains_as_there_and_becomes_an_adapter_of_the_plain_base(
    base: Base, rows: Callable[..., list[Row]], tmp_path: Path, start: str, stages: int
) -> None:
    left = started(base, start, tmp_path)
    facts = model_facts(left.folder, stages, torch.float32)
    targets = targets_of(facts, LORA)
    store = MemoryStore()
    for file in (tmp_path / "start").iterdir():
        store.write(f"s3://adapters/start/{file.name}", file.read_bytes())
    initial = read_initial(store, "s3://adapters/start", LORA, targets).state
    tensors = load_file(tmp_path / "start" / WEIGHTS_NAME)
    subject = Task("t", LORA, TRAINING, rows(29, 3), STEPS)
    ours = trained_from(left, stages, subject, initial, tensors)

    # PEFT's own start, on the plain base, which it changes.
    config = LoraConfig(
        r=LORA.rank, lora_alpha=LORA.alpha, target_modules=list(MODULES), init_lora_weights=start, task_type="CAUSAL_LM"
    )  # fmt: skip
    torch.manual_seed(1)
    theirs = train_with_peft(base, subject, tensors, config=config)
    assert_same(ours, theirs, losses=1e-4, weights=1e-4)
    assert max(float((ours.adapter[name] - tensors[name]).norm()) for name in tensors) > 1e-2

    # What is published, converted with PEFT.
    save_weights(ours.adapter, tmp_path)
    published = adapter_config(LORA, "acme/left", None, published_names(facts, targets))
    (tmp_path / CONFIG_NAME).write_text(json.dumps(published))
    trained = PeftModel.from_pretrained(copy.deepcopy(left.model), tmp_path)
    ids = torch.arange(3, 19)[None]
    wanted = trained(ids).logits
    trained.peft_config["default"].init_lora_weights = start
    trained.save_pretrained(
        tmp_path / "plain", path_initial_model_for_weight_conversion=str(tmp_path / "start")
    )
    plain = PeftModel.from_pretrained(copy.deepcopy(base.model), tmp_path / "plain")
    assert plain.peft_config["default"].r == 2 * LORA.rank
    torch.testing.assert_close(plain(ids).logits, wanted, rtol=1e-4, atol=1e-4)
    assert (wanted - base.model(ids).logits).abs().max() > 1e-2
