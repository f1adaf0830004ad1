"""Values as words of a command line."""


def words(*values: object) -> tuple[str, ...]:
    """Writes values as a command line has them."""
    return tuple(str(value) for value in values)


def flag(field: str) -> str:
    """Names the flag that sets a field of a record's case."""
    return f"--{field.replace('_', '-')}"
