"""Reads checkpoints of torch, FSDP and DeepSpeed."""
