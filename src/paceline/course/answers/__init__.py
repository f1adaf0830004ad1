"""One module per group of questions: records in, blocks of a document out."""
