"""The direct path: trainer GPUs to worker GPUs by one plan, nothing gathered.

`copies` is a plan's part for one process, `schedule` what it sends and receives in which order, `pack` moves boxes in and out of
buckets, `group` is the process group, `transfer` runs it all. With gloo on CPUs it is the same code.
"""
