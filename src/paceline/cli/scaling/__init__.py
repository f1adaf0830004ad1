"""``paceline scaling``, ``sweep`` and ``loop``: extrapolation from small runs to a large one."""
