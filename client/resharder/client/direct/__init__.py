"""The direct path: transfers from trainer GPUs to worker GPUs by one plan, without gathering tensors on the way.

`resharder.client.gpu.schedule` computes what a process sends and receives in each round. `rendezvous` forms a group (`base`: the
interface, `gloo` on CPUs, `nccl_group` on GPUs), `transfer` runs a schedule over it, and `links` keeps both from version to
version. `sender` is a rank's side; `gpu/box_digests` digests the boxes that it sends. The code is the same on CPUs
and GPUs.
"""
