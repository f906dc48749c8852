"""Model definitions, what they need of a config, and how their weights are loaded."""
