"""Trainer SDK: `connect`, publishers and handles, filling a model, lending GPUs to servers."""
