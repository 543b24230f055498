"""Changes to logits before a token is chosen: masks, biases, bans and penalties, in that order, read from the rows."""
