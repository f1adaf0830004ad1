"""Planning of parallel layouts: predicted memory, step time and goodput on a cluster."""
