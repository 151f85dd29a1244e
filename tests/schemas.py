"""Random JSON schemas: every type, nesting, what must and may be there, bounds, patterns, choices, references."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
NAMES = ("id", "name", "tags", "kind", "size", "on", "at", "next", "note", "x")
WORDS = ("red", "green", "a b", "", "unit", 'q"q', "back\\slash", "yes")
PATTERNS = ("^[a-z]{2,6}$", "^[A-Z][0-9]{1,3}$", "^(ab|cd)+e$", "^\\d{4}-\\d{2}$", "[xyz]$", "^(a|b){0,4}$")
FORMATS = ("date", "time", "uuid", "ipv4")


def schemas(count: int, seed: int = 0) -> list[Schema]:
    """Of small answers: no string, list or number can go on for ever."""
    made = []
    for number in range(count):
        draw = random.Random(f"{seed}:{number}")
        schema = thing(draw, depth=2) if number % 4 else an_object(draw, 2)
        if number % 5 == 0:
            schema = referring(draw, schema)
        made.append(schema)
    return made


def thing(draw: random.Random, depth: int) -> Schema:
    simple: list[Callable[[random.Random], Schema]] = [a_string, an_integer, a_number, a_choice, a_constant, a_plain]
    if depth == 0 or draw.random() < 0.3:
        return draw.choice(simple)(draw)
    return draw.choice([an_object, an_object, an_array, any_of])(draw, depth)


def an_object(draw: random.Random, depth: int) -> Schema:
    names = draw.sample(NAMES, draw.randint(1, 4))
    schema: Schema = {"type": "object", "properties": {name: thing(draw, depth - 1) for name in names}}
    schema["required"] = [name for name in names if draw.random() < 0.6]
    schema["additionalProperties"] = False
    return schema


def an_array(draw: random.Random, depth: int) -> Schema:
    least = draw.randint(0, 2)
    schema: Schema = {"type": "array", "items": thing(draw, depth - 1), "minItems": least}
    schema["maxItems"] = least + draw.randint(0, 2)
    if draw.random() < 0.2:
        parts = [thing(draw, 0) for _ in range(2)]
        schema = {"type": "array", "prefixItems": parts, "items": False, "minItems": draw.randint(0, 2)}
    return schema


def any_of(draw: random.Random, depth: int) -> Schema:
    return {"anyOf": [thing(draw, depth - 1) for _ in range(draw.randint(2, 3))]}


def referring(draw: random.Random, schema: Schema) -> Schema:
    """A list that goes on as long as it likes, and not without an end: most go on twice or so."""
    chain = {
        "type": "object",
        "properties": {"value": schema, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/link"}]}},
        "required": ["next"],
        "additionalProperties": False,
    }
    tree = {"type": "array", "items": {"$ref": "#/$defs/link"}, "maxItems": 1}
    return {"$defs": {"link": draw.choice([chain, tree])}, "$ref": "#/$defs/link"}


def a_string(draw: random.Random) -> Schema:
    way = draw.random()
    if way < 0.4:
        least = draw.randint(0, 3)
        return {"type": "string", "minLength": least, "maxLength": least + draw.randint(0, 6)}
    return {"type": "string", **({"pattern": draw.choice(PATTERNS)} if way < 0.8 else {"format": draw.choice(FORMATS)})}


def an_integer(draw: random.Random) -> Schema:
    least = draw.randint(-50, 50)
    schema: Schema = {"type": "integer", "minimum": least, "maximum": least + draw.randint(0, 500)}
    if draw.random() < 0.3:
        schema["exclusiveMinimum"] = schema.pop("minimum") - 1
    return schema


def a_number(draw: random.Random) -> Schema:
    return {"type": "number", "minimum": draw.randint(-9, 0), "maximum": draw.choice([1, 2.5, 10])}


def a_choice(draw: random.Random) -> Schema:
    return {"enum": draw.sample([*WORDS, 1, 2.5, None, True, [1], {"a": 1}], draw.randint(1, 5))}


def a_constant(draw: random.Random) -> Schema:
    return {"const": draw.choice([*WORDS, 0, -1.5, None, False])}


def a_plain(draw: random.Random) -> Schema:
    return {"type": draw.choice(["boolean", "null", ["boolean", "null"]])}
