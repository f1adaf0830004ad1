"""Plans as JSON; decoding rejects unknown fields."""

from typing import Any

import msgspec

from paceline.core.errors import RecordError, ShapeError
from paceline.core.plan import Plan

UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Exceptions from decoding untrusted JSON; deep nesting raises the last."""


def encode_plan(plan: Plan) -> bytes:
    """Encodes a `plan` as one JSON object."""
    return msgspec.json.encode(plan)


def decode_plan(data: bytes, source: str = "plan") -> Plan:
    """Decodes a plan from `data`; errors name `source` and the invalid field."""
    try:
        raw = msgspec.json.decode(data)
        plan = msgspec.convert(raw, Plan)
    except (*UNDECODABLE, ShapeError) as error:
        raise RecordError(f"{source}: not a valid plan: {error}") from error
    unknown = _first_unknown_key(raw, msgspec.to_builtins(plan), "$")
    if unknown is not None:
        raise RecordError(f"{source}: not a valid plan: unknown field `{unknown}`")
    return plan


def _first_unknown_key(raw: dict[str, Any], known: dict[str, Any], path: str) -> str | None:
    # msgspec forbids unknown keys only for its own structs; the specs are plain dataclasses so
    # that core has no dependencies.
    for key, value in raw.items():
        if key not in known:
            return f"{path}.{key}"
        if isinstance(value, dict):
            unknown = _first_unknown_key(value, known[key], f"{path}.{key}")
            if unknown is not None:
                return unknown
    return None
