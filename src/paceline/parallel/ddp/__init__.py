"""Containers that average gradients over ranks: naive, flat, overlapped and bucketed."""
