"""Checkpoints that detect their own corruption.

A checkpoint is a directory ``step-00000200`` of safetensors files, each written by one rank, and a
``manifest.json`` that is written last. The manifest has digests of every byte of every file, taken
before the bytes left memory. Every read is verified against them. No file is ever unpickled.

Nothing is imported here: inspecting checkpoints does not load torch; saving and loading them does.
"""
