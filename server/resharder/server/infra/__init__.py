"""Building blocks that do not depend on models: file operations, change signals, backoff, journals, the event log."""
