"""Reading a kernel's compiled TPU schedule on a machine without a TPU.

The TPU compiler runs on any x86 machine and can write down the final program of every kernel: one line a cycle, including the
cycles in which the core waits for its own units. This package compiles a function for a named topology, reads that program and
executes its scalar half (control flow, addresses, DMA starts, semaphores) with the scalar operands a real call would pass.

Exact, for the compiled program and the operands given, as long as no branch depends on a value that only the vector unit knows:
  the number of instruction bundles and of loop trips, every DMA with its bytes, matrix-unit instructions, spills and fills.
Modelled, and never to be called measured: when a DMA completes, what the links carry, and therefore stalls and microseconds.
  The core is device 0, and every other device is assumed to run the same program at the same time with the same operands: what it
  sends to others at some cycle, others are taken to send to it at that cycle.
Not seen: XLA's collectives, the SparseCore, the time of copies beside the kernels, bank conflicts of HBM, contention and skew between
  devices, clock changes, launches. A report names those of them that its program has, see `report.untimed`.

    topology  where to compile for       compiler  compile, in this process
    schedule  the program's text parsed  memory, engines, translate, execution  the program run
    findings  what the run tells         report, worker  a fresh process for each program
"""
