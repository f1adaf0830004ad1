"""Layouts of a run: what its config asks for, and the model laid out so."""
