"""``paceline lab`` and its subcommands."""
