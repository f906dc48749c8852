"""The process that owns a device: model, cache, inputs, sampling. Knows no device by name."""
