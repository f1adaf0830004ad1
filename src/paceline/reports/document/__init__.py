"""Reports as trees of blocks, rendered as HTML or Markdown."""
