"""`python -m nanovllm`: the same as the command `nanovllm`."""

import sys

from nanovllm.cli import main

if __name__ == "__main__":  # processes of tensor-parallel ranks import this file under another name
    sys.exit(main())
