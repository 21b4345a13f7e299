"""The direct path: trainer GPUs to worker GPUs by one plan, nothing gathered.

`converters.copies` is a plan's part for one process; `schedule` says what that sends and receives in which order, `pairs` what
two exchange, cut into `tiles`; `pack` moves tiles in and out of buckets; `group` is a process group of its own, `transfer` runs
it all, `proof` digests what arrives. With gloo on CPUs it is the same code.
"""
