"""Multi-step workflows. Imports nothing, so that parsing a command stays fast."""
