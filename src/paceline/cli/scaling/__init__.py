"""``paceline scaling``, ``sweep`` and ``loop``: from small runs to a large one."""
