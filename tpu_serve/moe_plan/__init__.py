"""How a mixture-of-experts layer runs, decided before anything is traced, and why. Plain Python: nothing here needs JAX.

layer       what is asked                      key        a problem as a row of a table names it
lookup      which row answers                  path       kernel or XLA, by token count
rows        a chip's tables, read              merge      new rows, written into a folder's table
traffic     bytes, calculated                  plan       the answer for one token count
planner     answers for all token buckets of a server, kept, logged and counted
text        answers as a table to read         portable   which of XLA's paths, on a CPU
"""
