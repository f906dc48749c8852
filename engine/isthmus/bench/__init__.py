"""Load generators: what measures an engine from outside."""
