"""Pictures of scaling laws: fits of a sweep, and how they held beyond it."""
