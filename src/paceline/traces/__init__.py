"""Where a step's time and memory go: traces recorded, merged, read and analysed."""
