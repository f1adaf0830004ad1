"""Paceline plans, runs and explains the data-parallel training of language models.

This package's ``__init__`` imports nothing, so that planning on a machine without
torch, and ``paceline --help`` anywhere, stay fast. The doors are the sub-packages:
``paceline.core``, ``paceline.records``, ``paceline.accounting``, ``paceline.kernels``,
``paceline.models`` and ``paceline.parallel``.
"""

__version__ = "0.2.0"
