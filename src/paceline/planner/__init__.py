"""Planning of parallel layouts: search, framework calibrations and goodput on a cluster."""
