"""FlashAttention-2 in Triton."""
