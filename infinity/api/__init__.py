"""Holds one file for each public verb."""
