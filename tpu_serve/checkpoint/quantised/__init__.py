"""Quantised checkpoints, read as if they were not quantised.

`folder.py` is the view of a folder, `scheme.py` what config.json says of it; each other module reads one family of formats:

  scaled.py   8-bit values with a scale per tensor, output channel, group or block (FP8, int8)
  packed.py   4- and 8-bit integers packed by compressed-tensors
  gptq.py, awq.py     integers packed by the tools of those names
  mxfp4.py, nvfp4.py  4-bit floats with a scale per 32 and per 16 values

Letters: O outputs, N inputs of a linear layer, whose weight is [O, N]; G groups along N that share a scale; E experts.
"""
