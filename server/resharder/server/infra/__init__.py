"""Building blocks without knowledge of models: file operations, failpoints, change signals, the event log."""
