"""What the TPU compiler makes of whole models: the program of a step, compiled ahead of time for slices that are not here, read and walked.

    published  which models, on which slices          cells    what is compiled
    step       what a step is asked to do, and with it how often its loops turn
    target     a cell's program and its operands      worker   compiles it in a process of its own, and reads it
    hlo        the program's text                     parts    which part of the model an instruction belongs to
    timeline   the program walked in its order        bound    what no program can beat
    programs   all of them, one after the other       table    what is printed

Three kinds of numbers, and none is measured on a TPU:
  compiled    the compiler's own: bytes of temporaries and code, collectives, seconds to compile (those of this machine).
  simulated   from executing the compiled schedules of kernels and fusions, see `bench.compiled`; with a modelled memory and modelled links.
  calculated  from shapes and the chip's peak rates: collectives, copies beside the kernels, and the bound.
"""
