"""One module per group of questions. Each turns records into report blocks."""
