"""FlashAttention-2: the function, its backends, and their oracle."""
