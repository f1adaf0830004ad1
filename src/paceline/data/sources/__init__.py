"""Documents from files: text and JSON Lines (also gzip or zstd), Parquet, Megatron datasets."""
