"""Which samples a batch has, and what a loop waits for."""
