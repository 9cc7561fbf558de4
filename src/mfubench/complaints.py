"""What is wrong with a configuration, as sentences for the person who wrote it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

FILES = (".yaml", ".yml", ".json")  # endings of what opens a complaint, before the keys in it


def explain_all(faults: Sequence[Any], where: str, schema: Any) -> list[str]:
    """A line a fault; where a value fits no member of a union, one for all that is said of it."""
    lines: list[str] = []
    for fault in faults:
        line, head = explain(fault, where, schema), found_at(fault, where, schema)
        if lines and lines[-1].startswith(head) and line.startswith(head):
            lines[-1] += f", or {line.removeprefix(head)}"
        else:
            lines.append(line)
    return lines


def found_at(fault: Any, where: str, schema: Any) -> str:
    return f"{place_of(fault, where, schema)}: found {fault.get('input')!r}; "


def place_of(fault: Any, where: str, schema: Any) -> str:
    unknown = fault["loc"][-1:] if fault["type"] == "extra_forbidden" else ()
    return place(where, (*follow(schema, fault["loc"])[0], *unknown))


def explain(fault: Any, where: str, schema: Any) -> str:
    """One pydantic fault of `schema` (a model, or a union of models) as a sentence for who wrote the file."""
    at = place_of(fault, where, schema)
    found = fault.get("input")
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "extra_forbidden":
        *above, key = fault["loc"]
        allowed = keys_at(schema, above)
        near = difflib.get_close_matches(str(key), allowed, n=1)
        hint = f"did you mean {near[0]}?" if near else f"keys here: {', '.join(allowed)}"
        return f"{at}: unknown key (found {found!r}); {hint}"
    if fault["type"] == "missing":
        return f"{at}: missing; this key must be given"
    if fault["type"] == "value_error":
        return f"{at}: {message}"
    hint = ""
    if isinstance(found, str) and fault["type"] in ("float_type", "int_type"):
        hint = " (YAML reads 1e-3 as text; write 1.0e-3)" if "e" in found.lower() else " (without quotes)"
    return f"{found_at(fault, where, schema)}{message[0].lower()}{message[1:]}{hint}"


def place(where: str, keys: Sequence[str | int]) -> str:
    """`where`, a file or a file and keys in it, with further keys."""
    if not keys:
        return where
    return f"{where}{': ' if where.endswith(FILES) else '.'}{'.'.join(map(str, keys))}"


def keys_at(schema: Any, path: Sequence[str | int]) -> list[str]:
    """The keys that may stand at a place within `schema`; of a union, those of all its members."""
    _, places = follow(schema, path)
    models = [place for place in places if isinstance(place, type) and issubclass(place, BaseModel)]
    return sorted({key for model in models for key in model.model_fields})


def follow(schema: Any, path: Sequence[str | int]) -> tuple[list[str | int], list[Any]]:
    """The known keys of a pydantic path, without what names a member of a union, and the types of what lies there."""
    keys: list[str | int] = []
    places = list(alternatives(schema))
    for part in path:
        inner: list[Any] = []
        for place in places:
            if isinstance(place, type) and issubclass(place, BaseModel):
                if part in place.model_fields:
                    inner += alternatives(place.model_fields[str(part)].annotation)
            elif get_origin(place) in (dict, list, tuple):
                inner += [one for argument in get_args(place)[-1:] for one in alternatives(argument)]
        if inner:
            keys.append(part)
        places = inner or [place for place in places if is_tagged(place, part)]  # the member chosen of a union
    return keys, places


def is_tagged(place: Any, tag: str | int) -> bool:
    """Whether a model is the member of a discriminated union that goes by `tag`."""
    return isinstance(place, type) and any(
        tag in get_args(field.annotation) for field in getattr(place, "model_fields", {}).values()
    )


def alternatives(annotation: Any) -> Iterator[Any]:
    """A type without its annotations; the members of a union one by one."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from alternatives(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for member in get_args(annotation):
            yield from alternatives(member)
    elif origin is tuple and get_args(annotation)[-1] is Ellipsis:
        yield tuple[get_args(annotation)[0]]  # type: ignore[misc]
    else:
        yield annotation
