"""Layouts of megatron-core models, live or built on the meta device."""
