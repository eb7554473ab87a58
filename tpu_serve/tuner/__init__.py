"""`tpu-serve tune`: finds configs for the fused kernel's problems and writes them to tables.

jobs        which problems                    search      which configs, in which order        estimate   how long they may take, calculated
trial       what is tried, what came of it    run         a job from its first config to its row
compiling   tries with the TPU's compiler     measuring   tries on a TPU, each in a process of its own: process, worker; with what: inputs
journal     every try, kept                   rows        rows into tables                     page       a report to look at

This process never uses a device: only one process may have a TPU, and that is the one that measures.
"""
