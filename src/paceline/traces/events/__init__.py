"""Reading traces of any size into columns."""
