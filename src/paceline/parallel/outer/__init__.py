"""Local steps in every site, and rare, compressed, overlapped averages over a slow link."""
