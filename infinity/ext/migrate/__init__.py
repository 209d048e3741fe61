"""Reads configurations of DeepSpeed and Accelerate, and recognises those of other tools."""
