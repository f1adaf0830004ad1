"""What the report measures: cases by preset."""
