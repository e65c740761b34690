"""The training program around the engine: flags, model, data, optimizer, checkpoints, logging, loop."""
