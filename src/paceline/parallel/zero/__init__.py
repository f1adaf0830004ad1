"""Optimizer state and gradients sharded over ranks (ZeRO-1 and ZeRO-2)."""
