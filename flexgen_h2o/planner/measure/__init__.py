"""Measures this machine's hardware profile, one file a subject, and keeps it for later runs."""
