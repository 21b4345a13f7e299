"""Mutation tests of the family tables: one edit of the source at a time, and the tests that should fail on it."""
