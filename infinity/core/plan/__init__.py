"""Plans homes of arrays and sizes of buffers. Allocates and moves nothing; measures only free
memory and disk space."""
