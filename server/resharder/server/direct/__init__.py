"""Coordination of the direct path: offers of versions, groups of members, turns."""
