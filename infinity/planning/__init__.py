"""Decides what lies where and when it moves. Nothing is allocated or moved; of the machine only what is free is asked."""
