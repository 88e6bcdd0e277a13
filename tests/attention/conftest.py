"""Where there is no GPU, Triton's kernels run in its interpreter; it must know before they are made."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
