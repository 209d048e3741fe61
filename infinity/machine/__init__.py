"""Describes what the computer has: memory, disks, processors, devices, and the books kept on them."""
