"""From files to documents: text, JSON Lines, gzip and zstd of these, Parquet, Megatron's files."""
