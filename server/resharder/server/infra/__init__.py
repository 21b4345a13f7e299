"""Building blocks without knowledge of models: file operations, change signals, backoff, journals, the event log."""
