"""The SQL that reads and changes one object inside a JSON column, on SQLite and on PostgreSQL. Pure: text in, text out.

The object is the *leaf*: ``runtime_state.hermes``, or one user's ``runtime_state.hermes.users.<user id>``. A write is a
single statement that puts new members into the leaf and keeps every other value as the database has it, so it cannot
undo a concurrent write by somebody else. Each write carries a *guard*: where a value on the path is not an object, or
the leaf was written by a newer version, no row is changed.

Bound parameters:

- ``:id``: the id of the row
- ``:leaf``: the last key of the path
- ``:members``: the new members of the leaf, as a JSON object; null removes a member
- ``:claim``: members of the document, as a JSON object; ``runtime`` is set only where the document names none
- ``:document``: the whole document for a row that does not exist yet
- ``:schema``: the newest layout that this version understands
- ``:limit``: how many rows to return
"""
# ruff: noqa: S608 - names are quoted by the database's own rules, and every value is bound
# ruff: noqa: D102 - a method is documented where it is abstract

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

OUTER = ("runtime_state", "hermes")
"""Path of a conversation's object in the document."""
USERS = "users"
"""Member of that object that holds the objects of single users, by user id."""


def leaf_path(user_id: str | None) -> tuple[str, ...]:
    """Return the keys that lead to the leaf."""
    return OUTER if user_id is None else (*OUTER, USERS, user_id)


@dataclass(frozen=True)
class JsonSql(ABC):
    """The statements for one table. The three names are already quoted for the database."""

    table: str
    id: str
    state: str

    # --- differs between databases: expressions on the row ``r`` ---

    @abstractmethod
    def merged(self, user_id: str | None) -> str:
        """Return the document with ``:members`` in its leaf, and with ``:claim`` if it names no ``runtime``."""

    @abstractmethod
    def with_runtime(self) -> str:
        """Return the document with the members of ``:claim``."""

    @abstractmethod
    def guard(self, user_id: str | None) -> str:
        """Return a condition: each value on the path is an object or empty, and the leaf has no newer layout."""

    @abstractmethod
    def root_guard(self) -> str:
        """Return a condition: the document is an object or empty."""

    @abstractmethod
    def state_guard(self) -> str:
        """Return a condition: the document and its ``runtime_state`` are objects or empty."""

    @abstractmethod
    def patched(self, patch: dict[str, Any]) -> tuple[str, dict[str, str]]:
        """Return the document with a merge patch (RFC 7396) applied, and the parameters that the expression needs."""

    @abstractmethod
    def leaf(self, user_id: str | None) -> str:
        """Return the leaf as text; NULL if there is no such object."""

    @abstractmethod
    def raw(self) -> str:
        """Return the unchanged column as text or bytes, whatever it holds."""

    @abstractmethod
    def records(self) -> str:
        """Select (id, user id or NULL, object as text, last use) of up to ``:limit`` sessions, last used first."""

    # --- the same for all ---

    def save(self, user_id: str | None, *, create: bool) -> str:
        """Put ``:members`` into the leaf."""
        return self._write(self.merged(user_id), self.guard(user_id), create=create)

    def set_runtime(self, *, create: bool) -> str:
        """Put ``:claim`` into the document and change nothing else."""
        return self._write(self.with_runtime(), self.root_guard(), create=create)

    def merge(self, patch: dict[str, Any], *, create: bool) -> tuple[str, dict[str, str]]:
        """Merge ``patch`` into the document, at every level; return the statement and its further parameters."""
        value, values = self.patched(patch)
        return self._write(value, self.state_guard(), create=create), values

    def load(self, user_id: str | None) -> str:
        """Select (guard, leaf) from the row."""
        return f"SELECT {self.guard(user_id)}, {self.leaf(user_id)} FROM {self.table} AS r WHERE r.{self.id} = :id"

    def read_raw(self) -> str:
        """Select the unchanged column, to find out why a guard refused."""
        return f"SELECT {self.raw()} FROM {self.table} AS r WHERE r.{self.id} = :id"

    def _write(self, value: str, guard: str, *, create: bool) -> str:
        change = f"SET {self.state} = {value} WHERE {guard}"
        if not create:
            return f"UPDATE {self.table} AS r {change} AND r.{self.id} = :id"
        return (
            f"INSERT INTO {self.table} AS r ({self.id}, {self.state}) VALUES (:id, {self.json(':document')}) "
            f"ON CONFLICT ({self.id}) DO UPDATE {change}"
        )

    def json(self, text: str) -> str:
        """Return an expression that turns text into a JSON value."""
        return text


class SqliteJson(JsonSql):
    """SQLite, with ``json_patch`` (RFC 7396): a null in the patch removes a member, and all other text is kept.

    Every JSON function fails on a malformed document, so each stands behind ``json_valid`` in a CASE, which is
    evaluated in order.
    """

    def merged(self, user_id: str | None) -> str:
        claimed = f"""json_patch({self._document},
            CASE coalesce(json_type({self._document}, '$.runtime'), 'null') WHEN 'null' THEN :claim ELSE '{{}}' END)"""
        if user_id is None:
            return f"""json_patch({claimed}, json_object('runtime_state', json_object('hermes', json(:members))))"""
        # SQLite before 3.45 compares keys by spelling, and Jarvis may have written an é in the user's id as \u00e9.
        # An existing key is therefore reused in its own spelling, which json_each shows in ``fullkey``.
        spelled = f"""coalesce((
            SELECT CASE substr(u.fullkey, length(u.path) + 2, 1)
                WHEN '"' THEN substr(u.fullkey, length(u.path) + 2)
                ELSE '"' || substr(u.fullkey, length(u.path) + 2) || '"' END
            FROM {self._siblings(user_id)} AS u WHERE u.key = :leaf LIMIT 1), json_quote(:leaf))"""
        users = rf"'{{' || {spelled} || '\:' || :members || '}}'"
        return f"""json_patch({claimed}, json_object(
            'runtime_state', json_object('hermes', json_object('{USERS}', json({users})))))"""

    def with_runtime(self) -> str:
        return f"json_patch({self._document}, :claim)"

    def guard(self, user_id: str | None) -> str:
        above = leaf_path(user_id)[:-1]
        levels = ["$", *("$." + ".".join(above[:depth]) for depth in range(1, len(above) + 1))]
        empty_or_object = " AND ".join(
            f"coalesce(json_type(r.{self.state}, '{level}'), 'null') IN ('object', 'null')" for level in levels
        )
        return self._if_valid(
            f"""{empty_or_object} AND NOT EXISTS (
            SELECT 1 FROM {self._siblings(user_id)} AS u WHERE u.key = :leaf AND CASE u.type
                WHEN 'null' THEN 0
                WHEN 'object' THEN json_type(u.value, '$.schema') = 'integer'
                    AND json_extract(u.value, '$.schema') > :schema
                ELSE 1 END)"""
        )

    def state_guard(self) -> str:
        levels = ("$", "$.runtime_state")
        return self._if_valid(
            " AND ".join(
                f"coalesce(json_type(r.{self.state}, '{level}'), 'null') IN ('object', 'null')" for level in levels
            )
        )

    def patched(self, patch: dict[str, Any]) -> tuple[str, dict[str, str]]:
        return f"json_patch({self._document}, :patch)", {"patch": json.dumps(patch, allow_nan=False, default=str)}

    def root_guard(self) -> str:
        return self._if_valid(f"json_type(r.{self.state}) IN ('object', 'null')")

    def leaf(self, user_id: str | None) -> str:
        return f"""(SELECT u.value FROM {self._siblings(user_id)} AS u
            WHERE u.key = :leaf AND u.type = 'object' LIMIT 1)"""

    def raw(self) -> str:
        return f"CAST(r.{self.state} AS BLOB)"  # text would have to be UTF-8

    def records(self) -> str:
        def select(user: str, siblings: str, condition: str) -> str:
            return f"""SELECT r.{self.id}, {user}, u.value,
                CASE u.type WHEN 'object' THEN json_extract(u.value, '$.last_used_at') END AS used
                FROM {self.table} AS r, {siblings} AS u WHERE {condition}
                AND CASE u.type WHEN 'object' THEN json_type(u.value, '$.status') = 'text' ELSE 0 END"""

        return f"""{select("NULL", self._siblings(None), "u.key = 'hermes'")}
            UNION ALL {select("u.key", self._siblings(""), "typeof(u.key) = 'text'")}
            ORDER BY 4 DESC LIMIT :limit"""

    @property
    def _document(self) -> str:
        return f"coalesce(r.{self.state}, '{{}}')"

    def _if_valid(self, condition: str) -> str:
        return f"""CASE WHEN r.{self.state} IS NULL THEN 1 WHEN json_valid(r.{self.state}) THEN {condition}
            ELSE 0 END"""

    def _siblings(self, user_id: str | None) -> str:
        """Return the leaf and its siblings as rows. Unlike the keys of a path, their keys compare decoded."""
        return f"""json_each(CASE WHEN json_valid(r.{self.state}) THEN r.{self.state} ELSE '{{}}' END,
            '$.{".".join(leaf_path(user_id)[:-1])}')"""


class PostgresJson(JsonSql):
    """PostgreSQL, for columns of type ``jsonb``, ``json`` and ``text`` alike.

    Objects are taken apart and rebuilt as ``json``, which keeps the text of every value (``jsonb`` would turn 1e23 into
    an integer) and the order of the keys. An assignment cast then turns the result into ``jsonb`` where the column is.
    """

    def merged(self, user_id: str | None) -> str:
        keys = leaf_path(user_id)
        value = _patched(_object(self._at(user_id, len(keys))), _json(":members"))
        for depth in range(len(keys) - 1, 0, -1):
            value = _put(_object(self._at(user_id, depth)), _key(user_id, depth), value)
        runtime = f"coalesce(json_typeof({self._root} -> 'runtime'), 'null')"
        claim = f"CASE {runtime} WHEN 'null' THEN {_json(':claim')} ELSE '{{}}' END"
        return _put(_patched(_object(self._root), claim), "'runtime_state'", value)

    def with_runtime(self) -> str:
        return _patched(_object(self._root), _json(":claim"))

    def guard(self, user_id: str | None) -> str:
        depths = range(len(leaf_path(user_id)) + 1)
        schema = f"{self._at(user_id, len(depths) - 1)} -> 'schema'"
        known = f"CASE json_typeof({schema}) WHEN 'number' THEN CAST(CAST({schema} AS text) AS numeric) <= :schema END"
        objects = (_is_empty_or_object(self._at(user_id, depth)) for depth in depths)
        return " AND ".join([*objects, f"coalesce({known}, TRUE)"])

    def state_guard(self) -> str:
        state = _is_empty_or_object(f"({self._root} -> 'runtime_state')")
        return f"{_is_empty_or_object(self._root)} AND {state}"

    def patched(self, patch: dict[str, Any]) -> tuple[str, dict[str, str]]:
        values: dict[str, str] = {}

        def applied(document: str, part: dict[str, Any]) -> str:
            number = len(values)
            plain = {name: value for name, value in part.items() if not isinstance(value, dict)}
            values[f"patch{number}"] = json.dumps(plain, allow_nan=False, default=str)
            result = _patched(_object(document), _json(f":patch{number}"))
            for name, value in part.items():
                if isinstance(value, dict):
                    key = f"key{len(values)}"
                    values[key] = name
                    result = _put(result, _text(f":{key}"), applied(f"({document} -> {_text(f':{key}')})", value))
            return result

        return applied(self._root, patch), values

    def root_guard(self) -> str:
        return _is_empty_or_object(self._root)

    def leaf(self, user_id: str | None) -> str:
        leaf = self._at(user_id, len(leaf_path(user_id)))
        return f"CASE json_typeof({leaf}) WHEN 'object' THEN CAST({leaf} AS text) END"

    def raw(self) -> str:
        return f"CAST(r.{self.state} AS text)"

    def records(self) -> str:
        readable = rf"CASE WHEN CAST(r.{self.state} AS text) ~ '{_UNREADABLE}' THEN '{{}}' ELSE {self._root} END"
        hermes = "o.doc -> 'runtime_state' -> 'hermes'"
        return f"""SELECT f.id, f.user_id, CAST(f.value AS text), f.value ->> 'last_used_at' AS used FROM (
            SELECT r.{self.id} AS id, {readable} AS doc FROM {self.table} AS r OFFSET 0) AS o, LATERAL (
                SELECT o.id, NULL AS user_id, {hermes} AS value
                UNION ALL SELECT o.id, u.key, u.value FROM json_each({_object(f"{hermes} -> '{USERS}'")}) AS u) AS f
            WHERE json_typeof(f.value) = 'object' AND json_typeof(f.value -> 'status') = 'string'
            ORDER BY used DESC NULLS LAST LIMIT :limit"""

    def json(self, text: str) -> str:
        return _json(text)

    @property
    def _root(self) -> str:
        return f"CAST(r.{self.state} AS json)"

    def _at(self, user_id: str | None, depth: int) -> str:
        return "(" + " -> ".join([self._root, *(_key(user_id, above) for above in range(depth))]) + ")"


def _key(user_id: str | None, depth: int) -> str:
    keys = leaf_path(user_id)
    return _text(":leaf") if depth == len(keys) - 1 else f"'{keys[depth]}'"


def _text(name: str) -> str:
    return f"CAST({name} AS text)"  # a bare parameter after -> could also be an index


def _json(name: str) -> str:
    return f"CAST({name} AS json)"


def _object(value: str) -> str:
    return f"CASE json_typeof({value}) WHEN 'object' THEN {value} ELSE '{{}}' END"


def _is_empty_or_object(value: str) -> str:
    return f"coalesce(json_typeof({value}), 'null') IN ('null', 'object')"


def _put(doc: str, key: str, value: str) -> str:
    """Return ``doc`` with one member set."""
    return f"""(SELECT json_object_agg(m.key, m.value) FROM (
        SELECT o.key, o.value FROM json_each({doc}) AS o WHERE o.key <> {key}
        UNION ALL SELECT {key}, {value}) AS m (key, value))"""


def _patched(doc: str, patch: str) -> str:
    """Return ``doc`` with the members of ``patch`` merged in; as in RFC 7396, a null removes a member."""
    return f"""coalesce((SELECT json_object_agg(m.key, m.value) FROM (
        SELECT o.key, o.value FROM json_each({doc}) AS o WHERE o.key NOT IN (SELECT json_object_keys({patch}))
        UNION ALL SELECT p.key, p.value FROM json_each({patch}) AS p WHERE json_typeof(p.value) <> 'null'
        ) AS m (key, value)), '{{}}')"""


# A ``json`` column may contain the escapes of U+0000 and of unpaired surrogates, on which all functions fail. One such
# row must not hide the others from a list. An escape is one only after an even number of backslashes.
_HIGH, _LOW = r"\\u[dD][89abAB]..", r"\\u[dD][c-fC-F].."
_UNREADABLE = rf"(?<!\\)(\\\\)*(\\u0000|{_HIGH}(?!{_LOW})|(?<!{_HIGH}){_LOW})"


BY_DIALECT: dict[str, type[JsonSql]] = {"sqlite": SqliteJson, "postgresql": PostgresJson}
"""The supported databases, by SQLAlchemy's name of the dialect."""
