"""Schedules as data: builders make them, one validator checks them, a simulator times them, passes lower them.

Pure Python: no torch, no globals, no clock, no unseeded randomness.
"""
