"""The command line: one module per verb, with heavy imports inside `run` methods only."""
