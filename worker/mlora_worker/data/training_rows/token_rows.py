"""Tokenised rows: in memory, or mapped from files (``row_files``). A row is a view."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, overload

import numpy as np
import numpy.typing as npt

IGNORED = -100  # label of a position that is not supervised
_WEIGHT_FOLLOWS = b"\xff" * 8  # in a digest; no row is so long
_SPLIT_FOLLOWS = b"\xfe" * 8
_LABEL_FOLLOWS = b"\xfd" * 8


@dataclass(frozen=True, slots=True, eq=False)
class TokenRow:
    """``labels[i]`` is the token to predict AT position i: ``ids[i + 1]`` if that token is supervised, else
    -100. The shift is done here once; nobody shifts again.

    One sequence of tokens; or two, one behind the other: a prompt with its chosen answer, and with its rejected one. One
    sequence may be an answer that is desirable or not.
    """

    ids: npt.NDArray[np.int32]  # [tokens]
    labels: npt.NDArray[np.int32]  # [tokens]
    weight: float = 1.0  # of its loss
    split: int = 0  # tokens of the first of two sequences; 0: there is one
    desirable: bool | None = None  # None: the row has no label

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence."""
        return (self.split, len(self.ids) - self.split) if self.split else (len(self.ids),)


def labels_of(ids: npt.NDArray[np.int32], supervised: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
    """[tokens] -> [tokens], shifted: see ``TokenRow``. The first token has nobody to predict it."""
    labels = np.full(len(ids), IGNORED, np.int32)
    labels[:-1][supervised[1:]] = ids[1:][supervised[1:]]
    return labels


def labels_of_pair(
    ids: npt.NDArray[np.int32], supervised: npt.NDArray[np.bool_], split: int
) -> npt.NDArray[np.int32]:
    """The same of two sequences, neither of which predicts anything of the other; ``split`` as of a row."""
    if not split:
        return labels_of(ids, supervised)
    first = labels_of(ids[:split], supervised[:split])
    return np.concatenate([first, labels_of(ids[split:], supervised[split:])])


class TokenRows(Sequence[TokenRow]):
    """Rows in training order. Their arrays are made when they are asked for."""

    def __init__(
        self,
        ids: npt.NDArray[np.int32],
        learnt: npt.NDArray[np.bool_],
        ends: npt.NDArray[np.int64],
        supervised: npt.NDArray[np.int32],
        digest: str | None = None,
        chosen: npt.NDArray[np.intp] | None = None,
        weights: npt.NDArray[np.float64] | None = None,
        splits: npt.NDArray[np.int32] | None = None,
        desirable: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        """See ``row_files`` for the arrays; without ``weights`` all are 1, without ``splits`` no row is a pair, without
        ``desirable`` none has a label. ``chosen``: those that count, in order. ``digest`` is that of these rows, where it
        is known."""
        self._ids, self._learnt, self._ends, self._supervised = ids, learnt, ends, supervised
        self._digest = digest
        self._chosen = chosen
        self._weights, self._splits, self._desirable = weights, splits, desirable
        self._whole: TokenRows | None = (
            None  # of which these are some; itself would be a cycle, and stay mapped
        )

    def __len__(self) -> int:
        return len(self._ends) if self._chosen is None else len(self._chosen)

    @overload
    def __getitem__(self, place: int) -> TokenRow: ...
    @overload
    def __getitem__(self, place: slice) -> list[TokenRow]: ...
    def __getitem__(self, place: int | slice) -> TokenRow | list[TokenRow]:
        if isinstance(place, slice):
            return [self[one] for one in range(*place.indices(len(self)))]
        if not -len(self) <= place < len(self):
            raise IndexError(place)
        row = place % len(self) if self._chosen is None else int(self._chosen[place])
        cut = slice(int(self._ends[row - 1]) if row else 0, int(self._ends[row]))
        ids = self._ids[cut]
        weight = 1.0 if self._weights is None else float(self._weights[row])
        split = 0 if self._splits is None else int(self._splits[row])
        desirable = None if self._desirable is None else bool(self._desirable[row])
        return TokenRow(ids, labels_of_pair(ids, self._learnt[cut], split), weight, split, desirable)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """[rows] tokens of each."""
        lengths = np.diff(self._ends, prepend=0)
        return lengths if self._chosen is None else lengths[self._chosen]

    @property
    def supervised(self) -> npt.NDArray[np.int32]:
        """[rows] labels of each."""
        return self._supervised if self._chosen is None else self._supervised[self._chosen]

    @property
    def weights(self) -> npt.NDArray[np.float64]:
        """[rows] weight of each."""
        if self._weights is None:
            return np.ones(len(self))
        return self._weights if self._chosen is None else self._weights[self._chosen]

    @property
    def splits(self) -> npt.NDArray[np.int32] | None:
        """[rows] tokens of the first sequence of each; None: no row is a pair."""
        if self._splits is None or self._chosen is None:
            return self._splits
        return self._splits[self._chosen]

    @property
    def desirable(self) -> npt.NDArray[np.bool_] | None:
        """[rows] whether each is a desirable answer; None: no row has a label."""
        if self._desirable is None or self._chosen is None:
            return self._desirable
        return self._desirable[self._chosen]

    def digest(self) -> str:
        """See ``rows_digest``. Worked out once: it takes a look at every row."""
        if self._digest is None:
            self._digest = rows_digest(self)
        return self._digest

    @property
    def whole(self) -> TokenRows:
        """All rows, of which these are some."""
        return self if self._whole is None else self._whole

    @property
    def taken(self) -> npt.NDArray[np.intp] | None:
        """Which rows of ``whole`` these are; None: all, in order."""
        return self._chosen

    def chosen(self, rows: npt.NDArray[np.intp], digest: str | None = None) -> TokenRows:
        """Some of these rows, in this order, of the same memory."""
        kept = rows if self._chosen is None else self._chosen[rows]
        some = TokenRows(
            self._ids, self._learnt, self._ends, self._supervised, digest, kept, self._weights, self._splits,
            self._desirable,
        )  # fmt: skip
        some._whole = self.whole
        return some


def rows_digest(rows: Iterable[TokenRow]) -> str:
    """SHA-256 over the tokens and labels of all rows, each with its length in front; over weights other than 1, over the
    splits of pairs, and over whether answers are desirable."""
    digest = RowsDigest()
    for row in rows:
        digest.add(row)
    return digest.hexdigest()


def digest_of(rows: Sequence[TokenRow]) -> str:
    """``rows_digest``, worked out once for rows that remember it."""
    return rows.digest() if isinstance(rows, TokenRows) else rows_digest(rows)


class RowsDigest:
    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, row: TokenRow) -> None:
        self._digest.update(len(row.ids).to_bytes(8, "little"))
        self._digest.update(row.ids.astype("<i4", copy=False).tobytes())
        self._digest.update(row.labels.astype("<i4", copy=False).tobytes())
        if row.weight != 1.0:
            self._digest.update(_WEIGHT_FOLLOWS + weight_bytes(row.weight))
        if row.split:
            self._digest.update(_SPLIT_FOLLOWS + row.split.to_bytes(8, "little"))
        if row.desirable is not None:
            self._digest.update(_LABEL_FOLLOWS + bytes([row.desirable]))

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


class RowWriter(Protocol):
    """Takes rows one after the other, and gives them all at the end."""

    def add(
        self,
        ids: npt.NDArray[np.int32],
        learnt: npt.NDArray[np.bool_],
        labels: npt.NDArray[np.int32],
        count: int,
        weight: float = 1.0,
        split: int = 0,
        desirable: bool | None = None,
    ) -> None:
        """``learnt``: whether a token is supervised; ``labels`` follow from it, and ``count`` of them are tokens."""
        ...

    def finish(self) -> TokenRows: ...


class MemoryWriter:
    """Keeps all rows in memory: for few of them."""

    def __init__(self) -> None:
        self._ids: list[npt.NDArray[np.int32]] = []
        self._learnt: list[npt.NDArray[np.bool_]] = []
        self._supervised: list[int] = []
        self._weights: list[float] = []
        self._splits: list[int] = []
        self._desirable: list[bool] = []

    def add(
        self,
        ids: npt.NDArray[np.int32],
        learnt: npt.NDArray[np.bool_],
        labels: npt.NDArray[np.int32],
        count: int,
        weight: float = 1.0,
        split: int = 0,
        desirable: bool | None = None,
    ) -> None:
        del labels
        self._ids.append(ids.copy())
        self._learnt.append(learnt.copy())
        self._supervised.append(count)
        self._weights.append(weight)
        self._splits.append(split)
        if desirable is not None:
            self._desirable.append(desirable)

    def finish(self) -> TokenRows:
        ends = np.cumsum([len(one) for one in self._ids], dtype=np.int64)
        return TokenRows(
            np.concatenate(self._ids) if self._ids else np.empty(0, np.int32),
            np.concatenate(self._learnt) if self._learnt else np.empty(0, np.bool_),
            ends,
            np.array(self._supervised, np.int32),
            weights=unless_all_one(np.array(self._weights, np.float64)),
            splits=np.array(self._splits, np.int32) if any(self._splits) else None,
            desirable=np.array(self._desirable, np.bool_) if self._desirable else None,
        )


def unless_all_one(weights: npt.NDArray[np.float64]) -> npt.NDArray[np.float64] | None:
    return None if bool((weights == 1.0).all()) else weights


def weight_bytes(weight: float) -> bytes:
    return struct.pack("<d", weight)
