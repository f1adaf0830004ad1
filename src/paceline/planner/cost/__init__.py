"""Memory and step time of many layouts at once, vectorised."""
