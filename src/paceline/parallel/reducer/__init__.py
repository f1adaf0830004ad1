"""Gradient averaging overlapped with backward: the common base of DDP, ZeRO and FSDP."""
