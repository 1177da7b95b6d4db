"""The keys of a settings model in words: dotted names, types with ranges, defaults, docs. Imports no torch."""

from __future__ import annotations

import textwrap
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

WIDTH = 110


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a field that holds further keys; None where it holds a value."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def leaves(model: type[BaseModel], prefix: str = "") -> dict[str, FieldInfo]:
    """Dotted key → field, for every value of `model` and its sections, in the order they are written."""
    found: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        section = section_of(field)
        if section is not None:
            found |= leaves(section, f"{prefix}{name}.")
        else:
            found[prefix + name] = field
    return found


def unwrap(annotation: Any) -> tuple[Any, list[Any], bool]:
    """(bare type, its constraints, whether null is allowed) of an annotation such as `Annotated[int, Ge(1)] | None`."""
    constraints: list[Any] = []
    nullable = False
    while True:
        if get_origin(annotation) is Annotated:
            annotation, *extra = get_args(annotation)
            for item in extra:
                constraints += item.metadata if isinstance(item, FieldInfo) else [item]
        elif get_origin(annotation) in (Union, types.UnionType):
            kinds = [a for a in get_args(annotation) if a is not type(None)]
            nullable |= len(kinds) < len(get_args(annotation))
            if len(kinds) != 1:
                return annotation, constraints, nullable
            annotation = kinds[0]
        else:
            return annotation, constraints, nullable


def type_text(annotation: Any, metadata: list[Any] | None = None) -> str:
    """A type as the help and the error messages say it: `int ≥ 1`, `one of bf16, fp32`, `list of str or null`."""
    bare, constraints, nullable = unwrap(annotation)
    constraints = [*(metadata or []), *constraints]
    args = get_args(bare)
    if get_origin(bare) is Literal:
        text = f"one of {', '.join(map(str, args))}" if len(args) > 1 else str(args[0])
    elif get_origin(bare) is list:
        filled = any(isinstance(c, annotated_types.MinLen) and c.min_length for c in constraints)
        text = f"{'non-empty ' if filled else ''}list of {type_text(args[0])}"
    elif get_origin(bare) is tuple:
        text = f"{len(args)} values, each {type_text(args[0])}"
    else:
        text = bare.__name__ if isinstance(bare, type) else str(bare)
        if bare is str and any(isinstance(c, annotated_types.MinLen) and c.min_length for c in constraints):
            text = "non-empty str"
        text = " ".join([text, *_range(constraints)])
    return f"{text} or null" if nullable else text


def _range(constraints: list[Any]) -> list[str]:
    signs = (
        (annotated_types.Ge, "ge", "≥"),
        (annotated_types.Gt, "gt", ">"),
        (annotated_types.Le, "le", "≤"),
        (annotated_types.Lt, "lt", "<"),
    )
    bounds = [f"{sign} {getattr(c, name)}" for kind, name, sign in signs for c in constraints if isinstance(c, kind)]
    return [" and ".join(bounds)] if bounds else []


def field_type(field: FieldInfo) -> str:
    """The type and range of a field in words."""
    return type_text(field.annotation, list(field.metadata))


def doc(field: FieldInfo) -> str:
    """A field's docstring on one line, without the full stop."""
    return " ".join((field.description or "").split()).rstrip(".")


def value_text(value: Any) -> str:
    """A value as it may be given on the command line: `[a, b]`, `null`, `true`, `''` for an empty text."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(value_text, value))}]"
    return str(value) if str(value) else "''"


def help_text(model: type[BaseModel], usage: str) -> str:
    """Plain-text help: `usage`, then each key of `model` with its type, its default and its doc, section by section."""
    lines = [usage.rstrip(), "", "keys (key=value; lists as [a,b] or a,b):"]
    fields = model.model_fields.items()
    for name, field in fields:
        lines += _entry(name, field) if section_of(field) is None else []
    for name, field in fields:
        lines += _section(name, field) if section_of(field) is not None else []
    return "\n".join(lines) + "\n"


def _section(prefix: str, field: FieldInfo) -> list[str]:
    section = section_of(field)
    assert section is not None, prefix
    title = doc(field) or " ".join((section.__doc__ or "").split()).rstrip(".")
    lines = ["", f"{prefix}: {title}" if title else prefix]
    for key, leaf in leaves(section, f"{prefix}.").items():
        lines += _entry(key, leaf)
    return lines


def _entry(key: str, field: FieldInfo) -> list[str]:
    default = (
        "required" if field.is_required() else f"default {value_text(field.get_default(call_default_factory=True))}"
    )
    head = f"  {key:<26} {field_type(field)}; {default}"
    indent = " " * 6
    return [head, *textwrap.wrap(doc(field), WIDTH, initial_indent=indent, subsequent_indent=indent)]
