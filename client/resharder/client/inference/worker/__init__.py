"""A worker process's part: stage a version, apply it, verify it, sleep and wake."""
