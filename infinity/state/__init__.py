"""The state of a model: units, shards and their arrays, and the parameters that represent them."""
