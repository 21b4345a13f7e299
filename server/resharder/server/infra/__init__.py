"""Building blocks without knowledge of models: file operations, failpoints, change signals, backoff, journals, the event log."""
