"""What the profiler saw: memory over time."""
