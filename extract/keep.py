"""Which tokens are stored: a condition in SQL, asked of the planned tokens before the model is run.

    pos = length - 1                    the last token of each sequence, as the model reads it
    pos % 10 = 0                        every tenth
    pos BETWEEN 5 AND 20
    depth IS NOT NULL                   those with a label
    sample(0.01, 7)                     one in a hundred, by the seed 7
    pos = max(pos) FILTER (WHERE NOT special) OVER (PARTITION BY seq)    the last that is not special

The columns are those of the tables `tokens` and `sequences`, but for the ones that depend on what is stored (row, unit,
first_row, rows). NULL counts as no. The answer must be the same on every day and every machine, as a run is resumed:
functions of chance, time and surroundings are refused, and so are subqueries and windows without a full order.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from ..errors import SqlRefusedError, UnknownNameError
from ..store.catalog_session import CONFINE
from ..store.tokens import SEQUENCE_FIELDS, TOKEN_FIELDS

_FIELDS = dict([*TOKEN_FIELDS, *SEQUENCE_FIELDS])
COLUMNS = tuple(name for name in _FIELDS if name not in ("row", "unit", "first_row", "rows", "sequence_row"))
"""What a condition can ask of every run's tokens, apart from labels."""

_TABLES = ("tokens", "sequences")
_LEAVES = frozenset(("COLUMN_REF", "CONSTANT", "TYPE"))
_INNER = frozenset(("BETWEEN", "CASE", "CAST", "COMPARISON", "CONJUNCTION", "FUNCTION", "OPERATOR", "WINDOW"))
_OF_DATES_TOO = ("+", "-")  # for dates and times they depend on the day; tokens have none
# DuckDB calls these consistent; the first draws a sample, and the others may call it by a name in text.
_OF_CHANCE = ("reservoir_quantile", "list_aggregate", "list_aggr", "array_aggregate", "array_aggr", "aggregate")
_IN_ANY_ORDER = ("min", "max", "count", "count_star", "sum", "avg", "bool_and", "bool_or")
_OF_ALL_PEERS = [("UNBOUNDED_PRECEDING", end, "NO_OTHER") for end in ("CURRENT_ROW_RANGE", "UNBOUNDED_FOLLOWING")]
# The first 12 hexadecimal digits of a SHA-256 as a number below 2**48, which a DOUBLE holds exactly.
_SAMPLE = """CREATE MACRO sample_of(fraction, seed, document_sha256, char_offset, pos) AS
    CASE WHEN fraction BETWEEN 0 AND 1 THEN
        ('0x' || sha256(concat_ws('/', seed, document_sha256, char_offset, pos))[1:12])::BIGINT
            < fraction::DOUBLE * 281474976710656
    ELSE error('sample(fraction, seed) takes a fraction from 0 to 1') END"""
_SAMPLE_OF = ("document_sha256", "char_offset", "pos")


class Keep:
    """A condition that names the tokens to store; `text` is what was asked, checked but for the types of columns.

    `labels` are the columns that the data's labels will have. Raises `SqlRefusedError` for what is not one condition
    with the same answer every time, and `UnknownNameError` for a column that is not there.

    ``sample(fraction, seed)`` is true where the first 12 hexadecimal digits of the SHA-256 of
    ``{seed}/{document_sha256}/{char_offset}/{pos}`` make a number below ``fraction * 16**12``.
    """

    def __init__(self, text: str, labels: Iterable[str] = ()) -> None:
        self.text = text
        columns = [*COLUMNS, *labels]
        try:
            with _connection() as connection:
                expression = _parse(connection, text)
                _Check(connection, text, columns).check(expression)
            self._expression = _with_sample(expression)
        except RecursionError:
            raise SqlRefusedError("--keep is nested too deeply. Write it with fewer levels.") from None

    def mask(self, tokens: pa.Table) -> np.ndarray:
        """Say of each of the planned `tokens`, with the columns of their sequences, whether it is kept: bool (n,)."""
        place = "place"
        while place in tokens.column_names:
            place += "_"
        planned = tokens.append_column(place, pa.array(np.arange(tokens.num_rows)))
        with _connection() as connection:
            connection.register("planned", planned)
            query = _serialized(connection, f"SELECT {place}, true AS keep FROM planned")
            query["statements"][0]["node"]["select_list"][1] = self._expression | {"alias": "keep"}
            (sql,) = connection.execute("SELECT json_deserialize_sql(?)", [json.dumps(query)]).fetchall()[0]
            try:
                answer = connection.sql(sql).to_arrow_table()
            except duckdb.Error as error:
                raise SqlRefusedError(f"--keep {self.text!r}: {str(error).strip()}") from error
        if not pa.types.is_boolean(answer["keep"].type):
            raise SqlRefusedError(
                f"--keep {self.text!r} is {answer['keep'].type}, neither true nor false. Write a condition, such as "
                "pos = length - 1."
            )
        kept = np.zeros(tokens.num_rows, bool)
        kept[answer[place].to_numpy()] = answer["keep"].fill_null(False).to_numpy()
        return kept


def _connection() -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect(":memory:", config={"threads": 1})
    connection.execute(_SAMPLE)
    connection.execute("SET TimeZone = 'UTC'")
    for setting in CONFINE:
        connection.execute(setting)
    return connection


def _serialized(connection: duckdb.DuckDBPyConnection, sql: str) -> dict[str, Any]:
    return json.loads(connection.execute("SELECT json_serialize_sql(?)", [sql]).fetchall()[0][0])


def _parse(connection: duckdb.DuckDBPyConnection, text: str) -> dict[str, Any]:
    """Give the syntax tree of one expression; `SqlRefusedError` for anything else."""
    try:
        text.encode()
        found = _serialized(connection, f"SELECT ({text}\n)")
    except UnicodeEncodeError as error:
        raise SqlRefusedError(f"--keep is not Unicode text: {error}.") from None
    except duckdb.Error as error:
        raise SqlRefusedError(f"--keep {text!r}: {str(error).strip()}") from error
    if found["error"] and found.get("error_type") == "parser":
        raise SqlRefusedError(f"--keep {text!r} is no condition in SQL: {found['error_message'].strip()}")
    # Whatever stands beside the expression, from a second statement to a FROM, makes another tree than this one's.
    plain = _serialized(connection, "SELECT (true)")
    expressions = [] if found["error"] else found["statements"][0]["node"].get("select_list", [])
    if len(expressions) == 1:
        plain["statements"][0]["node"]["select_list"] = expressions
    if found != plain or expressions[0].get("alias") or not text.strip():
        raise SqlRefusedError(f"--keep takes one condition and nothing else, such as pos = length - 1; not {text!r}.")
    return expressions[0]


def _nodes(tree: Any) -> Iterator[dict[str, Any]]:
    """Go through all expressions of a syntax tree."""
    if isinstance(tree, dict):
        if "class" in tree:
            yield tree
        for value in tree.values():
            yield from _nodes(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _nodes(value)


class _Check:
    """Holds a syntax tree to what a condition may be made of."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, text: str, columns: list[str]) -> None:
        self.connection, self.text, self.columns = connection, text, columns
        found = connection.execute(
            "SELECT function_name, function_type, stability, macro_definition, parameters FROM duckdb_functions()"
        ).fetchall()
        self.functions: dict[str, list[tuple[Any, ...]]] = {}
        for name, *facts in found:
            self.functions.setdefault(name, []).append(tuple(facts))

    def check(self, tree: dict[str, Any]) -> None:
        """Raise an error unless the tree is a condition over the columns, with the same answer every time."""
        self._check(tree, self.columns, ["sample"])

    def _check(self, tree: dict[str, Any], columns: list[str], own: list[str]) -> None:
        for node in _nodes(tree):
            if node["class"] not in _LEAVES | _INNER:
                self._refuse(f"it holds a {node['class'].lower()}, which a condition on tokens cannot have")
            if node["class"] == "COLUMN_REF":
                path = node["column_names"]
                if len(path) == 2 and path[0].lower() in _TABLES:
                    del path[0]
                if len(path) > 1 or path[0].lower() not in {c.lower() for c in columns}:
                    raise UnknownNameError.of("column", ".".join(path), columns, f" for --keep {self.text!r}")
            elif node["class"] == "FUNCTION" and node["function_name"].lower() not in own:
                self._check_function(node["function_name"].lower())
            elif node["class"] == "WINDOW":
                self._check_window(node)

    def _check_function(self, name: str) -> None:
        if name not in self.functions:
            self._refuse(f"there is no function {name}")
        for kind, stability, definition, parameters in self.functions.get(name, ()):
            if kind == "aggregate":
                self._refuse(f"{name} is a value of many tokens: say of which, as {name}(...) OVER (PARTITION BY seq)")
            if kind == "macro":
                self._check(_parse(self.connection, definition), parameters, [])
            elif kind != "scalar" or name in _OF_CHANCE or (stability != "CONSISTENT" and name not in _OF_DATES_TOO):
                self._refuse(
                    f"{name} need not give the same answer when the run is resumed. For a sample write "
                    "sample(fraction, seed)"
                )

    def _check_window(self, node: dict[str, Any]) -> None:
        name = node["function_name"].lower()
        facts = self.functions.get(name, ())
        if name in _OF_CHANCE or any(
            kind not in ("aggregate", "window") or stability != "CONSISTENT" for kind, stability, *_ in facts
        ):
            self._refuse(f"{name} is no function of a window that always gives the same answer")
        whole = (node["start"], node["end"], node["exclude_clause"]) in _OF_ALL_PEERS
        by = [*node["partitions"], *(order["expression"] for order in node["orders"])]
        ordered = {"seq", "pos"} <= {one["column_names"][-1].lower() for one in by if one["class"] == "COLUMN_REF"}
        if not ordered and not (whole and name in _IN_ANY_ORDER):
            self._refuse(f"{name} depends on the order: write {name}(...) OVER (PARTITION BY seq ORDER BY pos)")

    def _refuse(self, why: str) -> None:
        raise SqlRefusedError(f"--keep {self.text!r} is refused: {why}.")


def _with_sample(tree: Any) -> Any:
    """Hand the columns that it depends on to each ``sample(fraction, seed)``: a macro cannot see them by itself."""
    if isinstance(tree, list):
        return [_with_sample(value) for value in tree]
    if not isinstance(tree, dict):
        return tree
    tree = {key: _with_sample(value) for key, value in tree.items()}
    if tree.get("class") == "FUNCTION" and tree["function_name"].lower() == "sample":
        if len(tree["arguments"]) != 2 or any(a["name"] for a in tree["arguments"]):
            raise SqlRefusedError("sample takes a fraction from 0 to 1 and a seed, such as sample(0.01, 7).")
        added = [{"class": "COLUMN_REF", "type": "COLUMN_REF", "alias": "", "column_names": [c]} for c in _SAMPLE_OF]
        tree["arguments"] = [*tree["arguments"], *({"name": "", "expression": one} for one in added)]
        tree |= {"function_name": "sample_of", "qualified_name": {"path": ["sample_of"]}}
    return tree
