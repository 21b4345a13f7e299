"""The main job from end to end: `make demo`."""
