"""Tool calls in a model's text: one format a file, each written as a grammar that reads its text in pieces."""
