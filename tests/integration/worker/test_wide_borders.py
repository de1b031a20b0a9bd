"""Ranks of models whose later layers need more than hidden states: it crosses real wires, and as much as was told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mlora_worker.model.facts import model_facts
from mlora_worker.protocol import TaskPhase, TaskPlan
from tests.fixtures.model_options import FAMILY, TARGETS, VARIANTS
from tests.fixtures.small_models import SMALL, unlike_their_defaults
from tests.fixtures.tiny_model import byte_level_tokenizer
from tests.integration.worker.conftest import Group

pytestmark = pytest.mark.integration

KINDS = ["gemma4_text, keys shared", "gemma3n_text"]


def write_model(folder: Path, kind: str) -> Path:
    tokenizer = byte_level_tokenizer(vocabulary=512)
    tokenizer.save_pretrained(folder)
    model_type, options = VARIANTS.get(kind, (kind, FAMILY.get(kind, {})))
    vocabulary = len(tokenizer)
    sizes = {
        "vocab_size": vocabulary,
        "vocab_size_per_layer_input": vocabulary,
        "max_position_embeddings": 512,
    }
    config = AutoConfig.for_model(model_type, **(SMALL | options | sizes))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = AutoModelForCausalLM.from_config(config)
        unlike_their_defaults(made)
    made.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_train_the_same_adapter_on_any_number_of_stages(
    start_group: Callable[..., Group], make_task: Callable[..., TaskPlan], tmp_path: Path, kind: str
) -> None:
    model = write_model(tmp_path / "model", kind)
    written: dict[int, bytes] = {}
    for stages in (1, 3):
        group = start_group(model, stages=stages)
        task = make_task(
            "wide",
            uid=f"wide-{stages}",
            outputUri=f"file://{tmp_path}/wide/{stages}",
            lora={"targetModules": list(TARGETS[kind])},
            training={"batchSize": 1},  # steps of one row are cut in one way alone
        )
        found = group.finish(task)["wide"]
        assert found.phase is TaskPhase.SUCCEEDED, found.failure
        report = group.report()
        borders = model_facts(model, stages, torch.float32).borders
        assert borders is not None
        assert {sample.stage for sample in report.memory} == set(range(stages)), (
            "calibration has measured each"
        )
        crossing = sum(border.forward + border.backward for border in borders[1:])
        assert report.wire.payload_bytes == crossing * report.wire.tokens * 4
        group.stop()
        written[stages] = (tmp_path / f"wide/{stages}/adapter_model.safetensors").read_bytes()
    assert written[1] == written[3]
