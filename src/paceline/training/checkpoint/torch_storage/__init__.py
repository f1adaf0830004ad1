"""Storage backend for torch.distributed.checkpoint, whose planners divide writes and reads."""
