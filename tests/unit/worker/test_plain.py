"""Public values as plain data: what a dictionary, JSON and pydantic make of them."""

import json
import math
import pickle
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal

import msgspec
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter, ValidationError

from hermes_pool_worker import wire
from hermes_pool_worker.plain import Plain, plain, schema_of, type_word


class Colour(StrEnum):
    RED = "red"


class Inner(msgspec.Struct, Plain, frozen=True):
    number: int


@dataclass(frozen=True, slots=True)
class Outer(Plain):
    """What it is.

    And more of it.
    """

    name: str
    inner: tuple[Inner, ...] = ()
    colour: Colour = Colour.RED


def test_a_value_is_named_by_its_type_and_has_its_fields() -> None:
    value = Outer("x", (Inner(1), Inner(2)))
    assert value.to_dict() == {
        "type": "outer", "name": "x", "inner": [{"type": "inner", "number": 1}, {"type": "inner", "number": 2}],
        "colour": "red",
    }  # fmt: skip
    assert json.loads(value.to_json()) == value.to_dict()
    assert len(Outer("a\r\n\x85\u2028\u2029\x1cb").to_json().splitlines()) == 1


def test_an_event_is_an_array_on_the_wire_and_an_object_for_the_web() -> None:
    event = wire.ToolStarted("t", 1, "call", "terminal", "ls")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(event))[0] == "ToolStarted"
    assert event.to_dict() == {
        "type": "tool_started", "turn_id": "t", "attempt": 1, "call_id": "call", "name": "terminal", "arguments": "ls",
    }  # fmt: skip
    assert pickle.loads(pickle.dumps(event)) == event


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (math.nan, None), (math.inf, None), (1.5, 1.5), (True, True), (None, None), ("\ud83d\ude00", "\U0001f600"),
        ("half \udc97", "half \ufffd"), ({1: {2.5}}, {"1": [2.5]}), (b"x", "b'x'"), ((Colour.RED,), ["red"]),
    ],
)  # fmt: skip
def test_whatever_json_lacks_becomes_something_that_it_has(value: Any, expected: Any) -> None:
    assert plain(value) == expected


anything: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.text(st.characters(categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner),
)


@given(anything)
def test_any_value_becomes_json_that_every_reader_takes(value: Any) -> None:
    text = json.dumps(plain(value), ensure_ascii=False, allow_nan=False)
    assert json.loads(text.encode()) == plain(value)


def test_pydantic_takes_a_value_as_it_is_and_serialises_it_as_the_web_wants_it() -> None:
    class Answer(BaseModel):
        outer: Outer
        event: wire.TextDelta | wire.ToolStarted

    answer = Answer(outer=Outer("x", (Inner(1),)), event=wire.TextDelta("t", 1, "hello"))
    assert answer.outer.inner == (Inner(1),)
    assert answer.model_dump() == {"outer": answer.outer.to_dict(), "event": answer.event.to_dict()}
    assert json.loads(answer.model_dump_json()) == answer.model_dump()
    for wrong in ("no event", {"type": "status", "turn_id": "t"}, {"type": "text_delta", "nonsense": 1}, {"text": "x"}):
        with pytest.raises(ValidationError):
            TypeAdapter(wire.TextDelta).validate_python(wrong)


def test_a_dataclass_that_fastapi_has_taken_apart_is_put_together_again() -> None:
    adapter = TypeAdapter(list[Outer])
    assert adapter.dump_python(adapter.validate_python([{"name": "x", "inner": (), "colour": "red"}])) == [
        Outer("x").to_dict()
    ]


def test_fastapi_describes_the_values_in_its_openapi() -> None:
    app = FastAPI()

    @app.get("/")
    async def one() -> list[Outer]:
        return []

    described = app.openapi()["components"]["schemas"]["Outer"]
    assert described["properties"]["type"] == {"const": "outer"}
    assert described["description"] == "What it is."


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        (str | None, {"type": ["string", "null"]}),
        (float | None, {"type": ["number", "null"]}),
        (Literal["a", "b"], {"enum": ["a", "b"]}),
        (Annotated[str, msgspec.Meta(max_length=5)], {"type": "string", "maxLength": 5}),
        (Annotated[list[Any], msgspec.Meta(max_length=5)], {"type": "array", "items": {}, "maxItems": 5}),
        (dict[str, int], {"type": "object", "additionalProperties": {"type": "integer"}}),
        (Colour, {"enum": ["red"]}),
        (Inner | None, {"anyOf": [{"$ref": "Inner"}, {"type": "null"}]}),
        (
            tuple[float, int],
            {
                "type": "array", "minItems": 2, "maxItems": 2,
                "prefixItems": [{"type": ["number", "null"]}, {"type": "integer"}],
            },
        ),
    ],
)  # fmt: skip
def test_an_annotation_has_a_schema(annotation: Any, expected: Any) -> None:
    assert schema_of(annotation, lambda kind: {"$ref": kind.__name__}) == expected


def test_an_annotation_that_json_cannot_carry_is_refused() -> None:
    with pytest.raises(TypeError, match="no JSON schema"):
        schema_of(complex, lambda _: {})


def test_the_word_for_a_class_is_its_name_in_small_letters() -> None:
    assert type_word(wire.BackgroundFinished) == "background_finished"
