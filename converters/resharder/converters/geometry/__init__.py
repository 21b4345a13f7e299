"""Boxes and plans: pure functions over layouts."""
