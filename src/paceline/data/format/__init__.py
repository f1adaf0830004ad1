"""The format of a prepared dataset on disk or in S3: token shards and one manifest."""
