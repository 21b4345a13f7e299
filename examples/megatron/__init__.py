"""Megatron trainer on CPUs that publishes each step: `torchrun --standalone --nproc-per-node 2 -m examples.megatron.train`."""
