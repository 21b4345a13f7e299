"""Versions on many hosts: pieces, which node holds which of them, and from which node each is taken."""
