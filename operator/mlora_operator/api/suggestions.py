"""What somebody may have meant who wrote a field that there is not. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

# Names of PEFT, TRL, Axolotl and others for what has another name here.
ELSEWHERE = {
    "r": "rank",
    "lora_r": "rank",
    "lora_rank": "rank",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "lora_target_modules": "targetModules",
    "lora_target_linear": "targetModules",
    "lora_target": "targetModules",
    "modules": "targetModules",
    "lora_target_parameters": "targetParameters",
    "lr": "learningRate",
    "num_train_epochs": "epochs",
    "num_epochs": "epochs",
    "per_device_train_batch_size": "batchSize",
    "micro_batch_size": "batchSize",
    "sequence_len": "maxSeqLength",
    "cutoff_len": "maxSeqLength",
    "max_length": "maxSeqLength",
    "lr_scheduler": "schedule",
    "lr_scheduler_type": "schedule",
    "max_norm": "maxGradNorm",
    "optim": "optimizer",
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
    "adam_epsilon": "epsilon",
    "eval_steps": "everySteps",
    "save_steps": "checkpointEverySteps",
    "rl_beta": "beta",
    "pref_beta": "beta",
    "pref_loss": "lossType",
    "dpo_label_smoothing": "labelSmoothing",
    "kto_chosen_weight": "desirableWeight",
    "kto_rejected_weight": "undesirableWeight",
    "path": "uri",
    "url": "uri",
    "type": "format",
    "val_set_size": "heldOut",
    "val_size": "heldOut",
    "max_samples": "limit",
    "load_best_model_at_end": "keepBest",
    "peft_use_dora": "useDora",
    "lora_plus_lr_ratio": "loraplusLrRatio",
    "lora_model_dir": "initFrom",
    "adapter_name_or_path": "initFrom",
    "output_dir": "output",
    "model_name_or_path": "baseModel",
    "model": "baseModel",
    "modelName": "baseModel",
}


# What PEFT can be asked for that is not there, and why.
NOT_HERE = {
    "modules_to_save": "whole modules are never trained, only adapters of linear modules: remove it",
    "trainable_token_indices": "rows of the embeddings are never trained: remove it",
    "layer_replication": "layers of the base are never copied: remove it",
    "bias": "biases are never trained: remove it",
    "lora_bias": "biases are never trained: remove it",
    "layers_pattern": "the layers are found without it: remove it",
    **dict.fromkeys(
        ("eva_config", "corda_config", "loftq_config", "lora_ga_config"),
        "such a start is made with PEFT: remove it, and name what PEFT has saved in initFrom",
    ),
}


def unknown_field(name: object, known: Iterable[str]) -> str:
    """``unknown field``, with the one of ``known`` that is near, or that is called so elsewhere."""
    text, names = str(name), list(known)
    snake = "".join(f"_{char.lower()}" if char.isupper() else char for char in text)
    if snake in NOT_HERE:
        return f"unknown field; {NOT_HERE[snake]}"
    camel = "".join(part if index == 0 else part.capitalize() for index, part in enumerate(text.split("_")))
    for meant in (ELSEWHERE.get(text), ELSEWHERE.get(camel), camel):
        if meant in names and meant != text:
            return f"unknown field; did you mean {meant}?"
    by_lower = {one.lower(): one for one in names}
    near = get_close_matches(camel.lower(), by_lower, n=1, cutoff=0.7)
    return f"unknown field; did you mean {by_lower[near[0]]}?" if near else "unknown field"
