"""Averaging gradients while backward produces them: what DDP, ZeRO and FSDP build on."""
