"""What a rank does next: backward first, then items in their order; errors end it."""

from __future__ import annotations

import threading

import pytest
import torch

from mlora_worker.pipeline.frames import LinkClosed
from mlora_worker.pipeline.mailbox import Entry, Mailbox
from mlora_worker.pipeline.transport import BackwardMessage, ForwardMessage
from mlora_worker.stream.items import Segment, Train, Unload
from mlora_worker.stream.turns import Turns


def train(number: int) -> Train:
    segment = Segment(task="a", step=1, lengths=(2,), first_row=0, weight=1.0, closes_step=True)
    return Train(number=number, segments=(segment,))


def hidden(number: int) -> ForwardMessage:
    return ForwardMessage(number, torch.zeros(2, 3))


def gradient(number: int) -> BackwardMessage:
    return BackwardMessage(number, torch.zeros(2, 3), torch.zeros(1, 2))


def numbers(mailbox: Mailbox, count: int) -> list[tuple[str, int]]:
    taken = [mailbox.take() for _ in range(count)]
    return [
        ("back", work.number) if isinstance(work, BackwardMessage) else (work.item.kind, work.item.number)
        for work in taken
    ]


def test_a_gradient_goes_before_items_that_wait() -> None:
    mailbox = Mailbox(threading.Condition())
    mailbox.put_item(train(1), b"")
    mailbox.put_forward(hidden(1))
    mailbox.put_backward(gradient(0))
    assert numbers(mailbox, 2) == [("back", 0), ("train", 1)]


def test_items_keep_their_order_even_when_a_later_one_could_run() -> None:
    mailbox = Mailbox(threading.Condition())
    mailbox.put_item(train(1), b"")
    mailbox.put_item(Unload(number=2, task="a"), b"")
    taken: list[tuple[str, int]] = []
    thread = threading.Thread(target=lambda: taken.extend(numbers(mailbox, 2)))
    thread.start()
    thread.join(0.1)
    assert taken == [], "the unload may not overtake the microbatch whose hidden states are on their way"
    mailbox.put_forward(hidden(1))
    thread.join(5)
    assert taken == [("train", 1), ("unload", 2)]


def test_labels_travel_as_bytes() -> None:
    mailbox = Mailbox(threading.Condition())
    labels = torch.tensor([-100, 7])
    mailbox.put_item(train(1), labels.numpy().tobytes())
    mailbox.put_forward(hidden(1))
    entry = mailbox.take()
    assert isinstance(entry, Entry)
    assert entry.labels is not None
    assert entry.labels.tolist() == [-100, 7]


def test_hidden_states_of_another_item_are_an_error() -> None:
    mailbox = Mailbox(threading.Condition())
    mailbox.put_item(train(1), b"")
    mailbox.put_forward(hidden(2))
    with pytest.raises(RuntimeError, match="out of order"):
        mailbox.take()


def test_a_lost_peer_ends_the_wait_and_the_first_error_counts() -> None:
    mailbox = Mailbox(threading.Condition())
    threading.Timer(0.05, lambda: mailbox.fail(LinkClosed("first"))).start()
    with pytest.raises(LinkClosed, match="first"):
        mailbox.take()
    mailbox.fail(LinkClosed("second"))
    with pytest.raises(LinkClosed, match="first"):
        mailbox.take()


class PatientMailbox(Mailbox):
    """Of the first of three stages, on a clock that the test moves; it has taken three microbatches and waits 50 ms."""

    def __init__(self, supplied: list[Train]) -> None:
        self.now = 0.0
        super().__init__(
            threading.Condition(),
            supply=lambda: Entry(supplied.pop(0)) if supplied else None,
            turns=Turns(3, patience=0.05),
            clock=lambda: self.now,
        )
        for _ in range(3):
            self.take()
            self.now += 1.0


def test_a_full_stage_waits_a_moment_for_a_gradient_before_another_forward() -> None:
    mailbox = PatientMailbox([train(n) for n in (1, 2, 3, 4)])
    threading.Timer(0.02, lambda: mailbox.put_backward(gradient(1))).start()
    assert numbers(mailbox, 2) == [("back", 1), ("train", 4)]


def test_a_full_stage_goes_on_with_a_forward_when_the_moment_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    mailbox, waited = PatientMailbox([train(n) for n in (1, 2, 3, 4)]), []

    def wait(seconds: float) -> None:
        waited.append(seconds)
        mailbox.now += 0.06

    monkeypatch.setattr(mailbox.changed, "wait", wait)
    assert numbers(mailbox, 1) == [("train", 4)]
    assert waited == [pytest.approx(0.05)]
