"""The command line: one file per verb, heavy imports only inside what a verb runs."""
