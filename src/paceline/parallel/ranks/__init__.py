"""Which rank this is, how ranks start and meet, and the collectives between them."""
