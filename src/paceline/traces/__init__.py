"""Records, merges, reads and analyses traces of a step's time and memory."""
