"""The courses' questions, answered in a report, and the suite that measures what it needs."""

from typing import Literal

PresetName = Literal["laptop", "2gpu", "8gpu"]
"""The kinds of machine that the suite has sizes for; the command line needs nothing else here."""
