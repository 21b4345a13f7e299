"""Reading versions: from a folder or from the daemon."""
