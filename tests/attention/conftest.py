"""Without a GPU the Triton kernels of this folder run in Triton's interpreter, to be chosen before the import."""

import os
import sys

import torch

if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"
