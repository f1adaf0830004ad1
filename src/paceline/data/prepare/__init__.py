"""From documents to token shards: a map, a sort and a copy, whose every task is a pure function.

Tasks read files and write files, and nothing else decides their results. That is why the shards
are the same for every engine and number of workers, and after any crash.
"""
