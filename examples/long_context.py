"""Attention with memory linear in the sequence length, and which backend computes it.

python examples/long_context.py
"""

import torch

from paceline.kernels import explain_backend, flash_attention

# --8<-- [start:attention]
device = "cuda" if torch.cuda.is_available() else "cpu"
query = torch.randn(1, 8, 2048, 64, device=device, requires_grad=True)
# Two key heads, each for four query heads; the keys include those of 1,024 cached tokens.
key, value = (torch.randn(1, 2, 3072, 64, device=device, requires_grad=True) for _ in range(2))

print(explain_backend(device))
output = flash_attention(query, key, value, causal=True, causal_align="bottom_right")
output.sum().backward()
# --8<-- [end:attention]

# --8<-- [start:parts]
# Keys in two parts, as in ring attention: the log-sum-exps determine the outputs' weights.
parts = [
    flash_attention(query, *keys_and_values, causal=False, return_lse=True)
    for keys_and_values in zip(key.chunk(2, dim=2), value.chunk(2, dim=2), strict=True)
]
shares = torch.softmax(torch.stack([lse for _, lse in parts]), dim=0).unsqueeze(-1)
mixed = shares[0] * parts[0][0] + shares[1] * parts[1][0]
# --8<-- [end:parts]

whole = flash_attention(query, key, value, causal=False)
print(f"two parts differ from the whole by at most {(mixed - whole).abs().max():.1e}")
