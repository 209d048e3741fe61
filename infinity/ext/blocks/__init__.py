"""How a block runs: in micro-batches, with its activations kept, sent or recomputed."""
