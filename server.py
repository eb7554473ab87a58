"""`python server.py MODEL …` is `tpu-serve serve MODEL …`."""

import sys

from tpu_serve.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
