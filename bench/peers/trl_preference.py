"""TRL's DPOTrainer with PEFT, on pairs that are tokens already and come in the order in which they stand."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, disable_progress_bars
from torch import Tensor
from torch.utils.data import SequentialSampler
from trl import DPOConfig, DPOTrainer

from bench.base import sharing_copy
from bench.peers.adapters import peft_model, set_adapter
from bench.sides import MAX_GRAD_NORM, Setting
from mlora_worker.data.prepare import TokenRow

os.environ.setdefault("TQDM_DISABLE", "1")
disable_progress_bars()


class InOrder:
    """Rows come as they stand, and each loss is kept as it is: logs round it."""

    losses: list[float]

    def _get_train_sampler(self, *_: Any, **__: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)  # type: ignore[attr-defined]

    def compute_loss(self, *arguments: Any, **options: Any) -> Any:
        loss = super().compute_loss(*arguments, **options)  # type: ignore[misc]
        self.losses.append(float(loss.detach()))
        return loss


class TokenDPO(InOrder, DPOTrainer):  # type: ignore[misc]
    def _prepare_dataset(self, dataset: Dataset, *_: Any, **__: Any) -> Dataset:
        return dataset


def trl_row(row: TokenRow) -> dict[str, Any]:
    prompt = 1 + int((row.labels[: row.split] >= 0).argmax())
    return {
        "prompt_ids": row.ids[:prompt].tolist(),
        "chosen_ids": row.ids[prompt : row.split].tolist(),
        "rejected_ids": row.ids[row.split + prompt :].tolist(),
    }


class TrlTask:
    """One task, ready to train. With ``precomputed`` references, these are known when this returns."""

    def __init__(
        self,
        base: Any,
        tokenizer: Any,
        setting: Setting,
        rows: Sequence[TokenRow],
        adapter: Mapping[str, Tensor],
        *,
        batch: int,
        beta: float,
        learning_rate: float,
        precomputed: bool,
        scratch: Path,
    ) -> None:
        self.model = peft_model(sharing_copy(base), setting)
        set_adapter(self.model, adapter)
        config = DPOConfig(
            output_dir=str(scratch),
            per_device_train_batch_size=batch,
            num_train_epochs=1,
            learning_rate=learning_rate,
            lr_scheduler_type="constant",
            max_grad_norm=MAX_GRAD_NORM,
            beta=beta,
            precompute_ref_log_probs=precomputed,
            precompute_ref_batch_size=batch,
            gradient_checkpointing=False,  # which would cost it a second forward
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            use_cpu=True,
            bf16=False,
            remove_unused_columns=False,
            disable_tqdm=True,
        )
        self._trainer = TokenDPO(
            model=self.model,
            args=config,
            train_dataset=Dataset.from_list([trl_row(row) for row in rows]),
            processing_class=tokenizer,
        )
        self._trainer.losses = []

    def train(self) -> list[float]:
        """Loss of each step."""
        self._trainer.train()
        return list(self._trainer.losses)
