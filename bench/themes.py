"""Themes: the name of each benchmark, and the module or the function that measures it."""

THEMES = {
    "io": "bench.io",
    "adam": "bench.adam",
    "update": "bench.update",
    "pool": "bench.pool",
    "copy": "infinity.bench.copies",
    "step": "bench.step",
}
APART = {  # not in "all": a quarter of an hour or more each, or a GPU
    "train": "bench.endtoend",
    "train_ways": "bench.endtoend:measure_ways",
    "train_1b": "bench.endtoend:measure_large",
    "tiling": "bench.tiling",
    "startup": "bench.startup",
    "packed": "bench.packed",
    "experts": "bench.experts",
    "rules": "bench.rules",
    "optimizers": "bench.optimizers",
    "touches": "bench.touches",
    "disks": "bench.disks",
    "cluster": "bench.cluster",
    "checkpoint": "bench.checkpoint",
    "ranks": "bench.ranks",
    "meetings": "bench.meetings",
    "tensor_parallel": "bench.tensor_parallel",
    "pipeline": "bench.pipeline",
    "integrations": "bench.integrations",
    "gpu": "bench.gpu",
    "gpu_train": "bench.gpu_train",
    "past_host": "bench.past_host",
    "late_device": "bench.late_device",
}
