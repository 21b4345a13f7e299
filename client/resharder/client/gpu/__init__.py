"""GPU kernels, streams and pinned memory, and the copies and digests built on them."""
