"""What a run writes: checkpoints, metrics, trackers, the final model."""
