"""TRL's own trainers on pairs that are tokens already, in a task's own order: what a preference task is compared with."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from datasets import Dataset
from peft import LoraConfig, get_peft_model
from peft.utils.save_and_load import get_peft_model_state_dict, set_peft_model_state_dict
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from bench.peers.trl_preference import InOrder, TokenDPO, trl_row
from mlora_worker.protocol import Objective, ObjectiveType
from tests.equivalence.tasks import IGNORED, VOCABULARY, Base, Row, Task, Trained


class _TokensAreThere(InOrder):
    """Their rows are texts of numbers."""

    def tokenize_row(self, feature: Mapping[str, Any], **_: Any) -> dict[str, Any]:
        made: dict[str, Any] = {}
        prompt = feature["prompt_ids"]
        for name in ("chosen", "rejected"):
            answer = feature[f"{name}_ids"]
            made[f"{name}_input_ids"] = prompt + answer
            made[f"{name}_attention_mask"] = [1] * len(prompt + answer)
            made[f"{name}_labels"] = [IGNORED] * len(prompt) + answer
        return made | {"prompt_input_ids": prompt, "prompt_attention_mask": [1] * len(prompt)}


class _CPO(_TokensAreThere, CPOTrainer):  # type: ignore[misc]
    pass


class _ORPO(_TokensAreThere, ORPOTrainer):  # type: ignore[misc]
    pass


class _KTO(InOrder, KTOTrainer):  # type: ignore[misc]
    """``kl`` of each microbatch. The mismatched answers are made as its own preparation makes them."""

    def _prepare_dataset(self, dataset: Dataset, _: Any, args: Any, *__: Any) -> Dataset:
        if not self.calculate_KL:
            return dataset

        def mismatched(examples: dict[str, Any]) -> dict[str, Any]:
            answers = examples["completion_ids"]
            examples["KL_completion_ids"] = [answers[-1], *answers[:-1]]
            return examples

        return dataset.map(mismatched, batched=True, batch_size=args.per_device_train_batch_size)


def train_with_trl(base: Base, task: Task, start: Mapping[str, Tensor], folder: Path) -> Trained:
    """One epoch over the rows of all steps, in the order of the task's own plan."""
    training, objective = task.training, task.training.objective
    assert objective is not None
    rows = [_row(row) for step in range(1, task.steps + 1) for row in task.batch(step)]
    model = get_peft_model(
        copy.deepcopy(base.model),
        LoraConfig(
            r=task.lora.rank,
            lora_alpha=task.lora.alpha,
            use_dora=task.lora.use_dora,
            target_modules=list(task.lora.target_modules),
            task_type="CAUSAL_LM",
        ),
    )
    set_peft_model_state_dict(model, dict(start))
    common: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": training.batch_size,
        "gradient_accumulation_steps": training.gradient_accumulation_steps,
        "num_train_epochs": 1,
        "learning_rate": training.learning_rate,
        "lr_scheduler_type": training.schedule.value,
        "warmup_steps": training.warmup_steps,
        "weight_decay": training.weight_decay,
        "max_grad_norm": training.max_grad_norm,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "remove_unused_columns": False,
        "disable_tqdm": True,
        "max_length": training.max_seq_length,
        "logging_steps": 1,
    }
    kind, config = _trainer(objective, common)
    trainer = kind(
        model=model, args=config, train_dataset=Dataset.from_list(rows), processing_class=_tokenizer()
    )
    trainer.losses = []
    trainer.train()
    result = Trained(start=dict(start))
    each = training.gradient_accumulation_steps
    result.losses = [sum(trainer.losses[at : at + each]) / each for at in range(0, len(trainer.losses), each)]
    found = get_peft_model_state_dict(model)
    result.logs = trainer.state.log_history
    result.adapter = {name: tensor.detach().float().clone() for name, tensor in found.items()}
    return result


def answers_of_trl(rows: Sequence[Mapping[str, Any]], tokenizer: Any, longest: int) -> list[dict[str, Any]]:
    """As KTOTrainer tokenises them."""
    config = SimpleNamespace(dataset_num_proc=None, max_length=longest, per_device_train_batch_size=2)
    trainer = SimpleNamespace(
        _tokenizer=tokenizer, calculate_KL=False, desirable_weight=1.0, undesirable_weight=1.0
    )
    made = KTOTrainer._prepare_dataset(
        trainer, Dataset.from_list([*map(dict, rows)]), tokenizer, config, "train"
    )
    return list(made)


def rows_of_trl(rows: Sequence[Mapping[str, Any]], tokenizer: Any, longest: int) -> list[dict[str, Any]]:
    """As DPOTrainer tokenises them."""
    config = SimpleNamespace(dataset_num_proc=None, max_length=longest, truncation_mode="keep_start")
    trainer = SimpleNamespace(_tokenizer=tokenizer)
    made = DPOTrainer._prepare_dataset(
        trainer, Dataset.from_list([*map(dict, rows)]), tokenizer, config, "train"
    )
    return list(made)


def _trainer(objective: Objective, common: Mapping[str, Any]) -> tuple[Any, Any]:
    """With TRL's own default for what the objective leaves out."""
    given: dict[str, Any] = {"beta": objective.beta, "label_smoothing": objective.label_smoothing}
    if objective.loss_type is not None:
        given["loss_type"] = objective.loss_type.value
    if objective.type is ObjectiveType.SIMPO:
        given |= {"loss_type": "simpo", "cpo_alpha": objective.cpo_alpha or 0.0}
        given["simpo_gamma"] = objective.simpo_gamma
    if objective.type is ObjectiveType.CPO:
        given["cpo_alpha"] = objective.cpo_alpha
    options = {name: value for name, value in given.items() if value is not None}
    match objective.type:
        case ObjectiveType.DPO:
            return TokenDPO, DPOConfig(**common, **options)
        case ObjectiveType.KTO:
            options["desirable_weight"], options["undesirable_weight"] = objective.label_weights[::-1]
            return _KTO, KTOConfig(**common, **options)
        case ObjectiveType.ORPO:
            return _ORPO, ORPOConfig(**common, **options)
    return _CPO, CPOConfig(**common, **options)


def _row(row: Row) -> dict[str, Any]:
    if row.desirable is not None:
        prompt = 1 + next(at for at, label in enumerate(row.labels) if label != IGNORED)
        ids = list(row.ids)
        return {"prompt_ids": ids[:prompt], "completion_ids": ids[prompt:], "label": row.desirable}
    texts = {"prompt": "a", "chosen": "b", "rejected": "c"}  # which are looked for, and never used
    return trl_row(row.tokens) | texts


def _tokenizer() -> PreTrainedTokenizerFast:
    """Of numbers. Only its padding is used."""
    words = {str(number): number for number in range(VOCABULARY)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="0")),
        pad_token="0",
        eos_token="1",
        unk_token="0",
    )
