"""Layouts of a model over a cluster: what each would take."""
