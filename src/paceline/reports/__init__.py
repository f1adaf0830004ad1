"""From records to tables and pictures. Nothing here runs a measurement."""
