"""Runs a schedule on real ranks: `TrainingIteration` and what it stands on."""
