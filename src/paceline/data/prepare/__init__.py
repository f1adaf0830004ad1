"""Preparation of token shards from documents: a map, a sort and a copy, all in pure tasks.

Tasks read files and write files, and their results depend on nothing else. So the shards are
identical for every engine and number of workers, and after any crash.
"""
