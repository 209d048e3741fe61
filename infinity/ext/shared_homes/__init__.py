"""One home of a weight for all ranks of a host, and compressed gathers between hosts."""
