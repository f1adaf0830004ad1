"""Run configs as TOML: reading, ``--set`` overrides, writing, and a commented template.

The dataclasses of `training.config` are the only definition. An unknown key is an error that
suggests the nearest name. The template's comments are the docstrings below the fields.
"""

import ast
import dataclasses
import inspect
import pathlib
import textwrap
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from paceline.core.errors import UsageError, unknown_name
from paceline.core.strategies import FORMER_NAMES
from paceline.training.config import RunConfig

_COMMENT_WIDTH = 96

Settings = Mapping[str, Mapping[str, Any]]
"""Values of config keys, by section."""


def read_config(
    path: pathlib.Path, changes: Sequence[str] = (), settings: Settings | None = None
) -> RunConfig:
    """Reads a config and applies settings of a plan, then changes like ``training.steps=100``."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{path}: {error.strerror}; `paceline train init > {path}` creates one"
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not a text file: {error.reason}") from error
    return decode_config(text, changes, str(path), settings)


def decode_config(
    text: str, changes: Sequence[str] = (), where: str = "config", settings: Settings | None = None
) -> RunConfig:
    """Decodes a config; every defect is an error that names the key."""
    try:
        raw = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # Also for overlong integers.
        raise UsageError(f"{where}: not TOML: {error}") from error
    for section, values in (settings or {}).items():
        for key, value in values.items():
            _set(raw, (section, key), value, f"{section}.{key}={value}")
    for change in changes:
        _apply(raw, change)
    _require_known(raw, RunConfig, where)
    parallel = raw.get("parallel", {})
    if isinstance(parallel, dict) and "strategy" in parallel:
        parallel["strategy"] = FORMER_NAMES.get(str(parallel["strategy"]), parallel["strategy"])
    try:
        return msgspec.convert(raw, RunConfig)
    except (msgspec.ValidationError, OverflowError) as error:
        raise UsageError(f"{where}: {error}") from error


def encode_config(config: RunConfig) -> str:
    """Returns a config as TOML, without the keys that are None."""
    return "".join(_lines(config, has_comments=False))


def config_template(config: RunConfig) -> str:
    """Returns a config as TOML, with a comment on every key."""
    return "".join(_lines(config, has_comments=True))


def _apply(raw: dict[str, Any], change: str) -> None:
    """Sets a key from ``section.key=value``; the value is TOML or plain text."""
    name, is_given, value = change.partition("=")
    *sections, key = name.strip().split(".")
    if not is_given or not key:
        raise UsageError(f"--set {change!r}: write it like training.steps=100")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except ValueError:
        parsed = value.strip()  # Plain text: shells remove the quotes.
    _set(raw, (*sections, key), parsed, change)


def _set(raw: dict[str, Any], path: Sequence[str], value: Any, change: str) -> None:
    *sections, key = path
    table = raw
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise UsageError(f"--set {change!r}: {section} is not a section")
    table[key] = value


def _require_known(raw: Mapping[str, Any], config: type, where: str) -> None:
    hints = typing.get_type_hints(config)
    for key, value in raw.items():
        if key not in hints:
            raise unknown_name(f"{where}: unknown key", key, hints)
        entries = value if isinstance(value, list) else [value]
        for entry in entries:
            if isinstance(entry, dict):
                section = _section_type(hints[key])
                if section is None:
                    raise UsageError(f"{where}: {key} is a value, not a section")
                _require_known(entry, section, f"{where}: {key}")


def _section_type(hint: Any) -> type | None:
    """Returns the dataclass type of a field, bare or in a tuple."""
    for candidate in (hint, *typing.get_args(hint)):
        if dataclasses.is_dataclass(candidate) and isinstance(candidate, type):
            return candidate
    return None


def _lines(config: Any, *, has_comments: bool, section: str = "") -> Iterator[str]:
    fields = dataclasses.fields(config)
    # Values before sections: in TOML a key belongs to the section above it.
    nested = [field for field in fields if dataclasses.is_dataclass(getattr(config, field.name))]
    for field in fields:
        if field not in nested:
            yield from _value_lines(config, field.name, has_comments=has_comments)
    for field in nested:
        name = f"{section}.{field.name}" if section else field.name
        yield "\n"
        if has_comments:
            yield f"# {(type(getattr(config, field.name)).__doc__ or '').strip()}\n"
        yield f"[{name}]\n"
        yield from _lines(getattr(config, field.name), has_comments=has_comments, section=name)


def _value_lines(config: Any, name: str, *, has_comments: bool) -> Iterator[str]:
    value = getattr(config, name)
    if has_comments:
        comment = " ".join(_field_comments(type(config)).get(name, "").split())
        choices = _choices(typing.get_type_hints(type(config))[name])
        if choices and not all(choice in comment for choice in choices):
            comment += f" One of: {', '.join(choices)}."
        yield from (f"# {line}\n" for line in textwrap.wrap(comment, _COMMENT_WIDTH))
    if value is None:
        if has_comments:
            yield f"# {name} =\n"
        return
    yield f"{name} = {_toml_value(value)}\n"


def _toml_value(value: Any) -> str:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = dataclasses.asdict(value).items()
        return "{ " + ", ".join(f"{key} = {_toml_value(each)}" for key, each in items) + " }"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    # Numbers, booleans and strings have the same syntax in TOML and JSON.
    return msgspec.json.encode(value).decode()


def _choices(hint: Any) -> list[str]:
    """Returns the values of a Literal, also of an optional one."""
    if typing.get_origin(hint) is typing.Literal:
        return [str(value) for value in typing.get_args(hint)]
    if isinstance(hint, types.UnionType):
        return [choice for each in typing.get_args(hint) for choice in _choices(each)]
    return []


def _field_comments(config: type) -> dict[str, str]:
    """Returns the docstring below each field of a dataclass, parsed from its source."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(config))).body
    assert isinstance(definition, ast.ClassDef)
    comments = {}
    for field, following in zip(definition.body, definition.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            comments[field.target.id] = str(following.value.value)
    return comments
