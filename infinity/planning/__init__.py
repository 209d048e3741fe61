"""Plans homes of arrays, sizes of buffers, and transfers. Allocates and moves nothing; measures
only free memory and disk space."""
