"""Linear methods: how a linear layer stores its weight, fills it from a checkpoint, and applies it."""
