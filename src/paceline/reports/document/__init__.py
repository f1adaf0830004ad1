"""A report as a tree of blocks, written as HTML or Markdown."""
