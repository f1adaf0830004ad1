"""Training data: from text files to token shards, and from token shards to batches.

Everything here is a pure function of files and numbers. A prepared dataset does not depend on the
number of workers; the sample at a position of the stream does not depend on the number of ranks.
"""
