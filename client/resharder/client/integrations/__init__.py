"""Resharder behind the interfaces of training frameworks: one file for each framework, imported by its programs only."""
