"""The benchmark suites behind the report: cases by preset."""
