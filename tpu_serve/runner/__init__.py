"""The border between sequences and arrays."""
