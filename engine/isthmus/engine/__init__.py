"""From prompts to requests, steps, and outputs."""
