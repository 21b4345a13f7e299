"""The worker side: stage, apply and verify a version, sleep and wake."""
