"""Layout search: enumerates candidates, ranks those that fit, and explains the choice."""
