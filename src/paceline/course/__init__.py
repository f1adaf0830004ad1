"""Answers to the course questions. No other package depends on this one."""
