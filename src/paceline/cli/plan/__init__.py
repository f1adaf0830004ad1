"""``paceline plan`` and its tasks."""
