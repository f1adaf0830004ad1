"""Checkpoints that know whether they are intact.

A checkpoint is a directory ``step-00000200`` of safetensors files, each written by one rank, and a
``manifest.json`` that is written last: it holds a digest of every byte of every file, taken before
the bytes left memory. What is read is compared with it while it is read. No file is ever unpickled.

Nothing is imported here: looking at checkpoints does not load torch, saving and loading them does.
"""
