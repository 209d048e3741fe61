"""The computer's memory, disks, processors and devices, and the accounting of their use."""
