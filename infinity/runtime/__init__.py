"""Runs while the model runs: fetches units ahead, saves activations, hooks modules, owns the engine."""
