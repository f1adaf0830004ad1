"""A command that does not exist, and the one that was meant."""

import typing
from collections.abc import Sequence
from typing import Annotated, Any

from paceline.core.errors import UsageError, did_you_mean


def require_known_verb(arguments: Sequence[str], verbs: Any) -> None:
    """Raises if a word in the place of a command is none.

    Args:
        arguments: The command line.
        verbs: The union of commands, each annotated with its name; a command may have a field
            whose type is such a union again.
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
    """Returns the types of a command's fields; none where they are options alone."""
    try:
        return list(typing.get_type_hints(command, include_extras=True).values())
    except (NameError, TypeError):
        # Options may have types that only their work needs, and that loads later.
        return []


def _named(annotation: Any) -> dict[str, Any]:
    """Returns the types of a union that tyro.conf.subcommand has given names."""
    found: dict[str, Any] = {}
    for each in typing.get_args(annotation):
        if typing.get_origin(each) is Annotated:
            kind, *remarks = typing.get_args(each)
            names = [getattr(remark, "name", None) for remark in remarks]
            found |= {name: kind for name in names if isinstance(name, str)}
    return found
