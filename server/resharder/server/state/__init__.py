"""State that the daemon reasons about: frozen records and enums of versions, servers and fleets, and the errors of the daemon."""
