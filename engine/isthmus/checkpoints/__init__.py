"""Where models come from: directories, GGUF files, named models and the Hugging Face hub.

`isthmus.checkpoints.open.open_checkpoint` finds a model, whatever its kind; `isthmus.checkpoints.named` lists and
fetches the models that come as Python packages, without importing torch.
"""
