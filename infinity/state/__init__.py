"""The state of a model: units, flat params and their arrays, and the parameters that represent
them."""
