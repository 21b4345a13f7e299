"""Messages made of boxes, and chunk frames."""
