"""One home of a weight for all ranks of a host, whose processors they share, and compressed gathers
between hosts."""
