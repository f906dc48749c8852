"""What can be seen of the engine: recordings of the schedule, timelines, summaries, advice. Torch-free."""
