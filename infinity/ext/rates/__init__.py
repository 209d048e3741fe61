"""Measured rates of this machine's memory, checksums and disks."""
