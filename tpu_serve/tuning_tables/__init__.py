"""Tuned choices as data: one JSON file per chip and kernel, `<chip>/<kernel>.json`, a row a line.

    typed   dataclasses from JSON and back, strictly     table   what a file holds     files   where they lie, and who goes before whom

What a key and a value are is the kernel's business: both are dataclasses that the caller names. Nothing here imports a kernel.
"""
