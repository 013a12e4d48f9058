"""The JSON schema of the public values: it is the one in the documents, and what the values become matches it."""

import inspect
import json
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, cast, get_args, get_origin, get_type_hints

import jsonschema
import pytest

import hermes_pool
from hermes_pool import schema
from hermes_pool.errors import HermesPoolError, TurnInterruptedError, WorkerStartError
from hermes_pool_worker.plain import Plain, field_names

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "reference" / "schema.json"
KINDS = sorted(schema.public_kinds(), key=lambda kind: kind.__name__)

each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def made(annotation: Any) -> Any:
    """Some value of a type."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    simple = {str: "word", int: 7, float: 1.5, bool: True, NoneType: None, Any: "anything", object: "anything"}
    if annotation in simple:
        return simple[annotation]
    if isinstance(annotation, type) and issubclass(annotation, Plain):
        return an_object(annotation)
    if origin in (list, tuple, Sequence):
        return (origin if origin in (list, tuple) else list)(made(each) for each in arguments if each is not Ellipsis)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"key": made(arguments[1])}
    if isinstance(annotation, type):
        return next(iter(cast("Any", annotation)))  # an enumeration
    return made(arguments[0]) if isinstance(arguments[0], type) or get_args(arguments[0]) else arguments[0]


def an_object(kind: Any) -> Any:
    if issubclass(kind, BaseException):
        taken = [each for each in inspect.signature(kind).parameters.values() if each.kind is each.KEYWORD_ONLY]
        return kind("what happened", **{each.name: made(each.annotation) for each in taken})
    hints = get_type_hints(kind, include_extras=False)
    return kind(**{name: made(hints[name]) for name in field_names(kind)})


def test_the_document_is_current() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == schema.text(), (
        f"python -m hermes_pool.schema > {DOCUMENT.relative_to(DOCUMENT.parents[2])}"
    )


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(schema.json_schema())


@each_kind
def test_what_a_value_becomes_matches_the_schema(kind: type[Plain]) -> None:
    value = an_object(kind)
    whole = schema.json_schema()
    only = {"$ref": f"#/$defs/{kind.__name__}", "$defs": whole["$defs"]}
    validator = jsonschema.Draft202012Validator(only)
    assert [error.message for error in validator.iter_errors(json.loads(value.to_json()))] == []
    assert set(value.to_dict()) == set(whole["$defs"][kind.__name__]["properties"])
    assert jsonschema.Draft202012Validator(kind.json_schema()).is_valid(value.to_dict())


@each_kind
def test_what_a_web_client_sees_is_public_and_can_be_pickled(kind: type[Plain]) -> None:
    assert getattr(hermes_pool, kind.__name__) is kind
    value = an_object(kind)
    assert pickle.loads(pickle.dumps(value)).to_dict() == value.to_dict()


def test_every_event_snapshot_reply_and_error_is_among_them() -> None:
    names = {kind.__name__ for kind in KINDS}
    shown = {name for name in dir(hermes_pool) if name.endswith(("Delta", "Snapshot", "Error", "Finished"))}
    assert shown | {"Reply", "ToolUse", "DeathReport", "Question", "Status", "Stopped", "Drained"} <= names


def test_an_error_keeps_to_itself_what_concerns_the_machine() -> None:
    report: Any = an_object(hermes_pool.DeathReport)
    died = TurnInterruptedError("it died", exit="was killed", returncode=-9, stderr_tail=["password"], report=report)
    seen = died.to_dict()
    assert (seen["type"], seen["code"], seen["message"]) == ("error", "turn_interrupted", "it died")
    assert seen["report_id"] == report.report_id
    assert "password" not in died.to_json()
    assert "password" not in WorkerStartError("no start", step="hello", stderr_tail=["password"]).to_json()


def test_a_hosts_own_error_has_the_fields_of_its_class() -> None:
    class OwnError(HermesPoolError):
        def __init__(self, message: str, *, colour: str) -> None:
            super().__init__(message)
            self.colour = colour

    assert OwnError("m", colour="red").to_dict()["colour"] == "red"
