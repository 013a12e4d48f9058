"""Public values as plain data: dictionaries and JSON with a ``type`` word, their JSON schema, and what FastAPI needs.

On the wire the same values are arrays; this is how they leave a web host. Only the standard library is imported, since
the events, which both sides of the wire share, have it as well.
"""

import json
import math
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any

Schema = dict[str, Any]
"""A JSON schema."""


class Plain:
    """A value with a ``type`` word and named fields. A mixin for msgspec structs, dataclasses and exceptions."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the value as built-in types that JSON knows: ``type``, which names its class, and all its fields.

        ``NaN`` and infinities, which JSON lacks, become ``None``, and half a surrogate pair becomes U+FFFD.
        """
        kind: Any = type(self)  # to the type checker a class is not hashable
        return {"type": type_word(kind), **{name: plain(getattr(self, name)) for name in field_names(kind)}}

    def to_json(self) -> str:
        """Return ``to_dict`` as JSON text, in one line."""
        return json_text(self.to_dict())

    @classmethod
    def json_schema(cls) -> Schema:
        """Return the JSON schema of ``to_dict``, complete in itself."""
        return schema_of_class(cls, lambda kind: kind.json_schema())

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """Let pydantic, and so FastAPI, take the value as it is and serialise it with ``to_dict``."""
        return {
            "type": "function-plain",
            "function": {"type": "no-info", "function": cls._accepted},
            "serialization": {"type": "function-plain", "function": plain},
            "ref": f"{cls.__module__}.{cls.__qualname__}:{id(cls)}",
        }

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: Any) -> Schema:
        """Return ``json_schema``, for OpenAPI."""
        return cls.json_schema()

    @classmethod
    def _accepted(cls, value: object) -> object:
        """Return ``value`` if it is one of this class; else raise ``ValueError``, which pydantic expects."""
        if isinstance(value, cls):
            return value
        kind: Any = cls
        if isinstance(value, dict) and value.get("type", type_word(kind)) == type_word(kind):
            return _made(kind, value)
        raise ValueError(f"this is no {cls.__name__}")


def _made(kind: Any, value: dict[str, Any]) -> object:
    """Make an object from its fields: older versions of FastAPI take a dataclass apart before they validate it."""
    names = field_names(kind)
    if issubclass(kind, BaseException) or not set(names) >= set(value) - {"type"}:
        raise ValueError(f"this is no {kind.__name__}")
    try:
        return kind(**{name: item for name, item in value.items() if name != "type"})
    except TypeError as error:
        raise ValueError(str(error)) from error


@cache
def type_word(kind: Any) -> str:
    """Return the word for a class: its own ``TYPE``, or its name in snake_case."""
    given = getattr(kind, "TYPE", None)
    return given if isinstance(given, str) else re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower()


@cache
def field_names(kind: Any) -> tuple[str, ...]:
    """Return the names of the fields of a struct, a dataclass, or a class that lists them itself."""
    listed = getattr(kind, "plain_fields", None)
    if listed is not None:
        return tuple(listed())
    return tuple(getattr(kind, "__struct_fields__", ()) or getattr(kind, "__dataclass_fields__", ()))


def plain(value: object) -> Any:
    """Return ``value`` in built-in types that JSON knows. What is unknown becomes its text."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Plain):
        return value.to_dict()
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, str):
        return str(value) if value.isascii() else without_halves(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {plain(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, bytes | bytearray | memoryview):
        return [plain(item) for item in value]
    return plain(str(value))


def json_text(value: Any) -> str:
    """Return built-in types as JSON text in one line, also to readers that break lines at U+2028 and the like."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).translate(_LINE_BREAKS)


_LINE_BREAKS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}


def without_halves(text: str) -> str:
    """Return ``text`` with each half of a surrogate pair, which UTF-8 cannot hold, replaced by U+FFFD."""
    # UTF-16 joins two halves of a pair that stand side by side, and replaces only those that stand alone.
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


# --- JSON schema ------------------------------------------------------------------------------------------------------

_SIMPLE: dict[Any, Schema] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": ["number", "null"]},  # what is not finite becomes null
    bool: {"type": "boolean"},
    NoneType: {"type": "null"},
    Any: {},
    object: {},
}


def schema_of_class(kind: Any, named: Callable[[type[Plain]], Schema]) -> Schema:
    """Return the schema of one class. ``named`` returns the one to use for a class that it contains."""
    constants: Mapping[str, Any] = getattr(kind, "plain_constants", dict)()
    properties: Schema = {"type": {"const": type_word(kind)}}
    hints = hints_of(kind)
    for name in field_names(kind):
        properties[name] = {"const": constants[name]} if name in constants else schema_of(hints[name], named)
    about = " ".join((kind.__doc__ or "").partition("\n\n")[0].split()).replace("``", "`")
    return {
        "title": kind.__name__,
        "description": about,
        "type": "object",
        "properties": properties,
        "required": list(properties),
    }


def hints_of(kind: Any) -> dict[str, Any]:
    """Return the annotation of each field."""
    listed = getattr(kind, "plain_fields", None)
    return dict(listed()) if listed is not None else typing.get_type_hints(kind, include_extras=True)


def schema_of(annotation: Any, named: Callable[[type[Plain]], Schema]) -> Schema:
    """Return the schema of the values that an annotation describes, as ``plain`` returns them."""
    if annotation in _SIMPLE:
        return dict(_SIMPLE[annotation])
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _bounded(schema_of(arguments[0], named), arguments[1:])
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin in (typing.Union, UnionType):
        return _any_of([schema_of(each, named) for each in arguments])
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": schema_of(arguments[1], named)}
    if origin is tuple and Ellipsis not in arguments:
        items = [schema_of(each, named) for each in arguments]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return {"type": "array", "items": schema_of(arguments[0], named)}
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return {"enum": [each.value for each in annotation]}
    if isinstance(annotation, type) and issubclass(annotation, Plain):
        return named(annotation)
    raise TypeError(f"no JSON schema for {annotation!r}")


def _any_of(schemas: list[Schema]) -> Schema:
    """Join alternatives; those that are a bare type become a list of types."""
    if all(set(each) == {"type"} for each in schemas):
        types = [name for each in schemas for name in _listed(each["type"])]
        return {"type": list(dict.fromkeys(types))}
    return {"anyOf": schemas}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _bounded(schema: Schema, limits: tuple[Any, ...]) -> Schema:
    word = "maxLength" if schema.get("type") == "string" else "maxItems"
    bounds = [limit.max_length for limit in limits if getattr(limit, "max_length", None) is not None]
    return {**schema, word: min(bounds)} if bounds else schema
