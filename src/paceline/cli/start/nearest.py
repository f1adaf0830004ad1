"""Rejects unknown commands, and suggests the nearest known one."""

import typing
from collections.abc import Sequence
from typing import Annotated, Any

from paceline.core.errors import UsageError, did_you_mean


def require_known_verb(arguments: Sequence[str], verbs: Any) -> None:
    """Raises an error for a word in the position of a command that is not one.

    Args:
        arguments: The command line.
        verbs: The union of commands, each annotated with its name; a command may have a field
            whose type is again such a union.
    """
    known, path = _named(verbs), "paceline"
    for word in arguments:
        if not known or word.startswith("-"):
            return
        if word not in known:
            listed = ", ".join(known)
            raise UsageError(
                f"{path}: no command {word!r}; {did_you_mean(word, known)}known: {listed}"
            )
        path = f"{path} {word}"
        known = {name: kind for hint in _hints(known[word]) for name, kind in _named(hint).items()}


def _hints(command: type) -> list[Any]:
    """Returns the types of a command's fields; empty if they cannot be resolved."""
    try:
        return list(typing.get_type_hints(command, include_extras=True).values())
    except (NameError, TypeError):
        # Types of options may be imported for type checking only.
        return []


def _named(annotation: Any) -> dict[str, Any]:
    """Returns the types in a union that are named with tyro.conf.subcommand, by name."""
    found: dict[str, Any] = {}
    for each in typing.get_args(annotation):
        if typing.get_origin(each) is Annotated:
            kind, *remarks = typing.get_args(each)
            names = [getattr(remark, "name", None) for remark in remarks]
            found |= {name: kind for name in names if isinstance(name, str)}
    return found
