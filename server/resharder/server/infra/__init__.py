"""Building blocks that do not depend on models: file operations, failpoints, change signals, backoff, journals, the event log."""
