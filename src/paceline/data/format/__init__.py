"""A prepared dataset on disk or in S3: shards of tokens and one manifest."""
