"""Shared parts of all measurements: timers, memory, devices, isolation, ranks."""
