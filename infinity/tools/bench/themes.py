"""Themes: the benchmarks that are installed. Those of the engine itself are in a checkout."""

THEMES = {
    "machine": "infinity.tools.bench.machine",
    "io": "infinity.tools.bench.io",
    "adam": "infinity.tools.bench.adam",
    "copy": "infinity.tools.bench.copies",
    "gpu": "infinity.tools.bench.gpu",
}
IN_ALL = ("machine", "io", "adam", "copy")  # gpu needs one
