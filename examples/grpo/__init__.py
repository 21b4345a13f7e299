"""Whole RL job on one CPU box: GRPO with two Megatron ranks, a daemon and a vLLM server. `make example`."""
