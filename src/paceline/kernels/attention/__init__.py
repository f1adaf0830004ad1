"""FlashAttention-2: the function, its backends, and a reference for their tests."""
