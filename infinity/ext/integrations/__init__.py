"""Other libraries' training loops, one file per library, and PEFT's modules."""
