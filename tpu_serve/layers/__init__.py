"""Building blocks of models: pure functions on arrays."""
