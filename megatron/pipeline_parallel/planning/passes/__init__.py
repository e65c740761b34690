"""Passes: Schedule in, Schedule out."""
