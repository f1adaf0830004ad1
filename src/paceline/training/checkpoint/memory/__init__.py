"""The newest state of a run in its hosts' memory, each part with a replica on the next host."""
