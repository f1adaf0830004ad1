"""What the report measures: cases by preset, and the report's build."""
