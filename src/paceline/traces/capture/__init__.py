"""Recording ranks on clocks that agree."""
