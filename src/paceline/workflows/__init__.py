"""What runs several parts in turn. Stays empty, so that parsing a command loads none of it."""
