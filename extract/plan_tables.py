"""The tables of a plan: what is read, a row a token, and the sequences that it makes."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from ..errors import RequestError, UnknownNameError
from ..store.spans import find_spans
from ..store.tokens import RESERVED_LABELS, SEQUENCE_FIELDS, SPAN_FIELDS, TOKEN_FIELDS, label_type
from .data import default_split
from .document import Document
from .keep import Keep
from .windows import Sequence

_SEQUENCES_A_TABLE = 512


class PlanTables:
    """Builds the tables of sequences and of tokens from what was read."""

    def __init__(self, documents: SequenceOf[Document], sequences: SequenceOf[Sequence]) -> None:
        self.sequences = sequences
        names = _label_names(s.labels for s in sequences)
        self.types = {n: label_type(n, [v for s in sequences for v in s.labels.get(n, ())]) for n in names}
        names = _label_names(s.sequence_labels for s in sequences)
        self.own = {n: label_type(n, [s.sequence_labels.get(n) for s in sequences]) for n in names}
        self.facts = [
            {
                "seq": i,
                "document": documents[s.document].name,
                "document_sha256": documents[s.document].digest,
                "char_offset": s.offset,
                "length": len(s.input_ids),
                "split": documents[s.document].split or default_split(documents[s.document].digest),
                **{n: s.sequence_labels.get(n) for n in self.own},
            }
            for i, s in enumerate(sequences)
        ]

    def apply(self, keep: Keep) -> SequenceOf[Sequence]:
        """Give the sequences with the tokens stored that were to be, and that `keep` names."""
        added = [(n, t) for n, t in SEQUENCE_FIELDS if n in ("document", "document_sha256", "char_offset", "length")]
        tables = []
        for first in range(0, len(self.sequences), _SEQUENCES_A_TABLE):
            members = list(range(first, min(first + _SEQUENCES_A_TABLE, len(self.sequences))))
            table = self.token_table(members, first_row=0).drop_columns(["row"])
            for name, kind in added:
                table = table.append_column(pa.field(name, kind), self._each(name, members, kind))
            tables.append(table)
        kept = keep.mask(pa.concat_tables(tables))
        ends = np.cumsum([len(s.input_ids) for s in self.sequences])
        parts = np.split(kept, ends[:-1])
        self.sequences = [replace(s, stored=s.stored & part) for s, part in zip(self.sequences, parts, strict=True)]
        return self.sequences

    def sequence_table(
        self,
        members: SequenceOf[int],
        units: SequenceOf[int],
        first: SequenceOf[int],
        rows: SequenceOf[int],
        means: SequenceOf[int | None],
    ) -> pa.Table:
        """Build the table of the sequences `members`: their units, first rows, numbers of rows, and means' rows."""
        found = [
            self.facts[i] | {"unit": unit, "first_row": at, "rows": n, "sequence_row": mean}
            for i, unit, at, n, mean in zip(members, units, first, rows, means, strict=True)
        ]
        return pa.Table.from_pylist(
            found, pa.schema([*(pa.field(n, t) for n, t in SEQUENCE_FIELDS), *_fields(self.own)])
        )

    def spans(self, members: SequenceOf[int], label: str) -> tuple[list[int], pa.Table]:
        """Find the spans of the sequences `members` that have a row; returns how many each has, and their table.

        The table has no units and rows yet. `UnknownNameError` where no token has such a label, `RequestError` where
        each document has one label, or the table of spans has a column of that name.
        """
        if label not in self.types:
            if label in self.own:
                raise RequestError(
                    f"Label {label!r} is one a document and has no spans. --rows sequences gives one mean a sequence."
                )
            raise UnknownNameError.of("label", label, self.types, ", one a token")
        if label.lower() in {"run", *(n for n, _ in SPAN_FIELDS)}:
            raise RequestError(f"The table spans has a column {label!r} of its own. Rename the label.")
        counts: list[int] = []
        tables = []
        for first in range(0, len(members), _SEQUENCES_A_TABLE):
            part = members[first : first + _SEQUENCES_A_TABLE]
            found = find_spans(self.token_table(part, first_row=0), label)
            seqs, numbers = found["seq"].to_numpy(), [self.facts[i]["seq"] for i in part]
            counts += (np.searchsorted(seqs, numbers, side="right") - np.searchsorted(seqs, numbers)).tolist()
            tables.append(found)
        return counts, pa.concat_tables(tables)

    def token_table(self, members: SequenceOf[int], first_row: int) -> pa.Table:
        """Build the table of all tokens of the sequences `members`; those that are stored have rows, in order."""
        sequences = [self.sequences[i] for i in members]
        stored = np.concatenate([s.stored for s in sequences])

        def spans(name: str) -> pa.Array:
            values = np.concatenate([getattr(s, name) for s in sequences])
            return pa.array(values, pa.int32(), mask=values < 0)

        columns: dict[str, Any] = {
            "row": pa.array(first_row + np.cumsum(stored) - 1, pa.int64(), mask=~stored),
            "seq": self._each("seq", members, pa.int64()),
            "pos": pa.array(np.concatenate([np.arange(len(s.input_ids)) for s in sequences]), pa.int32()),
            "token_id": pa.array(np.concatenate([s.input_ids for s in sequences]), pa.int32()),
            "token": pa.array([p for s in sequences for p in (s.pieces or [None] * len(s.input_ids))], pa.string()),
            "char_start": spans("start"),
            "char_end": spans("end"),
            "special": pa.array(np.concatenate([s.special for s in sequences])),
            "split": self._each("split", members, pa.string()),
        }
        for name, kind in self.types.items():
            values = [v for s in sequences for v in s.labels.get(name, [None] * len(s.input_ids))]
            columns[name] = pa.array(values, kind)
        for name, kind in self.own.items():
            columns[name] = self._each(name, members, kind)
        return pa.table(
            columns, pa.schema([*(pa.field(n, t) for n, t in TOKEN_FIELDS), *_fields(self.types), *_fields(self.own)])
        )

    def _each(self, name: str, members: SequenceOf[int], kind: pa.DataType) -> pa.Array:
        """Give a fact of each of the sequences `members` once for each of its tokens."""
        lengths = [len(self.sequences[i].input_ids) for i in members]
        return pa.array([self.facts[i][name] for i in members], kind).take(
            pa.array(np.repeat(np.arange(len(members)), lengths))
        )


def _label_names(labels: Any) -> list[str]:
    names = list(dict.fromkeys(n for each in labels for n in each))
    taken = [n for n in names if n.lower() in RESERVED_LABELS]
    lowered = [n.lower() for n in names]
    taken += [n for n in names if lowered.count(n.lower()) > 1]
    if taken:
        raise RequestError(
            f"{taken[0]!r} cannot name a label: the tables have a column of that name already "
            "(SQL does not tell upper from lower case). Rename it in the data."
        )
    return names


def _fields(types: Mapping[str, pa.DataType]) -> list[pa.Field]:
    return [pa.field(n, t) for n, t in types.items()]
