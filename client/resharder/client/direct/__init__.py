"""The direct path: transfers from trainer GPUs to worker GPUs by one plan, with nothing gathered.

`resharder.client.gpu.schedule` decides what a process sends and receives in which round. `rendezvous`
forms a group (`base`: the interface, `gloo` on CPUs, `nccl_group` on GPUs), `transfer` runs a schedule
over it, and `links` keeps both from version to version. `sender` is a rank's side; `sent_digests`
computes the digests of what it sends. The code is the same on CPUs and GPUs.
"""
