"""Huge pages for the rivals: variables of the environment that they read as they start."""

# torch's tensors on the processor get them, as our memory does; it is read when torch is imported
HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
