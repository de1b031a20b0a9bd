"""The loop never waits for its device, and hands on what a fault leaves in the shape that was announced."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from mlora_worker.model.load import load_stage
from mlora_worker.model.stage import Stage
from mlora_worker.pipeline.engine import StageEngine
from mlora_worker.pipeline.faults import Fault, Phase
from mlora_worker.pipeline.loop import StageLoop
from mlora_worker.pipeline.mailbox import Entry, Mailbox
from mlora_worker.pipeline.transport import STATS, BackwardMessage
from mlora_worker.protocol import LoRAConfig, Training
from mlora_worker.stream.items import Load, Save, Segment, Stop, Train, Unload, Update
from tests.fixtures.model_options import VARIANTS

META = torch.device("meta")
IDS = torch.arange(12)


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``stages(count, dtype)``: a tiny random Llama in ``count`` stages."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=50,
    )  # fmt: skip
    config.save_pretrained(folder)
    weights = LlamaForCausalLM(config).state_dict()

    class Source:
        def names(self) -> set[str]:
            return set(weights)

        def tensor(self, name: str) -> Tensor:
            return weights[name]

    def make(count: int, dtype: torch.dtype = torch.float32) -> list[Stage]:
        cpu = torch.device("cpu")
        return [load_stage(Path(folder), Source(), i, count, dtype, cpu) for i in range(count)]

    return make


@dataclass
class Sent:
    """Stands for the neighbours and for rank 0: keeps what it gets."""

    forward: list[Tensor] = field(default_factory=list)
    backward: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    returned: dict[int, Tensor] = field(default_factory=dict)
    exported: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    def send_forward(self, hidden: Tensor) -> None:
        self.forward.append(hidden)

    def send_backward(self, gradient: Tensor, stats: Tensor) -> None:
        self.backward.append((gradient, stats))


def run(engine: StageEngine, *work: Entry | BackwardMessage) -> Sent:
    """Let the loop of ``engine``'s rank do ``work``, in this order."""
    sent, rest = Sent(), [*work, Entry(Stop(number=99))]

    class Script(Mailbox):
        def take(self) -> BackwardMessage | Entry:
            return rest.pop(0)

    StageLoop(
        first=engine.stage.first,
        last=engine.stage.last,
        engine=engine,
        mailbox=Script(threading.Condition()),
        neighbours=sent,
        on_returned=sent.returned.__setitem__,
        on_exported=sent.exported.__setitem__,
        on_fault=sent.faults.append,
    ).run()
    return sent


def load(task: str) -> Entry:
    lora = LoRAConfig(rank=4, alpha=8, target_modules=("q_proj", "down_proj"))
    return Entry(Load(number=0, task=task, lora=lora, training=Training(seed=1)))


def train(number: int, *tasks: str, update: Update | None = None, discard: bool = False) -> Train:
    segments = tuple(
        Segment(
            task=task, step=1, lengths=(5, 7), first_row=0, weight=0.1, closes_step=True, update=update,
            discard=discard,
        )
        for task in tasks
    )  # fmt: skip
    return Train(number=number, segments=segments)


def whole(item: Train) -> Entry:
    """For a stage that is first and last."""
    ids = IDS.repeat(len(item.segments))
    return Entry(item, token_ids=ids, labels=ids + 1)


class CopiesThatWait(TorchDispatchMode):
    """Finds copies from the host that would stop the thread on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            crosses = args[0].device != out.device
            if crosses and not (kwargs or {}).get("non_blocking"):
                self.found.append(f"{tuple(out.shape)} {out.dtype}")
        return out


def without_data(stage: Stage) -> Stage:
    """``stage`` on a device whose tensors have shapes and nothing else: whoever looks at a value gets an error."""
    return replace(
        stage,
        layers=stage.layers.to(META),
        rotary=stage.rotary.to(META),
        embedding=stage.embedding.to(META) if stage.embedding is not None else None,
        norm=stage.norm.to(META) if stage.norm is not None else None,
        head_weight=stage.head_weight.to(META) if stage.head_weight is not None else None,
        device=META,
    )


def test_no_value_of_the_device_is_looked_at_between_a_step_and_the_next(stages: Any) -> None:
    """Data-dependent shapes, ``item``, copies to the host: on a device without data, each of them raises."""
    (stage,) = stages(1, torch.float16)  # in other types, a CPU has layers of its own
    engine = StageEngine(without_data(stage))
    for task in ("a", "b"):
        entry = load(task)
        assert isinstance(entry.item, Load)
        engine.load(entry.item)
    update = Update(step=1, learning_rate=0.1, clip=0.5)
    with CopiesThatWait() as copies:
        sent = run(
            engine,
            whole(train(1, "a", "b")),
            whole(train(2, "a", "b", update=update)),
            whole(train(3, "a", "b", discard=True)),
        )
    assert sent.faults == []
    assert {
        number: (stats.device, tuple(stats.shape)) for number, stats in sent.returned.items()
    } == dict.fromkeys((1, 2, 3), (META, (2, STATS)))
    assert copies.found == []


class Odd(StageEngine):
    """Raises in the phases that it is told, after computing."""

    raising: frozenset[Phase] = frozenset()

    def _after(self, phase: Phase) -> None:
        if phase in self.raising:
            raise KeyError(phase.value)

    def load(self, load: Load, state: Mapping[str, Tensor] | None = None) -> None:
        self._after(Phase.LOAD)
        super().load(load, state)

    def settle(self, segment: Segment) -> None:
        if segment.task == "bad":
            self._after(Phase.UPDATE)
        super().settle(segment)

    def forward(self, item: Train, **tensors: Any) -> Any:
        out = super().forward(item, **tensors)
        self._after(Phase.FORWARD)
        return out

    def backward(self, number: int, grad: Tensor | None) -> Any:
        out = super().backward(number, grad)
        self._after(Phase.BACKWARD)
        return out

    def export(self, task: str) -> dict[str, Tensor]:
        self._after(Phase.SAVE)
        return super().export(task)


def odd(stage: Stage, *phases: Phase) -> Odd:
    engine = Odd(stage)
    engine.raising = frozenset(phases)
    return engine


def test_a_forward_that_failed_hands_on_zeros_and_its_way_back_counts_one_fault(stages: Any) -> None:
    first, _ = stages(2)
    item = train(1, "a")
    back = BackwardMessage(1, torch.ones(12, 32), torch.zeros(1, 3, dtype=torch.float64))
    sent = run(odd(first, Phase.FORWARD), load("a"), Entry(item, token_ids=IDS), back)
    assert [tuple(hidden.shape) for hidden in sent.forward] == [(12, 32)]
    assert not sent.forward[0].any()
    assert sent.returned[1].tolist() == [[0.0, 0.0, 1.0]]
    [fault] = sent.faults
    assert (fault.stage, fault.number, fault.phase, fault.task) == (0, 1, Phase.FORWARD, None)
    assert fault.error == "KeyError: 'forward'"


def test_faults_of_several_stages_add_up_on_the_way(stages: Any) -> None:
    _, last = stages(2)
    entry = Entry(train(1, "a"), hidden=torch.zeros(12, 32), labels=IDS)
    sent = run(odd(last, Phase.BACKWARD), load("a"), entry)
    [(gradient, stats)] = sent.backward
    assert not gradient.any()
    assert stats[0, 2] == 1
    first, _ = stages(2)
    sent = run(
        odd(first, Phase.BACKWARD),
        load("a"),
        Entry(train(1, "a"), token_ids=IDS),
        BackwardMessage(1, gradient, stats),
    )
    assert sent.returned[1][0, 2] == 2


def test_a_task_that_could_not_be_made_is_broken_until_it_is_unloaded_and_its_neighbours_are_settled(
    stages: Any,
) -> None:
    (stage,) = stages(1)
    engine = Odd(stage)
    run(engine, load("good"), whole(train(1, "good")))
    engine.raising = frozenset({Phase.UPDATE})
    update = Update(step=1, learning_rate=0.1, clip=1.0)
    before = engine.export("good")
    sent = run(
        engine,
        load("bad"),
        whole(train(2, "bad", "good", update=update)),
        whole(train(3, "bad", "good")),
        Entry(Save(number=4, task="bad")),
    )
    assert [(fault.number, fault.phase, fault.task) for fault in sent.faults] == [
        (2, Phase.UPDATE, "bad"), (3, Phase.UPDATE, "bad"), (4, Phase.UPDATE, "bad"),
    ]  # fmt: skip
    assert [stats[:, 2].tolist() for stats in sent.returned.values()] == [[1.0, 1.0]] * 2
    assert sent.exported == {}
    assert any(not torch.equal(before[name], tensor) for name, tensor in engine.export("good").items())
    engine.raising = frozenset()
    sent = run(engine, Entry(Unload(number=5, task="bad")), load("bad"), whole(train(6, "bad", "good")))
    assert sent.faults == []
    assert sent.returned[6][:, 2].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("phase", [Phase.LOAD, Phase.SAVE])
def test_what_concerns_one_task_is_told_by_its_name(stages: Any, phase: Phase) -> None:
    (stage,) = stages(1)
    sent = run(odd(stage, phase), load("a"), Entry(Save(number=7, task="a")))
    assert [fault.task for fault in sent.faults] == ["a"] * (2 if phase is Phase.LOAD else 1)
    assert sent.exported == {}


@pytest.fixture
def shared(small_model: Any) -> list[Stage]:
    """Of a model whose later layers need keys of earlier ones and inputs of their own."""
    model_type, options = VARIANTS["gemma4_text, keys shared"]
    saved = small_model(model_type, **options)
    cpu = torch.device("cpu")
    return [load_stage(saved.folder, saved, index, 3, torch.float32, cpu) for index in range(3)]


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_zeros_have_the_shape_that_each_neighbour_expects(
    shared: list[Stage], index: int, phase: Phase
) -> None:
    """More goes forward than comes back, and not as much as came."""
    stage = shared[index]
    before, behind = stage.entering, stage.leaving
    assert len({before.width, before.learnt, behind.width, behind.learnt}) > 1
    given = {"token_ids": IDS} if stage.first else {"hidden": torch.ones(12, before.width)}
    work: list[Entry | BackwardMessage] = [load("a"), Entry(train(1, "a"), labels=IDS, **given)]
    if not stage.last:
        back = torch.ones(12, behind.learnt)
        work.append(BackwardMessage(1, back, torch.zeros(1, STATS, dtype=torch.float64)))
    sent = run(odd(stage, phase), *work)
    assert [one.phase for one in sent.faults] == [phase]
    assert [tuple(one.shape) for one in sent.forward] == ([] if stage.last else [(12, behind.width)])
    assert [tuple(one.shape) for one, _ in sent.backward] == ([] if stage.first else [(12, before.learnt)])
    assert not any(one.any() for one, _ in sent.backward)
    assert phase is Phase.BACKWARD or not any(one.any() for one in sent.forward)
