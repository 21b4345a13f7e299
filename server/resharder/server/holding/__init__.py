"""What a host fetches and holds of versions: the daemon for its host, a node for its own."""
