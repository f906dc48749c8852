"""What tests need of the engine's side: the NULL platform, tiny random checkpoints, a reference scheduler."""
