"""The direct path's coordinator: offers of versions, groups of members, turns."""
