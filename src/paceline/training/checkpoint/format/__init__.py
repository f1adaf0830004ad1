"""What a checkpoint's files look like; torch is not needed to read any of it."""
