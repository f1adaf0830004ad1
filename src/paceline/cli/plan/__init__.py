"""``paceline plan`` and its subcommands."""
