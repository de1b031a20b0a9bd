"""Every kind of adapter equals PEFT's own, over 20 steps: alone, beside neighbours of other kinds, on 1, 2 and 3 stages."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from peft import PeftModel, VeraConfig
from peft.optimizers import create_loraplus_optimizer
from transformers import AutoModelForCausalLM, GPT2Config, PretrainedConfig, Qwen2Config

from mlora_worker.commands.adapter_check import check_adapter as check_folder
from mlora_worker.coordinator.preparation.expected_tensors import expected_tensors, random_matrices
from mlora_worker.frozen.four_bits import nf4
from mlora_worker.model.facts import model_facts
from mlora_worker.protocol import AdapterType, InitialWeights, LoRAConfig, Optimizer, Schedule, Training
from mlora_worker.storage.artifacts.adapter import CONFIG_NAME, adapter_config, check_adapter, save_weights
from mlora_worker.stream.items import Segment, Train
from mlora_worker.stream.targets import published_names, targets_of
from tests.equivalence.plain_peft import train_with_peft
from tests.equivalence.tasks import VOCABULARY, Base, Row, Task, Trained, assert_same, engines_of, train
from tests.equivalence.test_quantised import on_its_values
from tests.equivalence.test_resume import assert_bit_identical, crash_at, play, whole
from tests.fixtures.memory_store import MemoryStore

STEPS = 20
TRAINING = Training(
    batch_size=3,
    gradient_accumulation_steps=2,
    learning_rate=2e-3,
    schedule=Schedule.COSINE,
    warmup_steps=3,
    max_grad_norm=0.8,
    weight_decay=0.05,
    seed=5,
    checkpoint_every_steps=5,
)
MODULES = ("q_proj", "v_proj", "up_proj", "down_proj")
KINDS = {
    "plain": LoRAConfig(rank=8, alpha=16, target_modules=("all-linear",)),
    "loraplus": LoRAConfig(rank=8, alpha=16, target_modules=MODULES, loraplus_lr_ratio=8.0),
    "dora": LoRAConfig(rank=8, alpha=16, target_modules=MODULES, use_dora=True),
    "vera": LoRAConfig(type=AdapterType.VERA, rank=24, target_modules=MODULES, d_initial=0.5),
}


def mean(losses: Sequence[float | None]) -> float:
    known = [loss for loss in losses if loss is not None]
    return sum(known) / len(known)


def task(kind: str, rows: Callable[..., list[Row]]) -> Task:
    training = TRAINING
    if kind == "loraplus":
        training = training.model_copy(update={"learning_rate": 5e-4})
    if kind == "vera":
        training = training.model_copy(update={"learning_rate": 2e-2})
    return Task(kind, KINDS[kind], training, rows(29, len(kind)), STEPS)


def loraplus(model: PeftModel, training: Training) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = create_loraplus_optimizer(
        model,
        torch.optim.AdamW,
        lr=training.learning_rate,
        loraplus_lr_ratio=8.0,
        loraplus_weight_decay=training.weight_decay,
    )
    return made


def with_peft(base: Base, task: Task, ours: Trained, seed: int | None = None) -> Trained:
    """``seed``: of VeRA's matrices, where it is not the task's."""
    optimizer = loraplus if task.lora.loraplus_lr_ratio else None
    config = None
    if task.lora.type is AdapterType.VERA:
        config = VeraConfig(
            r=task.lora.rank,
            target_modules="all-linear"
            if task.lora.target_modules == ("all-linear",)
            else list(task.lora.target_modules),
            d_initial=task.lora.vera_start,
            projection_prng_key=task.training.seed if seed is None else seed,
            save_projection=False,
            task_type="CAUSAL_LM",
        )
    return train_with_peft(base, task, ours.start, config=config, optimizer_of=optimizer)


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "plain"])
def test_twenty_steps_equal_peft_alone_and_beside_other_kinds(
    base: Base, rows: Callable[..., list[Row]], kind: str, stages: int
) -> None:
    subject, others = task(kind, rows), [task(other, rows) for other in KINDS if other != kind]
    alone = train(base, stages, [subject], budget=90)[kind]
    assert_same(alone, with_peft(base, subject, alone), losses=1e-4, weights=1e-4)
    beside = train(base, stages, [others[0], subject, *others[1:]], budget=200)
    assert_same(beside[kind], alone, losses=1e-5, weights=1e-4)
    for other in others:
        assert_same(beside[other.name], train(base, 1, [other])[other.name], losses=1e-5, weights=1e-4)
    epoch = subject.plan.steps_per_epoch
    assert mean(alone.losses[-epoch:]) < mean(alone.losses[:epoch])


def test_the_ratio_of_loraplus_is_noticed(base: Base, rows: Callable[..., list[Row]]) -> None:
    subject = task("loraplus", rows)
    ours = train(base, 1, [subject])["loraplus"]
    with pytest.raises(AssertionError):
        assert_same(ours, train_with_peft(base, subject, ours.start), losses=1e-4, weights=1e-4)


@pytest.mark.parametrize("optimizer", ["adamw", "lion"])
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("kind", list(KINDS))
def test_every_kind_resumes_from_its_checkpoint_bit_for_bit(
    base: Base, rows: Callable[..., list[Row]], kind: str, stages: int, optimizer: str
) -> None:
    subject = task(kind, rows)
    numbers = Optimizer.model_validate({"type": optimizer})
    training = subject.training.model_copy(update={"optimizer": numbers})
    subject = Task("subject", subject.lora, training, subject.rows, STEPS)
    undisturbed = whole(play(base, stages, [subject]), subject)
    store = MemoryStore()
    play(base, stages, [subject], store=store, script=crash_at(12, saved=10))
    found = whole(play(base, stages, [subject], store=store), subject)
    assert found.tasks["subject"].checkpoint.resumed_step in (10, 12)
    assert_bit_identical(found, undisturbed, "subject")


MAGNITUDE = "lora_magnitude_vector"


def test_a_magnitude_that_is_not_trained_is_noticed(base: Base, rows: Callable[..., list[Row]]) -> None:
    """What DoRA is without its magnitudes learning, is not what PEFT trains."""
    subject = task("dora", rows)
    ours = train(base, 1, [subject])["dora"]
    learnt = [name for name in ours.adapter if name.endswith(MAGNITUDE)]
    assert len(learnt) == len(MODULES) * base.model.config.num_hidden_layers
    theirs = with_peft(base, subject, ours)
    for name in learnt:
        moved = theirs.adapter[name] - ours.start[name]
        assert moved.norm() > 1e-3 * ours.start[name].norm(), "PEFT has trained it"
        assert (ours.adapter[name] - theirs.adapter[name]).norm() < 1e-2 * moved.norm(), "and so have we"
    assert_same(ours, theirs, losses=1e-4, weights=1e-4)

    def without_magnitudes(model: PeftModel, training: Training) -> torch.optim.Optimizer:
        parameters = [p for name, p in model.named_parameters() if p.requires_grad and MAGNITUDE not in name]
        return torch.optim.AdamW(parameters, lr=training.learning_rate, weight_decay=training.weight_decay)

    untrained = train_with_peft(base, subject, ours.start, optimizer_of=without_magnitudes)
    with pytest.raises(AssertionError):
        assert_same(ours, untrained, losses=1e-4, weights=1e-4)


def test_dora_with_all_that_goes_with_it_equals_peft(base: Base, rows: Callable[..., list[Row]]) -> None:
    lora = LoRAConfig(
        rank=4, alpha=8, target_modules=("all-linear",), use_dora=True, use_rslora=True, loraplus_lr_ratio=8.0,
        init_lora_weights=InitialWeights.GAUSSIAN,
    )  # fmt: skip
    subject = Task("t", lora, TRAINING.model_copy(update={"learning_rate": 5e-4}), rows(29, 3), STEPS)
    ours = train(base, 2, [subject], recompute=True)["t"]
    assert_same(ours, with_peft(base, subject, ours), losses=1e-4, weights=1e-4)


def test_dora_on_a_quantised_base_equals_peft_on_its_values(
    base: Base, rows: Callable[..., list[Row]]
) -> None:
    subject = task("dora", rows)
    freeze = partial(nf4, double=True)
    ours = train(base, 2, [subject], freeze=freeze)["dora"]
    plain = on_its_values(base, freeze, torch.float32)
    assert_same(ours, with_peft(plain, subject, ours), losses=1e-4, weights=1e-4)
    assert_same(ours, train(plain, 2, [subject])["dora"], losses=1e-6, weights=1e-6)


@pytest.mark.parametrize("model", ["biased", "gpt2"])
def test_dora_leaves_a_bias_as_it_is(tmp_path: Path, rows: Callable[..., list[Row]], model: str) -> None:
    """GPT-2 also has its weights transposed."""
    other = {"biased": biased_qwen2, "gpt2": tiny_gpt2}[model](tmp_path)
    modules = {"biased": MODULES, "gpt2": ("c_attn", "c_fc", "c_proj")}[model]
    lora = LoRAConfig(rank=4, alpha=8, target_modules=modules, use_dora=True)
    subject = Task("t", lora, TRAINING, rows(11, 3), 5)
    ours = train(other, 1, [subject])["t"]
    assert_same(ours, with_peft(other, subject, ours), losses=1e-4, weights=1e-4)


def biased_qwen2(folder: Path) -> Base:
    return _random(
        folder,
        Qwen2Config(
            hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=VOCABULARY, max_position_embeddings=128, initializer_range=0.08,
        ),
    )  # fmt: skip


def tiny_gpt2(folder: Path) -> Base:
    return _random(
        folder,
        GPT2Config(
            n_embd=48, n_layer=2, n_head=4, n_positions=128, vocab_size=VOCABULARY, initializer_range=0.08,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=1,
        ),
    )  # fmt: skip


def _random(folder: Path, config: PretrainedConfig) -> Base:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(std=0.5)
    config.save_pretrained(folder)
    return Base(folder, model)


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_published_adapter_loads_in_peft_and_merges_to_the_same(
    base: Base, rows: Callable[..., list[Row]], tmp_path: Path, kind: str
) -> None:
    """What the checks before publishing let through, by PEFT's own reading: no key is missing, none is unexpected."""
    subject = task(kind, rows)
    ours = train(base, 2, [subject])[kind]
    facts = model_facts(base.folder, 2, torch.float32)
    targets = targets_of(facts, subject.lora)
    check_adapter(ours.adapter, expected_tensors(targets))
    seed = subject.training.seed
    config = adapter_config(subject.lora, "acme/tiny", None, published_names(facts, targets), seed=seed)
    (tmp_path / CONFIG_NAME).write_text(json.dumps(config))
    save_weights(ours.adapter | random_matrices(subject.lora, seed, targets), tmp_path)
    if kind != "vera":
        check_folder(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # of missing and of unexpected keys
        model = PeftModel.from_pretrained(copy.deepcopy(base.model), tmp_path)
    ids = torch.arange(3, 19)
    adapted = model(ids[None]).logits[0]
    (engine,) = engines_of(base, 1)
    engine.load(subject.load)
    engine.restore(kind, ours.adapter)
    segment = Segment(task=kind, step=1, lengths=(16,), first_row=0, weight=1.0, closes_step=True)
    found = engine.logits(Train(number=1, segments=(segment,)), ids)
    torch.testing.assert_close(found, adapted, rtol=1e-4, atol=1e-4)
    merged = model.merge_and_unload()(ids[None]).logits[0]
    torch.testing.assert_close(merged, adapted, rtol=1e-4, atol=1e-4)
    assert (adapted - base.model(ids[None]).logits[0]).abs().max() > 1e-2


def test_vera_with_dropout_recomputed_in_microbatches_equals_peft(
    base: Base, rows: Callable[..., list[Row]]
) -> None:
    lora = KINDS["vera"].model_copy(update={"dropout": 0.2, "rank": 60, "target_modules": ("all-linear",)})
    subject = Task("t", lora, TRAINING.model_copy(update={"learning_rate": 2e-2}), rows(29, 3), 10)
    assert lora.rank > base.model.config.hidden_size, "a rank may be larger than a side"
    ours = train(base, 2, [subject], budget=60, recompute=True)["t"]
    assert max(ours.microbatches) > 1
    assert_same(ours, with_peft(base, subject, ours), losses=1e-4, weights=1e-4)


def test_veras_vectors_are_trained_and_its_matrices_follow_from_the_seed(
    base: Base, rows: Callable[..., list[Row]]
) -> None:
    subject = task("vera", rows)
    ours = train(base, 2, [subject])["vera"]
    for name, vector in ours.adapter.items():
        assert (vector - ours.start[name]).norm() > 1e-3, name
    theirs = with_peft(base, subject, ours, seed=TRAINING.seed + 1)
    with pytest.raises(AssertionError):
        assert_same(ours, theirs, losses=1e-4, weights=1e-4)
