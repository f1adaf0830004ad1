"""Vectorised cost model: memory and step time of many layouts at once."""
