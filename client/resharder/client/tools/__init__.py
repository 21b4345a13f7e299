"""Tools behind commands: import of a checkpoint, check of a parallel layout, diagnosis of a host."""
