"""Custom ops of the decoding step: one launch on a GPU with Triton, plain torch elsewhere.

Each is opaque to `torch.compile`, reads no device tensor on the host, and may be captured in a CUDA graph and replayed
with new contents in the same buffers, once it has run outside of one (Triton compiles at the first call of a shape).
"""

from __future__ import annotations

import functools
import importlib.util


@functools.cache
def has_triton() -> bool:
    """Whether the fused kernels can be imported here."""
    return importlib.util.find_spec("triton") is not None
