"""Themes: the benchmarks that are installed. Those of the engine itself are in a checkout."""

THEMES = {
    "machine": "infinity.tools.bench.machine",
    "io": "infinity.tools.bench.io",
    "adam": "infinity.tools.bench.adam",
    "copy": "infinity.tools.bench.copies",
}
