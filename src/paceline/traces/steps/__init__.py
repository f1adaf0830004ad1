"""Where each step's time went."""
