"""Where README's figures come from."""
