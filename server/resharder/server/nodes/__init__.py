"""The daemon's side of versions on many hosts: which node holds which pieces, and from which node each is taken."""
