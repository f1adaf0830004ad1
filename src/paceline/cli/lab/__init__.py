"""``paceline lab`` and its parts."""
