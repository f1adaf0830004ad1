"""A storage for torch.distributed.checkpoint: its planners share out what is written and read."""
