"""Publishers and slots: registration, uploads and seals, up to a READY version."""
